"""A worker's life: which transition is allowed from which state, and that each death is handled once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from tandem.cluster.member import Death, Member, MemberState
from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import Role, WorkerState
from tandem.scheduling.workers.workers import WorkerChange
from tests.support.plain_member import PlainMember
from tests.support.supervised import Supervised, supervised
from tests.support.waiting import eventually

DOWN, STARTING, UP, DRAINING, LEAVING, GONE = MemberState

STEPS: dict[str, Callable[[Member], object]] = {
    "begin": lambda member: member.begin(),
    "serve": lambda member: member.serve(),
    "restart": lambda member: member.drain(restart=True),
    "leave": lambda member: member.drain(restart=False),
    "give_up": lambda member: member.give_up("late"),
    "die": lambda member: member.die("killed"),
    "forget": lambda member: member.forget(),
}
WAYS = {  # to each state; a worker that drains remembers what follows
    "down": "",
    "starting": "begin",
    "up": "begin serve",
    "draining to restart": "begin serve restart",
    "draining to leave": "begin serve leave",
    "leaving": "give_up",
    "gone": "give_up forget",
}
ALLOWED = {
    ("down", "begin"): STARTING,
    ("down", "give_up"): LEAVING,
    ("starting", "serve"): UP,
    ("starting", "give_up"): LEAVING,
    ("starting", "die"): DOWN,
    ("up", "restart"): DRAINING,
    ("up", "leave"): DRAINING,
    ("up", "die"): DOWN,
    ("draining to restart", "die"): DOWN,
    ("draining to leave", "die"): LEAVING,
    ("leaving", "forget"): GONE,
    # A second report of the same death, from either side.
    ("down", "die"): DOWN,
    ("leaving", "die"): LEAVING,
    ("gone", "die"): GONE,
}


async def member_in(way: str) -> Member:
    member = PlainMember("decode-0", Role.DECODE)
    for step in WAYS[way].split():
        STEPS[step](member)
    return member


@pytest.mark.parametrize(("way", "step"), list(itertools.product(WAYS, STEPS)))
async def test_each_transition_is_allowed_from_its_states_only(way: str, step: str) -> None:
    member = await member_in(way)
    before = member.state
    if (after := ALLOWED.get((way, step))) is not None:
        STEPS[step](member)
        assert member.state is after
    else:
        with pytest.raises((AssertionError, WorkerError)):
            STEPS[step](member)
        assert member.state is before


@pytest.mark.parametrize("way", WAYS)
async def test_what_is_read_of_a_worker_follows_its_state(way: str) -> None:
    member = await member_in(way)
    assert member.is_up is (member.state in (UP, DRAINING))
    assert member.is_coming is (member.state in (DOWN, STARTING))
    assert member.has_been_up is ("up" in way or "draining" in way)


async def test_a_process_that_died_while_it_joined_does_not_serve() -> None:
    member = await member_in("starting")
    member.die("silent for 6.0 s")
    with pytest.raises(WorkerError, match="decode-0 died while it started"):
        member.serve()
    member.begin()
    member.give_up("no room by its deadline")
    with pytest.raises(WorkerError, match="no room by its deadline"):
        member.serve()


async def test_the_first_report_of_a_death_counts() -> None:
    member = PlainMember("decode-0", Role.DECODE)
    death = member.begin()
    member.serve()
    member.die("silent for 6.0 s")
    member.die("its process has died")
    assert (death.result().reason, death.result().before) == ("silent for 6.0 s", UP)
    assert member.begin() is not death


async def test_the_end_of_a_wait_is_the_end_of_the_process_that_was_waited_for() -> None:
    member = PlainMember("decode-0", Role.DECODE)
    death = member.begin()
    member.give_up("late")
    assert death.result() == Death("late", STARTING, 0.0)


async def test_a_worker_that_covered_is_what_it_was_when_it_has_died() -> None:
    member = PlainMember("prefill-0", Role.PREFILL)
    member.begin()
    member.serve()
    member.cover()
    await member.switch_role(Role.DECODE, "a test")
    member.die("killed")
    assert (member.role, member.home_role) == (Role.PREFILL, None)


async def test_flips_wait_for_each_other_and_the_latest_tells_the_role_to_be() -> None:
    member = await member_in("up")
    member.plan_flip(Role.PREFILL)
    assert (member.role_to_be, member.is_flipping) == (Role.PREFILL, False)
    async with member.flipping(Role.PREFILL):
        assert member.is_flipping
        second = asyncio.create_task(enter(member, Role.DECODE))
        await eventually(lambda: member.role_to_be is Role.DECODE)
        assert not second.done()
    await second
    assert (member.role_to_be, member.is_flipping) == (Role.DECODE, False)


async def enter(member: Member, role: Role) -> None:
    async with member.flipping(role):
        pass


def ray_reports(cluster: Supervised) -> None:
    cluster.ray.kill(cluster.ray.latest("prefill-1"), no_restart=True)


def router_reports(cluster: Supervised) -> None:
    cluster.registry.set_state("prefill-1", WorkerState.DEAD, "silent for 6.0 s")


@pytest.mark.parametrize(
    ("reports", "num_lost"),
    [((ray_reports, router_reports), 1), ((router_reports, ray_reports), 0), ((router_reports,), 0)],
    ids=["ray-first", "router-first", "router-alone"],
)
async def test_a_death_that_is_reported_from_both_sides_is_handled_once(
    monkeypatch: pytest.MonkeyPatch, reports: tuple[Callable[[Supervised], None], ...], num_lost: int
) -> None:
    async with supervised(monkeypatch, num_prefill=2, num_decode=1, max_restarts=9) as cluster:
        member, dead = cluster.supervisor.members["prefill-1"], cluster.ray.latest("prefill-1")
        for report in reports:
            report(cluster)
            await eventually(lambda: member.state is not UP)
        await cluster.is_served("prefill-1", dead.card.address.epoch)
        await eventually(lambda: len(cluster.ray.told) == 4)
        told = sorted((what, worker) for worker, what, *_ in cluster.ray.told)
        assert told == [(what, name) for what in ("peer_died", "peer_given_up") for name in ("decode-0", "prefill-0")]
        assert member.restarts.num_deaths == 1
        assert cluster.workers.lost == ["prefill-1"] * num_lost, "the router is told only what it does not know"
        assert len(cluster.ray.actors) == 4
        assert dead.is_gone


async def test_a_late_report_of_an_earlier_process_spares_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, max_restarts=9) as cluster:
        first, member = cluster.registry.get("decode-0"), cluster.supervisor.members["decode-0"]
        assert first is not None
        cluster.die("decode-0")
        await cluster.is_served("decode-0", first.card.address.epoch)
        await member.until(UP)
        assert first.state is WorkerState.DEAD
        cluster.supervisor._on_change(WorkerChange(first, "silent for 6.0 s"))
        assert member.state is UP
