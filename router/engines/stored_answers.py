"""Which engine keeps which answer: a response can only be continued, read and cancelled where it was made."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

MAX_STORED_ANSWERS = 32_768  # older ones are forgotten; with their ids they take 10 MB
MAX_ID_CHARS = 256


class _Owner(NamedTuple):
    engine: str
    tenant: str


class StoredAnswers:
    """The engines of the latest answers. An answer is known to its tenant only."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, _Owner] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def note(self, answer_id: str, engine: str, tenant: str) -> None:
        """The engine keeps this answer. An id that is taken already, or too long, is ignored."""
        if len(answer_id) > MAX_ID_CHARS or answer_id in self._owners:
            return
        self._owners[answer_id] = _Owner(engine, tenant)
        if len(self._owners) > MAX_STORED_ANSWERS:
            self._owners.popitem(last=False)

    def engine_of(self, answer_id: str, tenant: str) -> str | None:
        """The engine that keeps this answer of the tenant, if it is known."""
        owner = self._owners.get(answer_id)
        if owner is None or owner.tenant != tenant:
            return None
        self._owners.move_to_end(answer_id)
        return owner.engine
