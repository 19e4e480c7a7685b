"""What the supervisor makes of what Ray tells it; its work with real processes is in tests/e2e."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayTaskError

from tandem.cluster import process_end, quarantine_watch
from tandem.cluster.draining import Timing
from tandem.cluster.member import MemberState, first_line
from tandem.cluster.owned_actor import OrphanedWorker, WatchNews
from tandem.cluster.process_end import ProcessIdentity
from tandem.cluster.worker_member import WorkerMember
from tandem.protocol.errors import ConfigError, WorkerError
from tandem.protocol.messages import PeerAddress, Quarantine, Role, WorkerCard, WorkerState
from tests.support.builders import make_card
from tests.support.supervised import FakeWorkers, Supervised, supervised
from tests.support.waiting import eventually

WRAPPED = RayTaskError(
    function_name="WorkerActor.start()",
    traceback_str="ray::WorkerActor.start() (pid=1)\nTraceback ...\nConfigError: x",
    cause=ConfigError("pool_bytes=9 holds 0 blocks of 10 bytes; at least two are needed"),
).as_instanceof_cause()
KILLED = ActorDiedErrorContext(
    class_name="WorkerActor",
    actor_id=b"a" * 16,
    pid=7,
    error_message="The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker "
    "exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes...",
)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("one line"), "one line"),
        (TimeoutError(), "TimeoutError"),
        (RuntimeError("a\n  b\n\n"), "b"),
        (ActorDiedError(), "The actor died unexpectedly before finishing this task"),
        (WRAPPED, "pool_bytes=9 holds 0 blocks of 10 bytes; at least two are needed"),
        (ActorDiedError(KILLED), "The actor is dead because its worker process has died"),
    ],
    ids=["ours", "without a message", "of several lines", "of an actor", "wrapped by Ray", "of a killed process"],
)
def test_first_line_of_every_error(error: Exception, line: str) -> None:
    assert first_line(error) == line


async def test_a_worker_that_cannot_start_the_first_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_bad_starts=1, colocated=True, starts=False) as cluster:
        with pytest.raises(ConfigError, match="worker colocated-0 did not start: no such model"):
            await cluster.supervisor.start(lambda: 100.0)


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "slow"])
async def test_a_worker_may_load_long_while_its_process_answers(
    monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    silent_s = 1.0  # a new process must say something within it, on a busy machine too
    monkeypatch.setattr("tandem.cluster.member._LOOK_AT_START_S", 0.01)
    monkeypatch.setattr("tandem.cluster.member._SILENT_START_S", silent_s)
    async with supervised(monkeypatch, num_prefill=1, num_decode=1) as cluster:
        cluster.ray.loaded.clear()
        cluster.die("prefill-0")
        await eventually(lambda: len(cluster.ray.actors) == 3)
        slow = cluster.ray.latest("prefill-0")
        if is_stopped:
            os.kill(slow.process.pid, signal.SIGSTOP)
            await eventually(lambda: len(cluster.ray.actors) == 4)
            await eventually(lambda: slow.is_gone)
        until = asyncio.get_running_loop().time() + 1.5 * silent_s
        await eventually(lambda: asyncio.get_running_loop().time() > until)
        cluster.ray.loaded.set()
        await cluster.is_served("prefill-0", 3 if is_stopped else 2)
        assert len(cluster.ray.actors) == (4 if is_stopped else 3)


async def test_nothing_is_asked_of_a_ray_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not answer, and block the event loop meanwhile."""
    async with supervised(monkeypatch, num_prefill=1, num_decode=1) as cluster:
        asked: list[str] = []
        monkeypatch.setattr(cluster.ray, "kill", lambda *_, **__: asked.append("kill"))
        for actor in cluster.ray.actors:
            actor.stop = SimpleNamespace(remote=lambda: asked.append("stop"))  # type: ignore[attr-defined]
        cluster.supervisor.let_go(WorkerError("Ray's gcs_server has died"))
        with pytest.raises(WorkerError, match="gcs_server has died"):
            await cluster.supervisor.failure
        await cluster.supervisor.close()
        assert asked == []


@contextmanager
def blocking_kills(monkeypatch: pytest.MonkeyPatch, cluster: Supervised) -> Iterator[threading.Event]:
    """Ray does not answer to a kill inside. The event is set once it was asked."""
    answers, is_asked = threading.Event(), threading.Event()

    def kill(*_: object, **__: object) -> None:
        is_asked.set()
        answers.wait(60)

    monkeypatch.setattr(cluster.ray, "kill", kill)
    try:
        yield is_asked
    finally:
        answers.set()


async def test_a_ray_that_answers_no_more_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM to all processes of a server ends Ray's daemons too. Calls of a Ray that ends may block for a minute."""
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, timing=Timing(ray_s=0.05)) as cluster:
        with blocking_kills(monkeypatch, cluster) as is_asked:
            await cluster.supervisor.close()
            assert is_asked.is_set()


async def test_a_ray_that_dies_while_the_server_stops_is_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, timing=Timing(ray_s=3600.0)) as cluster:
        with blocking_kills(monkeypatch, cluster) as is_asked:
            closing = asyncio.create_task(cluster.supervisor.close())
            await eventually(is_asked.is_set)
            assert not closing.done()
            cluster.supervisor.let_go(WorkerError("Ray's raylet has died"))
            await closing


async def test_service_ends_when_its_last_worker_died_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, colocated=True, max_restarts=2) as cluster:
        for epoch in range(3):
            await cluster.is_served("colocated-0", epoch)
            assert not cluster.supervisor.failure.done()
            cluster.die("colocated-0")
        with pytest.raises(WorkerError, match="no worker is left that could serve: colocated-0 died 3 times"):
            await cluster.supervisor.failure


async def test_prefill_worker_serves_alone_while_no_node_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.member._REPLACE_NOTICE_S", 0.02)
    async with supervised(monkeypatch, num_prefill=1, num_decode=1) as cluster:
        cluster.ray.placed.clear()
        cluster.die("decode-0")
        await eventually(lambda: cluster.roles() == {"prefill-0": Role.DECODE})
        assert not cluster.supervisor.failure.done()
        cluster.ray.placed.set()
        await eventually(lambda: cluster.roles() == {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE})


async def test_the_end_gives_back_what_ray_reserved_unless_ray_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_dead in (False, True):
        async with supervised(monkeypatch, num_prefill=1, num_decode=1) as cluster:
            bundles: Any = cluster.supervisor.bundles
            assert not bundles.is_removed
            if is_dead:
                cluster.supervisor.let_go(WorkerError("Ray's raylet has died"))
            await cluster.supervisor.close()
            assert bundles.is_removed is not is_dead


async def test_when_no_node_is_left_the_service_ends_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.member._REPLACE_NOTICE_S", 0.02)
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, max_restarts=1) as cluster:
        cluster.ray.placed.clear()  # the node that is left has no room: that may change
        cluster.die("prefill-0")
        await eventually(lambda: len(cluster.ray.actors) == 3)
        await eventually(lambda: cluster.ray.num_looks_at_nodes > 3)
        assert len(cluster.ray.actors) == 3
        cluster.ray.is_node_alive = False
        cluster.die("decode-0")
        with pytest.raises(WorkerError, match=r"no worker is left .* at last: no node of the Ray cluster is alive"):
            await cluster.supervisor.failure


async def test_worker_that_died_too_often_starts_later_if_others_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=2, max_restarts=0) as cluster:
        epoch = 0
        for _ in range(5):
            await cluster.is_served("decode-1", epoch)
            epoch = cluster.ray.latest("decode-1").card.address.epoch
            cluster.die("decode-1")
        await cluster.is_served("decode-1", epoch)
        assert not cluster.supervisor.failure.done()
        assert cluster.roles() == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


async def test_prefill_worker_serves_alone_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, max_restarts=9) as cluster:
        cluster.die("decode-0")
        await cluster.is_served("decode-0", 2)
        await eventually(lambda: cluster.roles() == {"prefill-0": "prefill", "decode-0": "decode"})
        assert [flip["to"] for flip in cluster.supervisor.flips.latest] == ["decode", "prefill"]


@pytest.mark.parametrize(
    ("left", "flips"),
    [
        ({"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}, []),
        ({"prefill-0": Role.DECODE}, ["prefill"]),  # it covered when the server died
    ],
    ids=["whole", "covered"],
)
async def test_workers_that_are_taken_over_play_their_roles(
    monkeypatch: pytest.MonkeyPatch, left: dict[str, Role], flips: list[str]
) -> None:
    pools: dict[str, Any] = {"num_prefill": 1, "num_decode": 1, "ray_address": "auto"}
    async with supervised(monkeypatch, starts=False, **pools) as cluster:

        async def adopt_orphans(_owner: object, _key: str, orphans: list[OrphanedWorker]) -> None:
            orphans += [cluster.orphan(worker_id, role) for worker_id, role in left.items()]

        monkeypatch.setattr("tandem.cluster.supervisor.adopt_orphans", adopt_orphans)
        await cluster.supervisor.start(lambda: 100.0)
        await eventually(lambda: cluster.roles() == {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE})
        assert [flip["to"] for flip in cluster.supervisor.flips.latest] == flips


async def test_server_that_is_stopped_during_a_takeover_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, starts=False, num_prefill=1, num_decode=1, ray_address="auto") as cluster:

        async def adopt_orphans(_owner: object, _key: str, orphans: list[OrphanedWorker]) -> None:
            orphans.append(cluster.orphan("decode-0", Role.DECODE))
            await asyncio.get_running_loop().create_future()  # for the lease of the next one

        monkeypatch.setattr("tandem.cluster.supervisor.adopt_orphans", adopt_orphans)
        starting = asyncio.create_task(cluster.supervisor.start(lambda: 100.0))
        await eventually(lambda: cluster.ray.actors)
        starting.cancel()
        await cluster.supervisor.close()
        assert cluster.ray.latest("decode-0").ended.done()


def hold_flips(
    monkeypatch: pytest.MonkeyPatch, cluster: Supervised, worker_id: str
) -> tuple[asyncio.Event, list[Role]]:
    """A worker changes its role once the event is set; the roles it was asked to play."""
    may_flip, asked = asyncio.Event(), list[Role]()

    async def set_role(role: Role) -> None:
        asked.append(role)
        await may_flip.wait()

    monkeypatch.setattr(cluster.ray.latest(worker_id), "set_role", SimpleNamespace(remote=set_role))
    return may_flip, asked


async def test_cover_ends_if_the_worker_is_back_before_its_flip_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, max_restarts=9) as cluster:
        may_flip, asked = hold_flips(monkeypatch, cluster, "prefill-0")
        cluster.die("decode-0")
        await cluster.is_served("decode-0", 2)
        await eventually(lambda: asked == [Role.DECODE])
        await eventually(lambda: cluster.supervisor.members["prefill-0"].home_role is None)
        may_flip.set()
        await eventually(lambda: asked == [Role.DECODE, Role.PREFILL])
        await eventually(lambda: cluster.roles() == {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE})


async def test_pools_keep_their_sizes_when_all_workers_restart_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No autoscaler would make up for it."""
    async with supervised(monkeypatch, num_prefill=3, num_decode=1) as cluster:
        before = cluster.roles()
        epochs = {one.worker_id: one.card.address.epoch for one in cluster.registry}
        for worker in ("decode-0", "prefill-0", "prefill-1"):
            cluster.ray.latest(worker).news.put_nowait(WatchNews.ASKED_TO_LEAVE)
            await eventually(lambda worker=worker: cluster.supervisor.members[worker].state is MemberState.DRAINING)
        for worker in ("decode-0", "prefill-0", "prefill-1"):
            await cluster.is_served(worker, epochs[worker])
        await eventually(lambda: cluster.roles() == before)


def role_and_state(cluster: Supervised, worker_id: str) -> tuple[Role, WorkerState]:
    worker = cluster.registry.get(worker_id)
    assert worker is not None
    return worker.role, worker.state


@pytest.mark.parametrize(("role", "state"), [(Role.DECODE, WorkerState.READY), (Role.PREFILL, WorkerState.DRAINING)])
async def test_a_worker_that_will_decode_has_work(
    monkeypatch: pytest.MonkeyPatch, role: Role, state: WorkerState
) -> None:
    """It may be the only one that is left. One that is to decode no more gets none: its answers leave."""
    async with supervised(monkeypatch, num_prefill=2, num_decode=2) as cluster:
        name = "prefill-0" if role is Role.DECODE else "decode-0"
        may_flip, asked = hold_flips(monkeypatch, cluster, name)
        flip = asyncio.create_task(cluster.supervisor.set_role(name, role))
        await eventually(lambda: asked == [role])
        assert role_and_state(cluster, name)[1] is state
        may_flip.set()
        await flip
        assert role_and_state(cluster, name) == (role, WorkerState.READY)


async def test_no_worker_covers_for_a_pool_if_it_could_not_serve_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerMember, "can_cover", False)
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, max_restarts=0) as cluster:
        cluster.die("decode-0")
        await cluster.is_served("decode-0", 2)
        assert cluster.supervisor.flips.latest == []
        assert cluster.roles() == {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


async def test_requests_fail_at_once_and_blocks_wait_for_proof_of_death(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = asyncio.Event()
    end_once = process_end._end_once

    async def end(identity: ProcessIdentity) -> bool:
        await may_end.wait()
        return await end_once(identity)

    monkeypatch.setattr(process_end, "_end_once", end)
    timing = Timing(gone_s=0.05)
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, max_restarts=9, timing=timing) as cluster:
        dead, survivor = cluster.ray.latest("prefill-0"), cluster.ray.latest("decode-0")
        survivor.num_deaf_calls = 3  # it is told until it hears it
        os.kill(dead.process.pid, signal.SIGSTOP)
        cluster.ray.kill(dead, no_restart=True)  # so Ray says, and it is not
        await eventually(lambda: cluster.registry.get("prefill-0") is None)
        await cluster.is_served("prefill-0", dead.card.address.epoch)  # the replacement waits for no proof
        await eventually(lambda: cluster.ray.told)
        assert cluster.ray.told == [("decode-0", "peer_given_up", dead.card.address, False)]
        assert psutil.Process(dead.process.pid).status() == psutil.STATUS_STOPPED
        may_end.set()
        await eventually(lambda: len(cluster.ray.told) > 1)
        assert cluster.ray.told[1:] == [("decode-0", "peer_died", dead.card.address, True)]


async def test_bug_in_a_start_costs_that_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, max_restarts=9) as cluster:
        epoch = cluster.ray.latest("prefill-0").card.address.epoch
        add_worker, failed = FakeWorkers.add_worker, []

        async def fail_once(workers: FakeWorkers, address: PeerAddress) -> WorkerCard:
            if not failed:
                failed.append(address)
                raise KeyError("a bug")
            return await add_worker(workers, address)

        monkeypatch.setattr(FakeWorkers, "add_worker", fail_once)
        cluster.die("prefill-0")
        await cluster.is_served("prefill-0", epoch)
        assert failed
        assert not cluster.supervisor.failure.done()
        assert "worker prefill-0 is given up" in caplog.text


async def test_error_of_the_supervision_itself_ends_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1) as cluster:
        monkeypatch.setattr("tandem.cluster.supervisor._death_report", lambda *_: 1 / 0)
        cluster.die("prefill-0")
        with pytest.raises(WorkerError, match="supervision of a worker failed, see the log: division by zero"):
            await cluster.supervisor.failure


async def test_end_of_a_flip_gives_no_work_to_a_worker_to_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=2, num_decode=1) as cluster:
        actor = cluster.ray.latest("prefill-0")
        actor.status_ = SimpleNamespace(request_ids=frozenset({"r"}))
        flip = cluster.supervisor.flips.flip("prefill-0", Role.DECODE, "a test")
        await eventually(lambda: role_and_state(cluster, "prefill-0") == (Role.DECODE, WorkerState.READY))
        cluster.registry.set_state("prefill-0", WorkerState.DRAINING, "it is to be replaced")
        actor.status_ = SimpleNamespace(request_ids=frozenset())
        await flip
        assert role_and_state(cluster, "prefill-0") == (Role.DECODE, WorkerState.DRAINING)


async def test_flip_not_drained_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("tandem.cluster.member._DRAIN_TIMEOUT_S", 0.0)
    async with supervised(monkeypatch, num_prefill=2, num_decode=1) as cluster:
        cluster.ray.latest("prefill-0").status_ = SimpleNamespace(request_ids=frozenset({"r"}))
        await cluster.supervisor.flips.flip("prefill-0", Role.DECODE, "a test")
        assert role_and_state(cluster, "prefill-0") == (Role.DECODE, WorkerState.READY)
        [flip] = cluster.supervisor.flips.latest
        assert flip.keys() == {"worker", "from", "to", "reason", "began", "serving_after_s", "not_drained"}
    assert "prefill-0 serves as decode, but is not drained" in caplog.text
    assert "did not flip" not in caplog.text


async def test_flip_that_is_refused_has_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with supervised(monkeypatch, num_prefill=2, num_decode=1) as cluster:

        async def set_role(_: Role) -> None:
            raise WorkerError("it did not answer in 10 s")

        monkeypatch.setattr(cluster.ray.latest("prefill-0"), "set_role", SimpleNamespace(remote=set_role))
        await cluster.supervisor.flips.flip("prefill-0", Role.DECODE, "a test")
        assert role_and_state(cluster, "prefill-0") == (Role.PREFILL, WorkerState.READY)
        [flip] = cluster.supervisor.flips.latest
        assert flip["failed"] == "it did not answer in 10 s"
    assert "prefill-0 did not flip to decode" in caplog.text


async def test_sender_whose_lost_writes_fill_a_pool_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.quarantine_watch._LOOK_S", 0.01)
    look, num_looks = quarantine_watch._senders_to_replace, 0

    def count_looks(*arguments: Any) -> Any:
        nonlocal num_looks
        num_looks += 1
        return look(*arguments)

    monkeypatch.setattr(quarantine_watch, "_senders_to_replace", count_looks)
    is_looked_at_again = lambda: eventually(lambda until=num_looks + 3: num_looks >= until)  # noqa: E731
    async with supervised(monkeypatch, num_prefill=2, num_decode=1, max_restarts=0) as cluster:
        num_blocks = make_card().num_blocks
        senders = [cluster.ray.latest(f"prefill-{number}") for number in range(2)]
        addresses = [sender.card.address for sender in senders]

        def report(*quarantines: tuple[PeerAddress, float, float]) -> None:
            noted = [
                Quarantine(sender.process, int(share * num_blocks), oldest_s) for sender, share, oldest_s in quarantines
            ]
            cluster.registry.note_quarantines("decode-0", noted)

        report((addresses[0], 0.01, 1e6), (addresses[1], 0.9, 10.0))  # a few blocks, or not for long
        await is_looked_at_again()
        assert not any(sender.ended.done() for sender in senders)
        report((addresses[1], 0.2, 61.0))
        await cluster.is_served("prefill-1", addresses[1].epoch)
        await eventually(lambda: ("decode-0", "peer_died", addresses[1], True) in cluster.ray.told)
        assert not senders[0].ended.done()
        await is_looked_at_again()  # the report is of the process that is gone
        assert cluster.ray.latest("prefill-1").card.address.epoch > addresses[1].epoch
        assert len(cluster.ray.actors) == 4
