"""Workers that leave on purpose: what they wait for, what follows, and which may not. Ray is a fake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from tandem.cluster.owned_actor import WatchNews
from tandem.cluster.worker_member import WorkerMember
from tandem.protocol.errors import DrainRefused, RoleRefused, WorkerNotFound
from tandem.protocol.messages import Role, WorkerState
from tandem.runtime.backoff import Backoff
from tandem.scheduling.workers.bookings import Booking
from tandem.scheduling.workers.load import RequestLoad
from tests.support.supervised import QUICK, FakeActor, Supervised, supervised
from tests.support.waiting import eventually


def busy(**fields: Any) -> SimpleNamespace:
    idle = {"request_ids": frozenset(), "num_open_handoffs": 0, "num_open_leases": 0, "num_open_reads": 0}
    return SimpleNamespace(**(idle | fields))


def working(cluster: Supervised, worker_id: str) -> FakeActor:
    """A worker that has a request."""
    actor = cluster.ray.latest(worker_id)
    actor.status_ = busy(request_ids={"r"})
    return actor


def state_of(cluster: Supervised, worker_id: str) -> WorkerState | None:
    worker = cluster.registry.get(worker_id)
    return None if worker is None else worker.state


@pytest.mark.parametrize("work", [{"request_ids": {"r"}}, {"num_open_handoffs": 1}, {"num_open_reads": 1}])
async def test_a_worker_is_restarted_once_it_is_idle(monkeypatch: pytest.MonkeyPatch, work: dict[str, Any]) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=2, max_restarts=0) as cluster:
        first = cluster.ray.latest("decode-1")
        first.status_ = busy(**work)
        record = await cluster.supervisor.drain("decode-1", 60, restart=True)
        await eventually(lambda: state_of(cluster, "decode-1") is WorkerState.DRAINING)
        assert not first.num_stops
        with pytest.raises(DrainRefused, match="decode-1 is already leaving"):
            await cluster.supervisor.drain("decode-1", 60, restart=True)
        with pytest.raises(RoleRefused, match="decode-1 is leaving"):
            await cluster.supervisor.set_role("decode-1", Role.PREFILL)
        first.status_ = busy()
        await cluster.is_served("decode-1", first.card.address.epoch)
        assert (record["finished"], first.num_stops) == (True, 1)
        await eventually(lambda: "back_after_s" in record)
        assert not cluster.supervisor.members["decode-1"].restarts.num_deaths, "it did not die"
        await eventually(lambda: ("decode-0", "peer_died", first.card.address, True) in cluster.ray.told)
        assert cluster.supervisor.autoscaler_status["departures"] == [record]


async def test_a_drained_worker_is_gone_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=2) as cluster:
        left = cluster.ray.latest("decode-1")
        await cluster.supervisor.drain("decode-1", 60, restart=False)
        await eventually(lambda: left.is_gone and "decode-1" not in cluster.supervisor.members)
        assert cluster.roles() == {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
        assert len(cluster.ray.actors) == 3
        assert "back_after_s" not in cluster.supervisor.drains.latest[0]
        with pytest.raises(WorkerNotFound, match="no worker 'decode-1'; there are: prefill-0, decode-0"):
            await cluster.supervisor.drain("decode-1", 60, restart=False)
        assert not cluster.supervisor.failure.done()


@pytest.mark.parametrize("answers", [True, False])
async def test_one_that_goes_on_is_ended_after_its_grace(monkeypatch: pytest.MonkeyPatch, answers: bool) -> None:
    timing = replace(QUICK, leave_s=0.05)
    async with supervised(monkeypatch, num_prefill=1, num_decode=2, timing=timing) as cluster:
        first = working(cluster, "decode-1")
        if not answers:
            cluster.ray.stops.clear()
        record = await cluster.supervisor.drain("decode-1", 0.05, restart=True)
        await cluster.is_served("decode-1", first.card.address.epoch)
        assert (record["finished"], "ended_by_force" in record) == (False, not answers)
        cluster.ray.stops.set()


async def test_others_cover_for_the_last_worker_of_a_pool_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1) as cluster:
        first = working(cluster, "decode-0")
        await cluster.supervisor.drain("decode-0", 60, restart=True)
        await eventually(lambda: cluster.roles()["prefill-0"] is Role.DECODE)
        assert not first.num_stops
        first.status_ = busy()
        await cluster.is_served("decode-0", first.card.address.epoch)
        await eventually(lambda: cluster.roles() == {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE})


async def test_half_of_a_pair_stays_while_it_is_the_only_one_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerMember, "can_cover", False)
    async with supervised(monkeypatch, num_prefill=1, num_decode=1) as cluster:
        for worker in ("prefill-0", "decode-0"):
            with pytest.raises(DrainRefused, match=f"Without {worker}"):
                await cluster.supervisor.drain(worker, 60, restart=False)


async def test_one_that_is_down_or_flipping_is_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=2, num_decode=1) as cluster:
        cluster.registry.set_state("prefill-0", WorkerState.DRAINING, "it flips")
        with pytest.raises(DrainRefused, match="about to change its role"):
            await cluster.supervisor.drain("prefill-0", 60, restart=True)
        cluster.registry.set_state("prefill-0", WorkerState.READY, "it does not")
        async with cluster.supervisor.members["prefill-0"].flipping(Role.DECODE):
            with pytest.raises(DrainRefused, match="about to change its role"):
                await cluster.supervisor.drain("prefill-0", 60, restart=True)
        cluster.ray.loaded.clear()
        cluster.die("prefill-1")
        await eventually(lambda: state_of(cluster, "prefill-1") is None)
        with pytest.raises(DrainRefused, match="prefill-1 is not up"):
            await cluster.supervisor.drain("prefill-1", 60, restart=True)


async def test_one_that_dies_on_its_way_out_is_replaced_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=2) as cluster:
        first = working(cluster, "decode-1")
        record = await cluster.supervisor.drain("decode-1", 60, restart=True)
        await eventually(lambda: state_of(cluster, "decode-1") is WorkerState.DRAINING)
        cluster.die("decode-1")
        await cluster.is_served("decode-1", first.card.address.epoch)
        await eventually(lambda: "left_after_s" in record)
        assert not cluster.ray.latest("decode-1").num_stops, "the new process is not the one that was to leave"
        assert state_of(cluster, "decode-1") is WorkerState.READY


async def test_end_that_is_noticed_before_the_answer_is_not_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=2) as cluster:
        first, member = cluster.ray.latest("decode-1"), cluster.supervisor.members["decode-1"]

        async def stop() -> None:
            first.ended.set_result("stopped")
            await eventually(lambda: not member.is_up)
            raise RayActorError

        monkeypatch.setattr(first, "stop", SimpleNamespace(remote=stop))
        record = await cluster.supervisor.drain("decode-1", 60, restart=False)
        await eventually(lambda: "left_after_s" in record)
        assert record["finished"]
        assert "ended_by_force" not in record


async def test_one_that_is_being_added_leaves_when_it_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1) as cluster:
        cluster.ray.placed.clear()
        arrival = await cluster.supervisor.add_worker(Role.DECODE)
        record = await cluster.supervisor.drain("decode-1", 60, restart=False)
        with pytest.raises(DrainRefused, match="decode-1 is already leaving"):
            await cluster.supervisor.drain("decode-1", 60, restart=False)
        await eventually(lambda: "left_after_s" in record)
        assert arrival["withdrawn"] == "an operator asked for it"
        assert set(cluster.supervisor.members) == {"prefill-0", "decode-0"}
        assert not cluster.supervisor.failure.done()


@pytest.mark.parametrize("waits_for", ["a place", "its next start"])
async def test_one_that_stays_away_leaves_when_drained(monkeypatch: pytest.MonkeyPatch, waits_for: str) -> None:
    backoff = Backoff(0.01 if waits_for == "a place" else 3600.0, 3600.0)
    async with supervised(monkeypatch, num_prefill=1, num_decode=2, backoff=backoff) as cluster:
        if waits_for == "a place":
            cluster.ray.placed.clear()
        num_actors = len(cluster.ray.actors)
        cluster.die("decode-1")
        await eventually(lambda: state_of(cluster, "decode-1") is None)
        if waits_for == "a place":
            await eventually(lambda: len(cluster.ray.actors) > num_actors)
        record = await cluster.supervisor.drain("decode-1", 60, restart=False)
        await eventually(lambda: "left_after_s" in record)
        assert set(cluster.supervisor.members) == {"prefill-0", "decode-0"}
        assert not cluster.supervisor.failure.done()
        monkeypatch.setattr(WorkerMember, "can_cover", False)
        with pytest.raises(DrainRefused, match="Without decode-0"):
            await cluster.supervisor.drain("decode-0", 60, restart=False)


async def test_a_worker_that_got_sigterm_is_drained_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=2, max_restarts=0) as cluster:
        first = working(cluster, "decode-1")
        first.news.put_nowait(WatchNews.ASKED_TO_LEAVE)
        await eventually(lambda: state_of(cluster, "decode-1") is WorkerState.DRAINING)
        first.news.put_nowait(WatchNews.ASKED_TO_LEAVE)  # again, to no avail
        assert not first.num_stops, "it has work"
        first.status_ = busy()
        await cluster.is_served("decode-1", first.card.address.epoch)
        [record] = cluster.supervisor.drains.latest
        assert (record["reason"], record["finished"]) == ("it got SIGTERM", True)
        assert not cluster.supervisor.members["decode-1"].restarts.num_deaths


async def test_one_that_gets_sigterm_while_it_flips_leaves_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=2, num_decode=1) as cluster:
        first, may_flip = cluster.ray.latest("prefill-1"), asyncio.Event()
        monkeypatch.setattr(first, "set_role", SimpleNamespace(remote=lambda _: may_flip.wait()))
        flip = asyncio.create_task(cluster.supervisor.set_role("prefill-1", Role.DECODE))
        await eventually(lambda: cluster.supervisor.members["prefill-1"].is_flipping)
        first.news.put_nowait(WatchNews.ASKED_TO_LEAVE)
        await eventually(first.news.empty)
        with pytest.raises(RoleRefused, match="prefill-1 is about to change its role"):
            await cluster.supervisor.set_role("prefill-1", Role.DECODE)
        may_flip.set()
        await flip
        await cluster.is_served("prefill-1", first.card.address.epoch)
        [record] = cluster.supervisor.drains.latest
        assert record["reason"] == "it got SIGTERM"


def is_fallback(cluster: Supervised, worker_id: str) -> bool:
    worker = cluster.registry.get(worker_id)
    return worker is not None and worker.is_fallback


async def others_die(cluster: Supervised) -> None:
    """All but decode-0, and no other process serves before `cluster.ray.loaded` is set."""
    cluster.ray.loaded.clear()
    for name in ("prefill-0", "decode-1"):
        cluster.die(name)
    await eventually(lambda: {worker.worker_id for worker in cluster.registry} == {"decode-0"})


@pytest.mark.parametrize("restart", [True, False])
async def test_the_one_that_leaves_serves_if_others_are_dead(monkeypatch: pytest.MonkeyPatch, restart: bool) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=2) as cluster:
        leaving = working(cluster, "decode-0")
        record = await cluster.supervisor.drain("decode-0", 3600, restart=restart)
        await eventually(lambda: is_fallback(cluster, "decode-0"))
        await others_die(cluster)
        leaving.status_ = busy()
        looks = Looks(monkeypatch, leaving)
        await looks.more(20)
        assert (is_fallback(cluster, "decode-0"), leaving.num_stops) == (True, 0), "it is idle, but the only one"
        cluster.ray.loaded.set()
        await eventually(lambda: "left_after_s" in record)
        assert (record["finished"], leaving.num_stops) == (True, 1)
        assert not cluster.supervisor.failure.done()


class Looks:
    """Counts how often a departure has looked whether its worker is idle, and does `meanwhile` at each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, actor: Any) -> None:
        self.num = 0
        self.meanwhile: Callable[[], None] = lambda: None

        async def status() -> Any:
            self.num += 1
            self.meanwhile()
            return actor.status_

        monkeypatch.setattr(actor, "status", SimpleNamespace(remote=status))

    async def more(self, count: int) -> None:
        least = self.num + count
        await eventually(lambda: self.num >= least)


async def test_at_its_deadline_it_leaves_though_nobody_else_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=2) as cluster:
        leaving = cluster.ray.latest("decode-0")
        now_s = time.monotonic()
        monkeypatch.setattr("tandem.cluster.draining.time", SimpleNamespace(monotonic=lambda: now_s, time=time.time))
        record = await cluster.supervisor.drain("decode-0", 30, restart=True)
        await eventually(lambda: is_fallback(cluster, "decode-0"))
        await others_die(cluster)
        states: list[bool] = []
        stop = leaving.stop.remote  # type: ignore[attr-defined]

        async def noted_stop() -> None:
            states.append(is_fallback(cluster, "decode-0"))
            await stop()

        monkeypatch.setattr(leaving, "stop", SimpleNamespace(remote=noted_stop))
        leaving.status_ = busy(request_ids={"r"})
        await Looks(monkeypatch, leaving).more(5)
        assert states == []
        now_s += 31
        await eventually(lambda: "left_after_s" in record)
        assert (record["finished"], states) == (False, [False]), "nothing went there any more when it was told to stop"
        cluster.ray.loaded.set()
        await cluster.is_served("decode-0", 1)


async def test_what_was_sent_at_the_last_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=2) as cluster:
        leaving, can_spare, bookings = cluster.ray.latest("decode-0"), [True], list[Booking]()
        monkeypatch.setattr(cluster.supervisor.drains, "_can_spare", lambda _: can_spare[0])
        leaving.status_ = busy(request_ids={"r"})
        record = await cluster.supervisor.drain("decode-0", 3600, restart=False)
        await eventually(lambda: is_fallback(cluster, "decode-0"))
        can_spare[0] = False
        leaving.status_ = busy()
        looks = Looks(monkeypatch, leaving)
        await looks.more(20)

        def book() -> None:
            """The worker does not know yet that the router sends it a request, and others are back."""
            if not bookings:
                bookings.append(cluster.registry.reserve(RequestLoad("decode-0", "decode-0", 10, 0, 20)))
                can_spare[0] = True

        looks.meanwhile = book
        await looks.more(20)
        assert not leaving.num_stops
        bookings[0].release()
        await eventually(lambda: "left_after_s" in record)
        assert (record["finished"], leaving.num_stops) == (True, 1)


async def test_the_only_one_may_restart_but_not_drain_and_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1) as cluster:
        await cluster.supervisor.drain("prefill-0", 60, restart=False)
        await eventually(lambda: "prefill-0" not in cluster.supervisor.members)
        first = working(cluster, "decode-0")
        with pytest.raises(DrainRefused, match="Without decode-0 no worker could answer"):
            await cluster.supervisor.drain("decode-0", 60, restart=False)
        await cluster.supervisor.drain("decode-0", 3600, restart=True)
        await eventually(lambda: state_of(cluster, "decode-0") is WorkerState.DRAINING)
        assert not is_fallback(cluster, "decode-0"), "its operator wants it so: its answers end soon"
        first.status_ = busy()
        await cluster.is_served("decode-0", first.card.address.epoch)


async def test_last_one_that_dies_does_not_take_its_successor_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=2) as cluster:
        first = working(cluster, "decode-0")
        record = await cluster.supervisor.drain("decode-0", 3600, restart=True)
        await eventually(lambda: is_fallback(cluster, "decode-0"))
        for name in ("prefill-0", "decode-1", "decode-0"):
            cluster.die(name)
        await cluster.is_served("decode-0", first.card.address.epoch)
        await eventually(lambda: "left_after_s" in record)
        assert state_of(cluster, "decode-0") is WorkerState.READY
