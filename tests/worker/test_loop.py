"""A worker's loop: control calls, failures, heartbeats, events, late and repeated messages."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tandem.engine.engine import Engine
from tandem.engine.sampling import sampler
from tandem.engine.sequence import Sequence
from tandem.engine.sequence_factory import SequenceFactory
from tandem.kv_transfer.transport.base import Notification
from tandem.kv_transfer.transport.in_process import InProcessHub, InProcessTransport, InProcessWrite
from tandem.protocol.digest import split_digests
from tandem.protocol.errors import ServingError, WorkerError
from tandem.protocol.messages import (
    CANCELLED,
    INVALID_REQUEST,
    WIRE_VERSION,
    BlockEvents,
    BlockSnapshot,
    Cancel,
    Decode,
    Generate,
    Heartbeat,
    Hello,
    Introduce,
    LeaseClosed,
    LeaseGrant,
    LeaseRefused,
    LeaseRequest,
    LeaseRevoked,
    Message,
    PeerAddress,
    PeerHello,
    PeerRefused,
    Prefill,
    ReadRequest,
    RequestFailed,
    Role,
    SequenceDelta,
    SnapshotRequest,
    StepOutput,
    Welcome,
    WorkerState,
    WriteBegun,
)
from tandem.protocol.sampling import SamplingParams
from tandem.runtime.curve import make_keys
from tandem.worker import loop
from tandem.worker.loop import Worker
from tandem.worker.sockets import WorkerSockets
from tests.support.cluster_harness import (
    DEADLINE_S,
    PAIR,
    Client,
    Cluster,
    Oracle,
    RunningWorker,
    make_prompt,
    running_cluster,
    worker_config,
)
from tests.support.judged_hub import Verdict
from tests.support.late_device import LateDevice
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.cluster

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
PEER = PeerAddress("peer", 1, "tcp://127.0.0.1:9", "tcp://127.0.0.1:9")


@pytest.fixture
def client(worker: Worker) -> Any:
    client = Client(worker)
    yield client
    client.close()


def test_a_router_of_another_wire_version_is_refused(client: Client) -> None:
    client.send(Hello(router_id="r", wire_version=WIRE_VERSION + 1))
    welcome = client.receive(Welcome)
    assert welcome.refusal == f"wire version {WIRE_VERSION + 1} there, {WIRE_VERSION} here"


@pytest.mark.parametrize(
    ("token_ids", "sampling", "code"),
    [
        *(([5, wrong], {}, INVALID_REQUEST) for wrong in (-1, 10**9, 2**63)),
        ([5, 6], {"stop_token_ids": [10**6]}, INVALID_REQUEST),
        ([1] * 512, {}, "context_length_exceeded"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_is_the_clients_error(
    client: Client, token_ids: list[int], sampling: dict[str, Any], code: str
) -> None:
    sampling = {"max_tokens": 3} | sampling
    client.send_raw({"type": "Generate", "request_id": "a", "token_ids": token_ids, "sampling": sampling})
    failed = client.receive(RequestFailed)
    assert (failed.request_id, failed.code) == ("a", code)


@pytest.mark.parametrize(
    "odd",
    [{"repetition_penalty": 1e-40, "min_p": 0.5}, {"num_logprobs": 1_000_000}, {"temperature": float("nan")}],
    ids=str,
)
def test_a_message_with_odd_sampling_fails_alone(worker: Worker, client: Client, odd: dict[str, Any]) -> None:
    sampling = {"max_tokens": 4, **odd}
    client.send_raw({"type": "Generate", "request_id": "a", "token_ids": [5] * 20, "sampling": sampling})
    failed = client.receive(RequestFailed)
    assert failed.request_id == "a"
    assert "malformed" in failed.message
    assert_serves(worker, client)


def test_a_request_that_bans_every_token_is_answered(worker: Worker, client: Client) -> None:
    every = tuple(range(worker.parts.engine.model.vocab_size))
    banned = SamplingParams(max_tokens=4, min_tokens=4, stop_token_ids=every, logit_bias=dict.fromkeys(every, -100.0))
    client.send(Hello(router_id="r"))
    client.send(Generate(request_id="a", token_ids=[5] * 20, sampling=banned))
    while not any(delta.finish_reason for delta in client.receive(StepOutput).deltas):
        pass
    assert_serves(worker, client)


def assert_serves(worker: Worker, client: Client) -> None:
    """Another request is answered, and nothing is left behind."""
    client.send(Generate(request_id="other", token_ids=[6] * 20, sampling=GREEDY))
    while True:
        for delta in client.receive(StepOutput).deltas:
            if delta.request_id == "other" and delta.finish_reason is not None:
                worker.call(lambda: worker.check_integrity(idle=True))
                return


@pytest.mark.parametrize(("owner", "name"), [(SequenceFactory, "make_sequence"), (Engine, "add")])
def test_what_is_not_taken_in_fails(
    owner: type, name: str, worker: Worker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(owner, name)

    def raise_for_bad(self: Any, *arguments: Any, **fields: Any) -> Any:
        if "bad" in (arguments[0], getattr(arguments[0], "request_id", "")):
            raise ZeroDivisionError
        return original(self, *arguments, **fields)

    monkeypatch.setattr(owner, name, raise_for_bad)
    prompt = [5] * 20
    for message in (
        Generate(request_id="bad", token_ids=prompt, sampling=GREEDY),
        Prefill(request_id="bad", token_ids=prompt, sampling=GREEDY, decode_worker=PEER),
    ):
        client.send(message)
        failed = client.receive(RequestFailed)
        assert (failed.request_id, failed.code) == ("bad", "internal_error")
        assert "ZeroDivisionError" in failed.message
    assert_serves(worker, client)
    assert worker.call(worker.status).load.num_errors == 2


@pytest.mark.parametrize("phase", ["whole", "prefill"])
def test_a_request_that_fails_in_a_step_fails_alone(
    phase: str, worker: Worker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = sampler.plan_of

    def raise_for_bad(sequence: Sequence) -> Any:
        if sequence.request_id == "bad":
            raise ZeroDivisionError
        return original(sequence)

    monkeypatch.setattr(sampler, "plan_of", raise_for_bad)
    asked: dict[str, Any] = {"request_id": "bad", "token_ids": [5] * 20, "sampling": SamplingParams(max_tokens=3)}
    client.send(Generate(**asked) if phase == "whole" else Prefill(**asked, decode_worker=PEER))
    failed = client.receive(RequestFailed)
    assert (failed.request_id, failed.code) == ("bad", "internal_error")
    assert_serves(worker, client)


def test_without_a_plan_of_loads_it_computes(worker: Worker, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.parts.cache.fetcher, "_plan", lambda _: 1 / 0)
    client.send(Hello(router_id="r"))
    assert_serves(worker, client)


def test_a_handler_that_raises_ends_nothing_else(
    worker: Worker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    client.send(Hello(router_id="r"))
    client.send(Generate(request_id="a", token_ids=[5] * 40, sampling=SamplingParams(max_tokens=400, ignore_eos=True)))
    client.receive(StepOutput)
    keys = make_keys()
    client.send(Introduce(peers=[peer := msgspec.structs.replace(PEER, public_key=keys.public)]))
    monkeypatch.setattr(worker.parts.prefill, "revoked", fail)
    monkeypatch.setattr(worker.parts.decode, "notified", fail)
    with contextlib.closing(Client(worker, keys)) as other:
        other.send(LeaseRevoked(sender=peer, request_id="a", generation=1))
        failed = client.receive(RequestFailed)
    assert (failed.request_id, failed.code) == ("a", "internal_error")
    arrived = [Notification("peer", 1, b"x")]
    monkeypatch.setattr(worker.parts.transport, "poll", lambda: [arrived.pop()] if arrived else [])
    assert_serves(worker, client)
    assert worker.call(worker.status).load.num_errors == 2


def test_a_second_request_of_the_same_id_does_not_touch_the_first(worker: Worker, client: Client) -> None:
    client.send(Hello(router_id="r"))
    client.send(Generate(request_id="a", token_ids=[5] * 40, sampling=SamplingParams(max_tokens=60, ignore_eos=True)))
    client.send(Generate(request_id="a", token_ids=[6], sampling=GREEDY))
    num_tokens, failures = 0, []
    while num_tokens < 60 or not failures:  # the first request may have begun before the second one is read
        message = client.receive(RequestFailed | StepOutput)
        if isinstance(message, RequestFailed):
            failures.append(message.message)
        else:
            num_tokens += sum(len(delta.token_ids) for delta in message.deltas)
    assert (num_tokens, "in use" in failures[0]) == (60, True)
    worker.call(lambda: worker.check_integrity(idle=True))


def test_what_a_router_asked_for_before_it_connected_again_is_ended(worker: Worker, client: Client) -> None:
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    with contextlib.closing(Client(worker)) as stranger, contextlib.closing(Client(worker)) as again:
        for one, router_id in ((client, "r"), (stranger, "s")):
            one.send(Hello(router_id=router_id))
            one.send(Generate(request_id=f"of {router_id}", token_ids=[5] * 40, sampling=endless))
            one.receive(StepOutput)
        client.send(Hello(router_id="r"))  # by the same connection: nothing is lost
        client.receive(Welcome)
        assert worker.call(worker.status).request_ids == {"of r", "of s"}
        again.send(Hello(router_id="r"))
        again.receive(Welcome)
        assert worker.call(worker.status).request_ids == {"of s"}
        stranger.send(Cancel(request_id="of s"))
        until(lambda: not worker.call(worker.status).request_ids)
        worker.call(lambda: worker.check_integrity(idle=True))


def test_events_have_no_gap_and_a_snapshot_holds_them_all(client: Client) -> None:
    client.send(Hello(router_id="r"))
    stored: list[bytes] = []
    for number in (1, 2, 3):
        client.send(Generate(request_id=str(number), token_ids=[number] * 33, sampling=GREEDY))
        events = client.receive(BlockEvents)
        assert events.sequence == number
        stored += split_digests(events.stored)
    client.send(SnapshotRequest(places=["pool"]))
    snapshot = client.receive(BlockSnapshot)
    assert snapshot.sequence == 3
    assert sorted(split_digests(snapshot.digests)) == sorted(stored)
    assert len(stored) == 6


def test_a_cancel_is_confirmed_behind_the_last_token_and_once(worker: Worker, client: Client) -> None:
    client.send(Hello(router_id="r"))
    client.send(Generate(request_id="a", token_ids=[5] * 40, sampling=SamplingParams(max_tokens=900, ignore_eos=True)))
    while not client.receive(StepOutput).deltas:
        pass
    for request_id in ("a", "a", "unknown"):
        client.send(Cancel(request_id=request_id, is_confirmed=True))
    while not isinstance(message := client.receive(RequestFailed | StepOutput), RequestFailed):
        pass
    assert (message.request_id, message.code) == ("a", CANCELLED)
    client.send(Generate(request_id="b", token_ids=[6], sampling=SamplingParams(max_tokens=1, ignore_eos=True)))
    deltas: list[SequenceDelta] = []
    while not deltas:
        message = client.receive(RequestFailed | StepOutput)
        assert isinstance(message, StepOutput), "it is confirmed once, and only if it ran"
        deltas += message.deltas
    assert [delta.request_id for delta in deltas] == ["b"]
    worker.call(lambda: worker.check_integrity(idle=True))


def test_late_and_unknown_messages_change_nothing(worker: Worker, client: Client) -> None:
    keys = make_keys()
    client.send(Introduce(peers=[peer := msgspec.structs.replace(PEER, public_key=keys.public)]))
    with contextlib.closing(Client(worker, keys)) as other:
        for message in (
            LeaseGrant(sender=peer, request_id="x", generation=1, first_block=0, block_ids=[0], ttl_s=0.1),
            LeaseRefused(sender=peer, request_id="x", reason="?"),
            LeaseRevoked(sender=peer, request_id="x", generation=9),
            LeaseClosed(sender=peer, request_id="x", generation=9),
            PeerRefused(sender=peer, reason="?"),
            Heartbeat(worker_id="x", epoch=1, progress_age_s=0, load=worker.status().load, handoffs=[("x", 9)]),
        ):
            other.send(message)
            other.send(message)
        for message in (Cancel(request_id="x"), Welcome(card=worker.card)):
            client.send(message)
            client.send(message)
        client.send(Hello(router_id="r"))
        client.receive(Welcome)
        # Nobody sends a heartbeat or a welcome to a worker's ROUTER.
        counts = worker.parts.dropped.counts
        until(lambda: counts == {"malformed": 4}, explain=lambda: str(counts))
    worker.call(lambda: worker.check_integrity(idle=True))


def test_a_call_runs_in_the_loop_and_passes_its_error_on(worker: Worker) -> None:
    assert worker.call(threading.current_thread).name == "w"
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 // 0)
    worker.stop()
    with pytest.raises(WorkerError, match="has stopped"):
        worker.call(lambda: None)


def test_whatever_fails_at_its_end_a_worker_is_closed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(worker_config(tiny_model, "w", Role.COLOCATED), hub=InProcessHub())

    def fail(*_: object) -> None:
        raise OSError("injected")

    monkeypatch.setattr(worker, "run_once", fail)
    monkeypatch.setattr(worker.parts.replies, "fail", fail)
    monkeypatch.setattr(type(worker.parts.replies), "request_ids", property(lambda _: ["r"]))
    running = RunningWorker(worker)
    running.thread.join(DEADLINE_S)
    assert isinstance(running.failure, OSError)
    assert worker.parts.context.closed
    with pytest.raises(WorkerError, match="has stopped"):
        worker.call(lambda: None)


def break_step(cluster: Cluster, worker_id: str) -> None:
    def run(*_: object) -> None:
        raise torch.AcceleratorError("injected")

    cluster.worker(worker_id).parts.engine.runner.run = run  # type: ignore[assignment,method-assign]


@pytest.mark.parametrize("broken", ["p", "d"])
async def test_an_error_of_the_device_ends_the_worker_and_tells_every_request(tiny_model: Path, broken: str) -> None:
    # All go to the worker at once: those that wait in the router are served by others.
    async with running_cluster(tiny_model, router={"max_worker_queue_s": 60.0}) as cluster:
        await cluster.generate(make_prompt(5))
        break_step(cluster, broken)
        requests = [cluster.generate(make_prompt(20, seed), ignore_eos=True) for seed in range(5)]
        for result in await asyncio.gather(*requests, return_exceptions=True):
            assert isinstance(result, ServingError), result
        await eventually(lambda: not cluster.workers[broken].thread.is_alive())
        assert isinstance(cluster.workers[broken].failure, torch.AcceleratorError)
        (survivor,) = set(PAIR) - {broken}
        worker = cluster.worker(survivor)
        await cluster.call(survivor, lambda: worker.peer_died(cluster.worker(broken).address))
        await cluster.becomes_idle(survivor)


async def test_the_place_of_a_dead_worker_is_taken_by_a_new_epoch(tiny_model: Path, oracle: Oracle) -> None:
    async with running_cluster(tiny_model) as cluster:
        for worker_id, role in PAIR.items():
            old = cluster.worker(worker_id)
            await cluster.generate(make_prompt(40))
            await asyncio.to_thread(cluster.workers[worker_id].stop)
            cluster.client.mark_dead(worker_id, "test")
            await cluster.add(worker_config(tiny_model, worker_id, role))
            (other,) = set(PAIR) - {worker_id}
            peer = cluster.worker(other)
            await cluster.call(other, lambda peer=peer, old=old: peer.peer_died(old.address))
            prompt = make_prompt(70)
            assert (await cluster.generate(prompt)).token_ids == oracle.answer(prompt)
        await cluster.becomes_idle()


async def test_the_death_of_the_sender_frees_the_blocks_it_might_have_written(tiny_model: Path) -> None:
    async with running_cluster(tiny_model, judge=lambda _: Verdict.HOLD) as cluster:
        request = asyncio.create_task(cluster.generate(make_prompt(100)))
        await eventually(lambda: cluster.hub.held)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        decode = cluster.worker("d")
        assert (await cluster.call("d", decode.status)).num_open_leases == 1
        await cluster.call("d", lambda: decode.peer_given_up(cluster.worker("p").address))
        assert (await cluster.call("d", decode.status)).num_open_leases == 1, "it may still write"
        assert len(cluster.hub.held) > 0
        await asyncio.to_thread(cluster.workers["p"].stop)
        await cluster.call("d", lambda: decode.peer_died(cluster.worker("p").address))
        await cluster.becomes_idle("d")


@pytest.mark.parametrize("verdict", [Verdict.LOSE, Verdict.HOLD], ids=["flap", "stuck write"])
def test_a_broken_or_stuck_link_heals_and_shows_in_the_metrics(tiny_model: Path, verdict: Verdict) -> None:
    is_broken = True

    def judge(write: InProcessWrite) -> Verdict:
        return verdict if is_broken and write.local_block_ids else Verdict.DELIVER

    async def scenario() -> None:
        nonlocal is_broken
        transfer = {"lease_ttl_s": 0.5, "handoff_timeout_s": 1.0}
        async with running_cluster(tiny_model, judge=judge, transfer=transfer) as cluster:
            request = asyncio.create_task(cluster.generate(make_prompt(100)))
            leases = lambda: cluster.sample("tandem_worker_open_leases", worker="d", role="decode")  # noqa: E731
            quarantined = lambda: cluster.sample("tandem_worker_quarantined_blocks", worker="d", role="decode")  # noqa: E731
            if verdict is Verdict.HOLD:
                await eventually(lambda: leases() == 1)
                await eventually(lambda: quarantined() == 7)
            with pytest.raises(ServingError):
                await request
            is_broken = False
            await cluster.becomes_idle()
            await eventually(lambda: cluster.sample("tandem_link_lost_total", worker="p", peer="d"))
            num_resets = cluster.sample("tandem_link_resets_total", worker="p", peer="d")
            assert num_resets == (1 if verdict is Verdict.HOLD else 0)
            await eventually(lambda: not leases() and not quarantined())
            assert (await cluster.flow.pools())["roles"]["decode"][0]["num_quarantined_blocks"] == 0
            again = await cluster.generate(make_prompt(100, seed=1))
            assert len(again.token_ids) == 8, "over the same link, open again"
            await cluster.becomes_idle()

    asyncio.run(scenario())


async def test_heartbeats_keep_a_lease_through_a_step_longer_than_it(tiny_model: Path, oracle: Oracle) -> None:
    go_on, is_stuck = threading.Event(), threading.Event()
    transfer = {"lease_ttl_s": 0.6, "handoff_timeout_s": 3.0}
    async with running_cluster(tiny_model, transfer=transfer) as cluster:
        await cluster.generate(make_prompt(5))  # the link is up
        runner = cluster.worker("p").parts.engine.runner
        run, steps = runner.run, 0

        def slow_run(*arguments: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == 3:  # now the lease is granted and known to the sender
                is_stuck.set()
                go_on.wait(DEADLINE_S)
            return run(*arguments)

        runner.run = slow_run  # type: ignore[method-assign]
        prompt = make_prompt(250)  # four steps
        request = asyncio.create_task(cluster.generate(prompt))
        await eventually(is_stuck.is_set)
        state = cluster.registry.get("p")
        assert state is not None
        await eventually(lambda: state.progress_age_s > 2.0)  # more than three leases long
        go_on.set()
        assert (await request).token_ids == oracle.answer(prompt)
        await cluster.becomes_idle()


async def test_a_loop_that_is_stuck_beside_its_steps_is_seen_in_heartbeats(tiny_model: Path) -> None:
    go_on = threading.Event()
    async with running_cluster(tiny_model, transfer={"max_heartbeat_interval_s": 0.05}) as cluster:
        state = cluster.registry.get("p")
        assert state is not None
        await eventually(lambda: 0 <= state.progress_age_s < 0.5)
        stuck = asyncio.create_task(cluster.call("p", lambda: go_on.wait(DEADLINE_S)))
        await eventually(lambda: state.progress_age_s > 1.0)
        go_on.set()
        await stuck
        await eventually(lambda: state.progress_age_s < 0.5)


async def test_a_flip_keeps_the_cache(tiny_model: Path, oracle: Oracle) -> None:
    roles = {"p": Role.PREFILL, "x": Role.PREFILL, "d": Role.DECODE}
    async with running_cluster(tiny_model, roles) as cluster:
        prompts = [make_prompt(80, seed) for seed in range(4)]
        await asyncio.gather(*(cluster.generate(prompt) for prompt in prompts))
        await cluster.becomes_idle()
        cached = cluster.index.num_blocks("x")
        assert cached > 0
        for worker_id, role in {"x": Role.DECODE, "d": Role.PREFILL}.items():
            worker = cluster.worker(worker_id)
            cluster.registry.set_state(worker_id, WorkerState.DRAINING, "flip")
            await cluster.call(worker_id, lambda worker=worker, role=role: worker.set_role(role))
            cluster.registry.set_role(worker_id, role)
            cluster.registry.set_state(worker_id, WorkerState.READY, "flip")
        assert cluster.index.num_blocks("x") == cached
        for prompt in prompts:
            answer = await cluster.generate(prompt)
            assert answer.token_ids == oracle.answer(prompt)
            assert answer.num_cached_tokens == 64
        await cluster.becomes_idle()


async def test_a_request_that_ends_with_its_first_token_fails_nowhere(tiny_model: Path) -> None:
    """The decode worker must not report what it was told is finished: that would race the answer to the router."""
    async with running_cluster(tiny_model) as cluster:
        decode = cluster.worker("d")
        prefill = cluster.worker("p")
        with contextlib.closing(Client(prefill)) as client, contextlib.closing(Client(decode)) as other:
            one = SamplingParams(max_tokens=1, temperature=0.0)
            prompt = make_prompt(100)
            other.send(Decode(request_id="a", token_ids=prompt, sampling=one, prefill_worker=prefill.address))
            client.send(Prefill(request_id="a", token_ids=prompt, sampling=one, decode_worker=decode.address))
            client.receive(StepOutput)
            await eventually(lambda: decode.parts.decode.num_open == 0)
            other.send(Hello(router_id="r"))
            assert isinstance(other.receive(RequestFailed | Welcome), Welcome), "nothing was said before"


class LongSteps:
    """A worker whose turns the test plays. A step takes 40 s, and all that comes meanwhile lies unread."""

    def __init__(self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now, time_ns=time.time_ns)
        monkeypatch.setattr("tandem.worker.loop.time", clock)
        hub = InProcessHub()
        config = worker_config(tiny_model, "w", Role.COLOCATED, transfer={"handoff_timeout_s": 30.0})
        sent: list[Message] = []
        monkeypatch.setattr(WorkerSockets, "send_peer", lambda _, peer, message: sent.append(message))
        self.worker = worker = Worker(config, hub=hub)
        self.peer = PeerAddress("peer", 1, "", "")
        self.coming: list[Message] = []
        self.unread: list[tuple[bytes, Message]] = []
        self.replies: list[Message] = []
        monkeypatch.setattr(worker.parts.sockets, "receive", self.receive)
        monkeypatch.setattr(worker.parts.sockets, "reply", lambda identity, message: self.replies.append(message))
        monkeypatch.setattr(worker.parts.engine, "step", self.step)
        other = InProcessTransport("peer", 1, torch.zeros_like(worker.parts.engine.kv.shards[0]), hub)
        self.step_engine = type(worker.parts.engine).step
        worker.parts.links.connect(self.peer, 0.0)
        (opening,) = sent
        assert isinstance(opening, PeerHello)
        fields, metadata = opening.compatibility, other.local_metadata()
        self.turn(PeerHello(sender=self.peer, compatibility=fields, transport_metadata=metadata, is_reply=True))

    def receive(self, timeout_ms: int) -> list[tuple[bytes, Message]]:
        unread, self.unread = self.unread, []
        return unread

    def step(self, **hooks: Any) -> Any:
        results = self.step_engine(self.worker.parts.engine, **hooks)
        if results:
            self.now += 40.0
            self.unread += [(b"", message) for message in self.coming]
            self.coming = []
        return results

    def turn(self, *messages: Message) -> None:
        self.unread += [(b"router", message) for message in messages]
        self.worker.run_once()

    def failures(self) -> list[str]:
        return [reply.message for reply in self.replies if isinstance(reply, RequestFailed)]

    def heartbeat(self) -> Heartbeat:
        """Of the peer, which vouches for a request."""
        load = self.worker.reporter.load()
        return Heartbeat(worker_id="peer", epoch=1, progress_age_s=0.0, load=load, handoffs=[("r", 0)])

    def decode(self) -> Decode:
        return Decode(request_id="r", token_ids=make_prompt(20), sampling=GREEDY, prefill_worker=self.peer)


@pytest.fixture
def long_steps(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    side = LongSteps(tiny_model, monkeypatch)
    yield side
    side.worker.close()


def test_a_holder_counts_from_the_arrival_of_a_request(long_steps: LongSteps) -> None:
    worker = long_steps.worker
    receive = worker.parts.sockets.receive

    def wait_and_receive(timeout_ms: int) -> list[tuple[bytes, Message]]:
        long_steps.now += 0.2  # the wait, at whose end the request is sent
        return receive(timeout_ms)

    worker.parts.sockets.receive = wait_and_receive  # type: ignore[method-assign]
    long_steps.turn(ReadRequest(sender=long_steps.peer, read_id=1, digests=[b"d" * 16], ttl_s=5.0))
    worker.parts.lender.pump(0.2 + 5.0)
    assert worker.parts.lender.num_open == 1
    worker.parts.lender.pump(60.0)
    assert worker.parts.lender.num_open == 0


def test_a_call_between_two_turns_makes_nothing_late_that_lies_unread(long_steps: LongSteps) -> None:
    long_steps.turn(long_steps.decode())

    def take_long() -> None:
        long_steps.now += 40.0
        long_steps.unread.append((b"", long_steps.heartbeat()))

    calling = threading.Thread(target=long_steps.worker.call, args=(take_long,))
    calling.start()
    while calling.is_alive():
        long_steps.turn()
    long_steps.turn()
    assert long_steps.failures() == []
    long_steps.worker.peer_died(long_steps.peer)


@pytest.mark.cpu_engine("the late device computes on one")
def test_a_step_that_the_device_still_computes_counts_as_running(long_steps: LongSteps) -> None:
    worker = long_steps.worker
    device = LateDevice(worker.parts.engine, 0, share_done=0.0)
    long_steps.now = 5.0
    long_steps.turn(Generate(request_id="r", token_ids=make_prompt(100), sampling=GREEDY))
    long_steps.now = 7.0
    long_steps.turn()  # another step is behind it
    assert worker.reporter.step_started == 5.0
    device.stream.flush()
    long_steps.now = 9.0
    long_steps.turn()
    assert worker.reporter.step_started == long_steps.now, "the next step began when that one ended"
    while worker.parts.engine.has_work:
        device.stream.flush()
        long_steps.turn()
    assert worker.reporter.step_started == 0.0


@pytest.mark.cpu_engine("each step has its results when it returns")
def test_a_grant_that_came_during_a_long_step_is_in_time(long_steps: LongSteps) -> None:
    peer = long_steps.peer
    grant = LeaseGrant(sender=peer, request_id="r", generation=1, first_block=0, block_ids=[0, 1], ttl_s=30.0)
    long_steps.coming.append(grant)
    long_steps.turn(Prefill(request_id="r", token_ids=make_prompt(20), sampling=GREEDY, decode_worker=peer))
    assert long_steps.now == 40.0, "it was computed"
    long_steps.turn()
    assert long_steps.failures() == []
    assert long_steps.worker.parts.prefill.num_open == 0, "delivered"


@pytest.mark.cpu_engine("each step has its results when it returns")
def test_a_heartbeat_that_came_during_a_long_step_is_in_time(long_steps: LongSteps) -> None:
    worker, peer = long_steps.worker, long_steps.peer
    long_steps.coming += [long_steps.heartbeat(), LeaseRequest(sender=peer, request_id="r")]
    other = Generate(request_id="other", token_ids=make_prompt(20, seed=1), sampling=GREEDY)
    long_steps.turn(long_steps.decode(), other)
    long_steps.turn()
    assert long_steps.failures() == []
    assert worker.parts.decode.num_leases == 1
    worker.peer_died(peer)
    worker.parts.decode.check_integrity(idle=True)


class Peer:
    """A transport that writes notifications to a worker whose loop waits a minute for what does not wake it."""

    def __init__(self, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("_IDLE_POLL_MS", "_TRANSFER_POLL_MS"):
            monkeypatch.setattr(loop, name, 60_000)
        hub = InProcessHub()
        self.worker = Worker(worker_config(tiny_model, "w", Role.DECODE), hub=hub)
        self.noticed = threading.Event()
        monkeypatch.setattr(self.worker.parts.decode, "notified", lambda *_: self.noticed.set())
        self.transport = hub.join("p", 1, torch.zeros_like(self.worker.parts.engine.kv.shards[0]))
        self.transport.add_peer("w", self.worker.address.epoch, self.worker.parts.transport.local_metadata())

    def write(self) -> None:
        self.transport.write_blocks("w", [], [], b"done")


@pytest.fixture
def peer(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    return Peer(tiny_model, monkeypatch)


def test_a_write_of_a_peer_ends_the_wait_of_an_idle_worker(peer: Peer) -> None:
    running = RunningWorker(peer.worker)
    for _ in range(3):
        peer.write()
        assert peer.noticed.wait(DEADLINE_S)
        peer.noticed.clear()
    running.stop()


def test_a_worker_that_nothing_wakes_polls_often_once_a_write_has_begun(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = peer.worker.parts
    parts.sockets._poller.unregister(parts.transport.waker)
    parts.transport.waker = None
    monkeypatch.setattr(loop, "_QUICK_FOR_S", DEADLINE_S)
    running = RunningWorker(peer.worker)
    told = lambda: peer.worker._dispatcher.take(b"", WriteBegun(sender=PEER), time.monotonic())  # noqa: E731
    peer.worker.call(told)
    peer.write()
    assert peer.noticed.wait(DEADLINE_S)
    peer.worker.call(lambda: peer.worker.check_integrity(idle=True))
    running.stop()


def test_a_notification_that_came_during_a_step_does_not_wait_for_another_event(peer: Peer) -> None:
    peer.write()
    peer.worker._notifications += peer.worker.parts.transport.poll()
    running = RunningWorker(peer.worker)
    assert peer.noticed.wait(DEADLINE_S)
    running.stop()
