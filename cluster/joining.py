"""Workers that join a running cluster. One that cannot start is withdrawn, and the others go on serving."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

from tandem.cluster.member import Member, remember
from tandem.protocol.errors import AddRefused
from tandem.protocol.messages import Role


class Joins:
    """All workers that were added to one cluster."""

    def __init__(self, members: Mapping[str, Member], supervise: Callable[[Member, Member], None]) -> None:
        """`supervise` starts the first member and looks after it; it needs what the second one needs."""
        self._members = members
        self._supervise = supervise
        self.latest: list[dict[str, object]] = []

    def begin(self, role: Role, *, reason: str) -> dict[str, object]:
        """Begin to start one more worker; returns the join as JSON. Raises `AddRefused`."""
        like = self.like(role)
        used = {*self._members, *(str(record["worker"]) for record in self.latest)}
        name = next(name for number in itertools.count() if (name := f"{role}-{number}") not in used)
        record: dict[str, object] = {
            "worker": name,
            "role": role,
            "reason": reason,
            "began": round(time.time(), 3),  # Unix time
        }
        self._supervise(like.another(name, role), like)
        remember(self.latest, record)
        return record

    def note_up(self, member: Member) -> None:
        """Note that a worker serves."""
        if (record := self._record_of(member)) is not None:
            record.setdefault("serving_after_s", round(time.time() - float(str(record["began"])), 3))

    def withdraw(self, member: Member, reason: str) -> None:
        """Note that a worker could not be started, or that nobody waits for it now. It is not tried again."""
        if (record := self._record_of(member)) is not None:
            record["withdrawn"] = reason

    def like(self, role: Role) -> Member:
        """A worker to copy, preferably one of this role. Raises `AddRefused`."""
        members = list(self._members.values())  # including those that leave: all of them may be restarted at once
        if any(member.role is Role.COLOCATED for member in members) != (role is Role.COLOCATED):
            raise AddRefused(f"This server has no place for a {role} worker: its workers are of other kinds.")
        return min(members, key=lambda member: member.role is not role)

    def _record_of(self, member: Member) -> dict[str, object] | None:
        return next((record for record in self.latest if record["worker"] == member.worker_id), None)
