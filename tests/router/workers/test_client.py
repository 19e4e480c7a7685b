from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import join_digests
from tandem.protocol.errors import IncompatiblePeer, WorkerError
from tandem.protocol.messages import (
    POOL_PLACE,
    BlockEvents,
    Eviction,
    Generate,
    Heartbeat,
    Introduce,
    KvActions,
    LinkLoad,
    PeerAddress,
    Preemption,
    Role,
    SequenceDelta,
    SnapshotRequest,
    StepStats,
    WorkerLoad,
    WorkerState,
    encode_message,
)
from tandem.protocol.sampling import SamplingParams
from tandem.router.callback_scheduler import CallbackScheduler
from tandem.router.streams import DeltaQueue
from tandem.runtime.curve import make_keys
from tests.support.fake_worker import FakeCluster, FakeWorker, digests, fake_cluster, silent
from tests.support.waiting import eventually


def make_generate(request_id: str) -> Generate:
    return Generate(request_id=request_id, token_ids=[1], sampling=SamplingParams(max_tokens=2))


def make_events(sequence: int, stored: list[bytes], *, worker_id: str = "d", place: str = POOL_PLACE) -> BlockEvents:
    run = join_digests(digests(stored))
    return BlockEvents(worker_id=worker_id, epoch=1, sequence=sequence, stored=run, removed=b"", place=place)


def make_queue() -> DeltaQueue[SequenceDelta]:
    return DeltaQueue(CallbackScheduler())


def asked(cluster: FakeCluster, request_id: str = "r0", worker_id: str = "d") -> DeltaQueue[SequenceDelta]:
    """What a worker says of a request that it has got."""
    queue = make_queue()
    cluster.client.open_sub_request(worker_id, make_generate(request_id), queue)
    return queue


async def error_of(queue: DeltaQueue[SequenceDelta], timeout_s: float = 5.0) -> WorkerError:
    """The error that ends a request without tokens."""
    with pytest.raises(WorkerError) as raised:
        await asyncio.wait_for(queue.take(), timeout_s)
    return raised.value


async def test_a_worker_joins_with_what_it_has_cached() -> None:
    async with fake_cluster() as cluster:
        worker = FakeWorker("d", Role.DECODE)
        worker.cached, worker.sequence = [b"x", b"y"], 7
        await cluster.add(worker)
        assert [w.state for w in cluster.registry] == [WorkerState.READY]
        await eventually(lambda: cluster.index.num_blocks("d") == 2)
        worker.send(make_events(8, [b"z"]))
        await eventually(lambda: cluster.index.num_blocks("d") == 3)


async def test_of_workers_that_share_a_store_one_tells_of_it_until_it_is_gone() -> None:
    async with fake_cluster() as cluster:
        tiers = {"host": "", "disk": "node:/kv"}
        for number, worker_id in enumerate(("a", "b")):
            worker = FakeWorker(worker_id, Role.COLOCATED, silent, tiers=tiers)
            worker.cached, worker.stored = [b"p"], [b"x", b"y", b"z"][: 2 + number]
            await cluster.add(worker)
        a, b = cluster.workers["a"], cluster.workers["b"]
        await eventually(lambda: cluster.index.num_blocks("b/host") == 3)
        assert [cluster.index.num_blocks(name) for name in ("a", "a/host", "a/disk", "b/disk")] == [1, 2, 2, 0]
        (request,) = b.of_type(SnapshotRequest)
        assert isinstance(request, SnapshotRequest)
        assert request.places == ["host", "pool"]
        b.send(make_events(1, [b"q"], worker_id="b", place="disk"))  # heard, and not counted twice
        a.send(make_events(1, [b"q"], worker_id="a", place="disk"))
        await eventually(lambda: cluster.index.num_blocks("a/disk") == 3)
        assert cluster.index.num_blocks("b/disk") == 0
        cluster.client.mark_dead("a", "test")
        await eventually(lambda: cluster.index.num_blocks("b/disk") == 3)
        assert [cluster.index.num_blocks(name) for name in ("a", "a/host", "a/disk")] == [0, 0, 0]


async def test_steps_teach_the_cost_model_and_beats_carry_the_load() -> None:
    async with fake_cluster(decode=silent) as cluster:
        worker = cluster.workers["d"]
        worker.output(stats=StepStats(duration_s=0.05, num_prefill_tokens=10, prefill_attention=50.0))
        await eventually(lambda: cluster.costs.steps("cpu-1").num_measurements == 1)
        state = cluster.registry.get("d")
        assert state is not None

        def has_beaten() -> bool:
            worker.beat(WorkerLoad(num_waiting=5))  # repeatedly: a subscription takes a moment to arrive
            return state.load.num_waiting == 5

        await eventually(has_beaten)
        assert state.progress_age_s == 0.5


async def test_beats_teach_what_handoffs_cost_each_of_them_once() -> None:
    async with fake_cluster(prefill=silent, decode=silent) as cluster:
        worker, link = cluster.workers["p"], cluster.costs.transfer("cpu-1", "cpu-1")
        taught: list[tuple[float, float]] = []
        link.observe = lambda num_bytes, duration_s: taught.append((num_bytes, duration_s))  # type: ignore[method-assign]
        num_beats = 0

        async def beat(num_handoffs: int, exposed_bytes: int, exposed_s: float, peer_id: str = "d") -> None:
            """Send it until it has arrived."""
            nonlocal num_beats
            num_beats += 1
            load = LinkLoad(
                peer_id=peer_id, num_handoffs=num_handoffs, exposed_bytes=exposed_bytes, exposed_s=exposed_s
            )

            def has_arrived() -> bool:
                worker.beat(WorkerLoad(num_waiting=num_beats), load)
                state = cluster.registry.get("p")
                return state is not None and state.load.num_waiting == num_beats

            await eventually(has_arrived)

        await beat(0, 0, 0.0)
        await beat(2, 200, 0.5)
        await beat(3, 500, 0.75)
        await beat(1, 7, 0.125)  # the peer was replaced: nobody knows how many came before
        await beat(2, 16, 0.375)
        await beat(9, 9, 0.5, peer_id="gone")
        assert taught == [(100.0, 0.25), (300.0, 0.25), (9.0, 0.25)]


async def test_deltas_reach_the_request_they_belong_to() -> None:
    async with fake_cluster(decode=silent) as cluster:
        queues = {"a": make_queue(), "b": make_queue()}
        send = cluster.client.open_sub_request
        sub_requests = {name: send("d", make_generate(name), queue) for name, queue in queues.items()}
        worker = cluster.workers["d"]
        await eventually(lambda: len(worker.of_type(Generate)) == 2)
        worker.send_raw(b"this is not a message")
        worker.output(SequenceDelta("b", 0, [2]), SequenceDelta("gone", 0, [9]), SequenceDelta("a", 0, [1]))
        for request_id, token_id in (("a", 1), ("b", 2)):
            (delta,) = await asyncio.wait_for(queues[request_id].take(), 5)
            assert delta.token_ids == [token_id]
            sub_requests[request_id].cancel()
            sub_requests[request_id].cancel()
        assert cluster.client.num_open_sub_requests == 0


async def test_a_worker_speaks_in_its_own_name_only() -> None:
    async with fake_cluster(decode=silent) as cluster:
        worker = cluster.workers["d"]
        other = await cluster.add(FakeWorker("e", Role.DECODE, silent))
        worker.send(make_events(1, [b"a"], worker_id="e"))
        worker.send_raw(b"this is not a message")
        worker.send(make_events(1, [b"b"]))
        await eventually(lambda: cluster.index.num_blocks("d") == 1)
        assert cluster.index.num_blocks("e") == 0
        state, others = cluster.registry.get("d"), cluster.registry.get("e")
        assert state is not None
        assert others is not None

        def is_told() -> bool:
            worker.beat(WorkerLoad(num_waiting=5))
            forged = Heartbeat(worker_id="e", epoch=1, progress_age_s=0.0, load=WorkerLoad(num_waiting=9))
            worker.beat_raw(encode_message(forged))
            return state.num_dropped_here.get("impostor", 0) > 1

        await eventually(is_told)
        assert (state.num_dropped_here["malformed"], others.load.num_waiting) == (1, 0)
        assert not others.num_dropped_here
        assert other.address.public_key != worker.address.public_key


async def test_operators_are_shown_why_kv_left_a_worker() -> None:
    lost = Preemption(request_id="r", reason="no free block", num_blocks=2, num_tokens=7, age_s=0.5)
    gone = Eviction(place="host", reason="full", num_blocks=3, age_s=1.5)
    actions = KvActions(num_preemptions={lost.reason: 1}, preemptions=[lost], evictions=[gone])
    async with fake_cluster(decode=silent) as cluster:
        state, worker = cluster.registry.get("d"), cluster.workers["d"]
        assert state is not None
        assert (await cluster.flow.pools())["roles"]["decode"][0]["actions"] is None

        def is_told() -> bool:
            beat = Heartbeat(worker_id="d", epoch=1, progress_age_s=0.0, load=WorkerLoad(), actions=actions)
            worker.beat_raw(encode_message(beat))
            return state.actions == actions

        await eventually(is_told)
        shown = (await cluster.flow.pools())["roles"]["decode"][0]["actions"]
    assert shown["preemptions"] == [msgspec.to_builtins(lost)]
    assert (shown["evictions"], shown["num_preemptions"]) == ([msgspec.to_builtins(gone)], {"no free block": 1})


async def test_a_message_that_cannot_be_handled_ends_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_cluster(decode=silent) as cluster:
        worker = cluster.workers["d"]
        queues = {"a": make_queue(), "b": make_queue()}
        send = cluster.client.open_sub_request
        sub_requests = {name: send("d", make_generate(name), queue) for name, queue in queues.items()}
        with monkeypatch.context() as patch:
            patch.setattr(cluster.registry, "note_step", lambda *_: 1 / 0)
            worker.output(SequenceDelta("a", 0, [1]))
            await error_of(queues["a"])
        worker.output(SequenceDelta("b", 0, [2]))
        assert await asyncio.wait_for(queues["b"].take(), 5), "the worker goes on"
        sub_requests["b"].cancel()


async def test_workers_are_introduced_to_each_other() -> None:
    async with fake_cluster() as cluster:
        one = await cluster.add(FakeWorker("one", Role.DECODE))
        two = await cluster.add(FakeWorker("two", Role.DECODE))
        await eventually(lambda: len(one.of_type(Introduce) + two.of_type(Introduce)) == 3)
        assert one.of_type(Introduce) == [Introduce(peers=[]), Introduce(peers=[two.address])]
        assert two.of_type(Introduce) == [Introduce(peers=[one.address])]


@pytest.mark.parametrize("change", [{"public_key": ""}, {"endpoint": "nowhere"}], ids=str)
async def test_an_address_that_is_none_is_reported(change: dict[str, str]) -> None:
    async with fake_cluster() as cluster:
        address = PeerAddress("n", 1, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1", make_keys().public)
        with pytest.raises(WorkerError, match="cannot be connected to"):
            await cluster.client.add_worker(msgspec.structs.replace(address, **change))


async def test_a_dead_worker_fails_all_its_requests_at_once_and_leaves_nothing() -> None:
    async with fake_cluster(decode=silent) as cluster:
        queues = [asked(cluster, f"r{i}") for i in range(3)]
        cluster.workers["d"].send(make_events(1, [b"a"]))
        await eventually(lambda: len(cluster.index) == 1)
        asyncio.get_running_loop().call_soon_threadsafe(cluster.client.mark_dead, "d", "exit code -9")
        errors = [await error_of(queue, 1) for queue in queues]
        assert all("exit code -9" in str(error) for error in errors)
        assert len(set(map(id, errors))) == 3
        assert (len(cluster.registry), len(cluster.index), cluster.client.num_open_sub_requests) == (0, 0, 0)
        with pytest.raises(WorkerError, match="worker d is gone"):
            cluster.client.open_sub_request("d", make_generate("late"), make_queue())
        cluster.client.mark_dead("d", "again")


async def test_a_worker_without_heartbeats_is_marked_until_it_is_heard() -> None:
    config = RouterConfig(worker_timeout_s=2.0)
    async with fake_cluster(prefill=silent, decode=silent, config=config, heartbeat_interval_s=0.1) as cluster:
        worker = cluster.registry.get("d")
        assert worker is not None
        beating = asyncio.create_task(beat({cluster.workers["p"]: 0.0}))
        try:
            await eventually(lambda: worker.is_silent)
            assert [one.worker_id for one in cluster.registry if one.is_silent] == ["d"]
            beating.cancel()
            beating = asyncio.create_task(beat(dict.fromkeys(cluster.workers.values(), 0.0)))
            await eventually(lambda: not worker.is_silent)
            assert worker.state == WorkerState.READY
        finally:
            beating.cancel()


async def test_a_worker_that_lives_but_does_not_get_on_is_given_up() -> None:
    config = RouterConfig(worker_timeout_s=0.3, worker_stall_timeout_s=20.0)
    async with fake_cluster(prefill=silent, decode=silent, config=config) as cluster:
        queue, workers = asked(cluster), cluster.workers
        beating = asyncio.create_task(beat({workers["p"]: 19.0, workers["d"]: 21.0}))
        assert "stuck: its step or loop began 21.0 s ago" in str(await error_of(queue))
        assert [worker.worker_id for worker in cluster.registry] == ["p"]
        beating.cancel()


async def beat(ages_s: dict[FakeWorker, float]) -> None:
    """Send heartbeats of these workers, for ever."""
    while True:
        for worker, age_s in ages_s.items():
            worker.beat(WorkerLoad(), progress_age_s=age_s)
        await asyncio.sleep(0.02)  # the interval of heartbeats, far below the timeout


@pytest.mark.parametrize("fails", ["a listener", "the index"])
def test_requests_end_and_the_watch_goes_on_whatever_raises(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        config, heard = RouterConfig(worker_timeout_s=0.3), list[WorkerState]()
        async with fake_cluster(prefill=silent, decode=silent, config=config) as cluster:

            def raise_for_d(*names: object) -> None:
                raise RuntimeError("not my day")

            if fails == "a listener":
                cluster.registry.listen(raise_for_d)
            else:
                monkeypatch.setattr(cluster.index, "remove_worker", raise_for_d)
            cluster.registry.listen(lambda change: heard.append(change.worker.state))
            queues = [asked(cluster, f"r-{worker_id}", worker_id) for worker_id in cluster.workers]
            # Both are silent: the watch outlives the failure of the first.
            errors = [await error_of(queue, 10) for queue in queues]
            assert all("silent for" in str(error) for error in errors)
            assert (len(cluster.registry), cluster.client.num_open_sub_requests) == (0, 0)
            assert heard == [WorkerState.DEAD] * 2, "each listener is called, whatever another one does"
            assert cluster.registry.num_listener_failures == (2 if fails == "a listener" else 0)
            monkeypatch.undo()

    asyncio.run(scenario())
    assert "not my day" in caplog.text


async def test_a_restarted_worker_replaces_its_earlier_epoch() -> None:
    async with fake_cluster(decode=silent) as cluster:
        old, queue = cluster.workers["d"], asked(cluster)
        await cluster.add(FakeWorker("d", Role.DECODE, epoch=2))
        assert "replaced by epoch 2" in str(await error_of(queue))
        assert [w.card.address.epoch for w in cluster.registry] == [2]
        await old.close()


async def test_a_worker_that_cannot_serve_beside_the_others_is_refused() -> None:
    async with fake_cluster(decode=silent) as cluster:
        stranger = FakeWorker("x", Role.DECODE, namespace=b"other namespace!")
        with pytest.raises(IncompatiblePeer, match="namespace is b'other namespace!'"):
            await cluster.add(stranger)
        with pytest.raises(IncompatiblePeer, match="by 'cpu avx2', that of worker d by ''; TANDEM_CPU_KERNELS names"):
            await cluster.add(FakeWorker("z", Role.DECODE, kernels="cpu avx2"))
        with pytest.raises(IncompatiblePeer, match="wire version 1"):
            await cluster.add(FakeWorker("y", Role.DECODE, refusal="I do not speak wire version 1"))
        assert [w.worker_id for w in cluster.registry] == ["d"]


async def test_a_worker_that_does_not_join_is_not_waited_for() -> None:
    async with fake_cluster(config=RouterConfig(worker_timeout_s=0.2)) as cluster:
        with pytest.raises(WorkerError, match="did not answer within worker_timeout_s"):
            await cluster.add(FakeWorker("m", Role.DECODE, is_mute=True))
    async with fake_cluster() as cluster:
        address = PeerAddress("n", 1, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1", make_keys().public)
        joining = asyncio.create_task(cluster.client.add_worker(address))
        await asyncio.sleep(0)
        cluster.client.mark_dead("n", "exit code 1")
        with pytest.raises(WorkerError, match="exit code 1"):
            await asyncio.wait_for(joining, 1)
        assert len(cluster.registry) == 0


async def test_removing_a_worker_waits_for_what_it_runs() -> None:
    async with fake_cluster(decode=silent) as cluster:
        queue = make_queue()
        sub_request = cluster.client.open_sub_request("d", make_generate("r0"), queue)
        removing = asyncio.create_task(cluster.client.remove_worker("d"))
        state = cluster.registry.get("d")
        assert state is not None
        await eventually(lambda: state.state == WorkerState.DRAINING)
        assert not removing.done()
        sub_request.close()
        await asyncio.wait_for(removing, 1)
        assert (len(cluster.registry), queue.num_items) == (0, 0)


async def test_removing_a_worker_waits_no_longer_than_the_drain_timeout() -> None:
    async with fake_cluster(decode=silent, config=RouterConfig(drain_timeout_s=0.1)) as cluster:
        queue = asked(cluster)
        async with asyncio.timeout(20):  # the worker never says anything
            await cluster.client.remove_worker("d")
        await error_of(queue)
        assert len(cluster.registry) == 0


async def test_a_router_that_stood_still_takes_no_worker_for_dead() -> None:
    config = RouterConfig(worker_timeout_s=0.4)
    async with fake_cluster(decode=silent, config=config) as cluster:
        worker = cluster.workers["d"]
        time.sleep(1.0)  # noqa: ASYNC251 - as where one long call keeps the event loop; what workers say waits in the sockets
        for _ in range(10):
            await asyncio.sleep(0.05)  # the interval of heartbeats; ten of them take longer than the timeout
            assert cluster.registry.get("d") is not None
            worker.beat(WorkerLoad())
        await eventually(lambda: cluster.registry.get("d") is None)  # it says no more
