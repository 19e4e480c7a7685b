"""Gives workers other roles while they serve, as the autoscaler, the supervisor or an operator asks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import partial

from ray.exceptions import RayError

from tandem.cluster.member import Member, MemberState, Requests, first_line, member_of, named, remember
from tandem.protocol.errors import RoleRefused, ServingError, WorkerError
from tandem.protocol.messages import Role
from tandem.runtime.background import BackgroundTasks

logger = logging.getLogger(__name__)


class RoleFlips:
    """All flips of one cluster."""

    def __init__(self, members: Mapping[str, Member], background: BackgroundTasks) -> None:
        self._members = members
        self._background = background
        self.latest: list[dict[str, object]] = []

    def flip(self, worker_id: str, role: Role, reason: str) -> asyncio.Task[None]:
        """Begin to give a worker another role; its cache stays. The task ends with the requests of its old role.

        It gets nothing more of its old role, serves in the new one within milliseconds, and finishes its old requests
        beside that: any worker can do both, and placement counts what it delays there.
        """
        member = member_of(self._members, worker_id)
        if member is not None:
            member.plan_flip(role)
        return self._background.start(f"the flip of {worker_id}", partial(self._flip, member, role, reason))

    async def set_role(self, worker: str, role: Role) -> dict[str, object]:
        """As `ManagedWorkers.set_role`: a flip that an operator asks for."""
        member = named(self._members, worker)
        self._check(member, role)
        async with member.flipping(role):
            record = self._record(member, role, "an operator asked for it")
            left = await self._switch(member, role, record)
        if left is None:
            raise WorkerError(f"{worker} did not flip to {role}: {record['failed']}")
        self._background.start(f"the old role's requests of {worker}", partial(self._drain, member, left, record))
        return record

    async def _flip(self, member: Member | None, role: Role, reason: str) -> None:
        if member is None:
            return
        async with member.flipping(role):
            if member.state is not MemberState.UP:
                return
            record = self._record(member, role, reason)
            left = await self._switch(member, role, record)
        if left is not None:
            await self._drain(member, left, record)

    def _check(self, member: Member, role: Role) -> None:
        """Raise `RoleRefused` if the worker cannot switch to this role now."""
        name = member.worker_id
        if not member.is_up:
            raise RoleRefused(f"{name} is not up; ask again when it is.")
        if member.state is MemberState.DRAINING:
            raise RoleRefused(f"{name} is leaving.")
        if member.is_flipping:
            raise RoleRefused(f"{name} is about to change its role; ask again in a moment.")
        if member.role is Role.COLOCATED:
            raise RoleRefused(f"{name} does both: start the server with --prefill and --decode for roles.")
        if member.role is role:
            raise RoleRefused(f"{name} is already a {role} worker.")
        if member.fixed_role:
            raise RoleRefused(f"{name} keeps its role: {member.fixed_role}.")
        if any(self._stays_in(member.role, one) for one in self._members.values() if one is not member):
            return
        if member.role is Role.DECODE:
            raise RoleRefused(f"{name} is the only decode worker, so nothing could answer: flip another one first.")
        if not member.can_cover:
            raise RoleRefused(
                f"{name} is the only prefill worker, and no other worker computes prompts: it keeps its role."
            )

    def _stays_in(self, role: Role, member: Member) -> bool:
        """Whether a worker serves in this role, and neither leaves nor is about to change its role."""
        return member.role is member.role_to_be is role and member.state is MemberState.UP

    def _record(self, member: Member, role: Role, reason: str) -> dict[str, object]:
        record: dict[str, object] = {
            "worker": member.worker_id,
            "from": member.role,
            "to": role,
            "reason": reason,
            "began": round(time.time(), 3),  # Unix time
        }
        remember(self.latest, record)
        return record

    async def _switch(self, member: Member, role: Role, record: dict[str, object]) -> Requests | None:
        """Let it serve in its new role. Returns the requests left from its old one, or None if it did not flip."""
        began_s = time.monotonic()
        try:
            left = await member.switch_role(role, str(record["reason"]))
        except (RayError, ServingError, TimeoutError, KeyError) as exc:
            record["failed"] = first_line(exc)
            logger.warning("%s did not flip to %s: %s", member.worker_id, role, record["failed"])
            return None
        record["serving_after_s"] = round(time.monotonic() - began_s, 4)
        return left

    async def _drain(self, member: Member, left: Requests, record: dict[str, object]) -> None:
        """Wait until it has finished the requests of its old role."""
        began_s, serving_after_s = time.monotonic(), float(str(record["serving_after_s"]))
        try:
            await member.finish(left)
        except (RayError, ServingError, TimeoutError) as exc:
            record["not_drained"] = first_line(exc)
            logger.warning("%s serves as %s, but is not drained: %s", member.worker_id, record["to"], first_line(exc))
        else:
            record["drained_after_s"] = round(serving_after_s + time.monotonic() - began_s, 4)
