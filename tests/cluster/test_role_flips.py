"""Which flips of roles are refused. Members are fakes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayActorError

from tandem.cluster.member import Requests
from tandem.cluster.role_flips import RoleFlips
from tandem.protocol.errors import RoleRefused, WorkerError
from tandem.protocol.messages import Role
from tandem.runtime.background import BackgroundTasks
from tests.support.plain_member import PlainMember

FIXED = "its server cannot"


class FakeMember(PlainMember):
    def __init__(self, worker_id: str, role: Role, *, can_cover: bool = True, fixed_role: str = "") -> None:
        super().__init__(worker_id, role)
        self.can_cover, self.fixed_role = can_cover, fixed_role
        self.answers = asyncio.Event()
        self.answers.set()
        self.begin()
        self.serve()

    async def switch_role(self, role: Role, reason: str) -> Requests:
        await self.answers.wait()
        return await super().switch_role(role, reason)


def flips_of(*members: FakeMember) -> RoleFlips:
    return RoleFlips({member.worker_id: member for member in members}, BackgroundTasks())


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


async def test_the_last_decode_worker_stays_while_another_one_leaves_or_flips() -> None:
    leaving, staying = halves(0, 2)
    flips = flips_of(leaving, staying, FakeMember("p", Role.PREFILL))
    leaving.drain(restart=True)
    with pytest.raises(RoleRefused, match="w1 is the only decode worker"):
        await flips.set_role("w1", Role.PREFILL)
    leaving.die("it was drained")
    leaving.begin()
    leaving.serve()
    leaving.answers.clear()  # its process is stopped
    flipping = asyncio.create_task(flips.set_role("w0", Role.PREFILL))
    await asyncio.sleep(0)
    assert leaving.role_to_be is Role.PREFILL, "the supervisor must not count it among those that decode"
    with pytest.raises(RoleRefused, match="w1 is the only decode worker"):
        await flips.set_role("w1", Role.PREFILL)
    leaving.answers.set()
    await flipping
    assert (leaving.role, leaving.role_to_be, staying.role) == (Role.PREFILL, Role.PREFILL, Role.DECODE)
    await flips.set_role("p", Role.DECODE)
    await flips.set_role("w1", Role.PREFILL)


async def test_a_worker_whose_role_is_fixed_is_never_flipped() -> None:
    members = halves(2, 2, fixed_role=FIXED)
    flips = flips_of(*members)
    with pytest.raises(RoleRefused, match=f"w0 keeps its role: {FIXED}"):
        await flips.set_role("w0", Role.DECODE)
    assert flips.latest == []
    assert [member.role for member in members] == [Role.PREFILL] * 2 + [Role.DECODE] * 2


async def test_a_flip_of_a_worker_that_dies_is_reported_in_one_line() -> None:
    class Dying(FakeMember):
        async def switch_role(self, role: Role, reason: str) -> Requests:
            raise RayActorError(
                error_msg=f"The actor died unexpectedly.\n\tpid: 7\nThe actor is dead: it does not become {role}."
            )

    flips = flips_of(Dying("w0", Role.PREFILL), FakeMember("w1", Role.PREFILL))
    with pytest.raises(WorkerError, match=r"^w0 did not flip to decode: The actor is dead: it does not become decode$"):
        await flips.set_role("w0", Role.DECODE)
    assert "\n" not in str(flips.latest[0]["failed"])
