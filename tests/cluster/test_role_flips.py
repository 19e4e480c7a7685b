"""Which flips of roles are refused. Members are fakes."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from tandem.cluster import role_flips
from tandem.cluster.member import Member, Requests
from tandem.cluster.role_flips import RoleFlips
from tandem.cluster.scaling import execute
from tandem.protocol.errors import RoleRefused
from tandem.protocol.messages import Role
from tandem.runtime.background import BackgroundTasks
from tandem.scheduling.autoscaling.autoscaler import Add, AutoscalerState, Flip, Move, Reason, Remove, ScalingDecision
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.workers.registry import Registry
from tests.support.waiting import eventually

FIXED = "its server cannot"


class FakeMember:
    def __init__(self, worker_id: str, role: Role, *, can_cover: bool = True, fixed_role: str = "") -> None:
        self.worker_id, self.role, self.can_cover, self.fixed_role = worker_id, role, can_cover, fixed_role
        self.departs = ""
        self.is_up = asyncio.Event()
        self.is_up.set()

    async def play(self, role: Role, _: str) -> Requests:
        self.role = role
        return frozenset()

    async def finish(self, _: Requests) -> None:
        pass


def flips_of(*members: FakeMember) -> RoleFlips:
    by_id = cast(dict[str, Member], {member.worker_id: member for member in members})
    return RoleFlips(by_id, Registry(), CostModel(), BackgroundTasks())


def halves(num_prefill: int, num_decode: int, **fields: Any) -> list[FakeMember]:
    roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * num_decode
    return [FakeMember(f"w{i}", role, **fields) for i, role in enumerate(roles)]


async def test_the_last_worker_of_a_pool_stays_where_none_serves_alone() -> None:
    flips = flips_of(*halves(1, 2, can_cover=False))
    with pytest.raises(RoleRefused, match="w0 is the only prefill worker"):
        await flips.set_role("w0", Role.DECODE)
    await flips.set_role("w1", Role.PREFILL)
    await flips.set_role("w0", Role.DECODE)
    with pytest.raises(RoleRefused, match="w1 is the only prefill worker"):
        await flips.set_role("w1", Role.DECODE)


async def test_the_last_prefill_worker_flips_where_others_serve_alone() -> None:
    assert (await flips_of(*halves(1, 1)).set_role("w0", Role.DECODE))["to"] is Role.DECODE


async def test_a_worker_whose_role_is_fixed_is_never_flipped(monkeypatch: pytest.MonkeyPatch) -> None:
    members = halves(2, 2, fixed_role=FIXED)
    flips = flips_of(*members)
    with pytest.raises(RoleRefused, match=f"w0 keeps its role: {FIXED}"):
        await flips.set_role("w0", Role.DECODE)
    move = Move("flip", Role.DECODE, flips=(Flip("w0", Role.DECODE),))
    decision = ScalingDecision(Reason.FLIP, "decode is short", move=move)
    monkeypatch.setattr(role_flips, "observe", lambda *_: None)
    monkeypatch.setattr(role_flips, "decide", lambda *_: (decision, AutoscalerState()))
    scaling = asyncio.create_task(flips.autoscale(0.001, lambda: 1.0))
    await eventually(lambda: flips.status.get("reason") == f"flip w0 to decode: decode is short, but {FIXED}")
    scaling.cancel()
    assert flips.latest == []
    assert [member.role for member in members] == [Role.PREFILL] * 2 + [Role.DECODE] * 2


class Fleet:
    """Notes what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def refusal(self, flip: Flip) -> str:
        return FIXED if flip.worker_id == "w1" else ""

    def flip(self, flip: Flip, reason: str) -> None:
        self.calls.append((flip, reason))

    def add(self, add: Add, reason: str) -> None:
        self.calls.append((add, reason))

    def remove(self, remove: Remove, reason: str) -> None:
        self.calls.append((remove, reason))

    def withdraw(self, add: Add) -> None:
        self.calls.append(("withdraw", add))


def test_every_part_of_a_move_is_carried_out_and_a_late_one_withdrawn() -> None:
    fleet, add = Fleet(), Add(Role.PREFILL, 2)
    flips = (Flip("w0", Role.DECODE), Flip("w1", Role.DECODE))
    decisions = [
        ScalingDecision(Reason.FLIP, "why", move=Move("flip", Role.DECODE, flips=flips)),
        ScalingDecision(Reason.ADD, "why", move=Move("add", Role.PREFILL, add=add)),
        ScalingDecision(Reason.REMOVE, "why", move=Move("remove", Role.PREFILL, removes=(Remove("w2"),))),
        ScalingDecision(Reason.WITHDRAWN, "why", withdrawn=Move("add", Role.PREFILL, add=add)),
        ScalingDecision(Reason.ON_TARGET, "why"),
    ]
    reasons = [execute(decision, fleet) for decision in decisions]
    assert reasons == [
        f"flip w0, w1 to decode: why, but {FIXED}",
        "add 2 prefill workers: why",
        "remove w2: why",
        "hold (withdrawn): why",
        "hold (on_target): why",
    ]
    assert fleet.calls == [
        (flips[0], "flip w0, w1 to decode: why"),
        (add, reasons[1]),
        (Remove("w2"), reasons[2]),
        ("withdraw", add),
    ]
