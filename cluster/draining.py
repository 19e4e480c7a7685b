"""Lets workers leave without failing a request: they get nothing new, their work ends or moves, their process ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from ray.exceptions import RayError

from tandem.cluster.member import Member, MemberState, first_line, named, remember
from tandem.protocol.errors import DrainRefused, ServingError
from tandem.protocol.messages import Role
from tandem.runtime.background import BackgroundTasks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What the supervisor and drains wait for."""

    ray_s: float = 5.0  # Ray needs milliseconds to end its workers, unless it is about to end itself
    gone_s: float = 5.0  # a replacement waits so long for the memory that a dead worker's process may still take
    leave_s: float = 15.0  # a drained worker has so long to end its process
    drain_poll_s: float = 0.1
    # A worker must have been idle for this long: an answer that has just left may be about to read its KV from here.
    quiet_s: float = 0.5


class Drains:
    """All planned drains of one cluster. What follows the end of a process is up to its member's supervision."""

    def __init__(
        self,
        members: Mapping[str, Member],
        background: BackgroundTasks,
        timing: Timing,
        *,
        cover: Callable[[], None],
    ) -> None:
        """`cover` lets others take over for a pool whose last worker is leaving."""
        self._members = members
        self._background = background
        self._timing = timing
        self._cover = cover
        self._num_begun = 0
        self.latest: list[dict[str, object]] = []

    def begin(self, worker: str, grace_s: float, *, restart: bool, reason: str) -> dict[str, object]:
        """Begin to let a worker leave; returns the drain as JSON. Raises `WorkerNotFound` or `DrainRefused`."""
        member = named(self._members, worker)
        self._check(member, restart=restart)
        self._num_begun += 1
        record: dict[str, object] = {
            "id": self._num_begun,
            "worker": worker,
            "pid": member.pid,
            "restart": restart,
            "reason": reason,
            "began": round(time.time(), 3),  # Unix time
        }
        remember(self.latest, record)
        if member.is_up:
            member.drain(restart=restart)
            leave = partial(self._drain, member, grace_s, record)
        else:  # it is being started, has no room, or dies repeatedly
            member.give_up(reason)
            leave = partial(self._note_gone, member, record)
        self._background.start(f"the drain of {worker}", leave)
        return record

    def note_up(self, member: Member) -> None:
        """Note, in the drain that asked for a restart, that the worker serves again."""
        for record in self.latest:
            if record["worker"] == member.worker_id and record["restart"]:
                record.setdefault("back_after_s", round(time.time() - float(str(record["began"])), 3))

    def _check(self, member: Member, *, restart: bool) -> None:
        name = member.worker_id
        if member.state in (MemberState.DRAINING, MemberState.LEAVING):
            raise DrainRefused(f"{name} is already leaving.")
        if restart and not member.is_up:
            raise DrainRefused(f"{name} is not up; ask again when it is.")
        if member.is_up and (member.is_flipping or not member.is_ready):
            raise DrainRefused(f"{name} is about to change its role; ask again in a moment.")
        if not restart and not self._can_spare(member):  # requests that nothing else can serve wait for a restart
            raise DrainRefused(f"Without {name} no worker could answer: add another worker first, or restart it.")

    def _can_spare(self, member: Member) -> bool:
        """Whether others could answer every request."""
        others = [one for one in self._members.values() if one.state is MemberState.UP and one is not member]
        can_decode = any(one.role is not Role.PREFILL or one.can_cover for one in others)
        can_prefill = any(one.role is not Role.DECODE or one.can_cover for one in others)
        return can_decode and can_prefill

    async def _note_gone(self, member: Member, record: dict[str, object]) -> None:
        """Wait until a worker that was given up is gone."""
        began_s = time.monotonic()
        await member.until(MemberState.GONE)
        record["finished"] = True
        record["left_after_s"] = round(time.monotonic() - began_s, 3)

    async def _drain(self, member: Member, grace_s: float, record: dict[str, object]) -> None:
        """Let it finish, for `grace_s` at most, then end its process.

        If the others that could answer are gone meanwhile, it serves until one of them is back.
        """
        began_s, actor = time.monotonic(), member.actor
        is_fallback = self._can_spare(member)
        member.withdraw(str(record["reason"]), is_fallback=is_fallback)
        self._cover()
        try:
            record["finished"] = await self._is_at_rest(member, grace_s, is_fallback=is_fallback)
            if member.actor is actor:
                await asyncio.wait_for(member.stop(), self._timing.leave_s)
        except (RayError, ServingError, TimeoutError) as exc:
            if member.is_up:  # else its end was noticed before the call returned
                logger.warning("%s is ended, as it does not leave: %s", member.worker_id, first_line(exc))
                record["ended_by_force"] = first_line(exc)
        finally:
            record["left_after_s"] = round(time.monotonic() - began_s, 3)
            if member.actor is actor:
                member.die("it was drained")

    async def _is_at_rest(self, member: Member, grace_s: float, *, is_fallback: bool) -> bool:
        """Wait at most `grace_s` until a worker is idle and nobody needs it. Returns whether it is idle.

        It may die meanwhile. NOTE: when this returns, nothing more goes to the worker, not even for lack of others.
        """
        deadline_s, actor = time.monotonic() + grace_s, member.actor
        idle_since_s: float | None = None
        while True:
            is_idle, now = await member.is_idle(), time.monotonic()
            if member.actor is not actor:
                return False
            idle_since_s = (idle_since_s or now) if is_idle else None
            is_quiet = idle_since_s is not None and now - idle_since_s >= self._timing.quiet_s
            if is_fallback and (now > deadline_s or (is_quiet and self._can_spare(member))):
                member.withdraw("its process is about to end")  # what was sent there just now is seen in the next look
                is_fallback = False
            elif not is_fallback and (is_quiet or now > deadline_s):
                return is_idle
            else:
                await asyncio.sleep(self._timing.drain_poll_s)
