"""A request that waits in the router."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem.scheduling.admission.fair_queue import QueueEntry
from tandem.scheduling.admission.forecast import Forecast
from tandem.scheduling.placement.placement import Held, Placement
from tandem.scheduling.request import PlacementRequest


@dataclass(eq=False, slots=True, kw_only=True)
class QueuedRequest(QueueEntry):
    """A request in the queue. `payload` belongs to the caller."""

    request: PlacementRequest
    forecast: Forecast  # at its arrival
    placement: Placement  # the latest one
    placed_s: float
    deadline_s: float  # deadline of its first token; inf = none
    version: int  # the queue's version when the request came
    payload: Any = None

    @property
    def latest_start_s(self) -> float:
        """The latest time at which its prompt must begin, by its latest placement."""
        terms = self.placement.best.terms
        return self.deadline_s - terms.fetch_s - terms.prefill_s


def held_by(queued: QueuedRequest) -> Iterator[tuple[str, Held]]:
    """The work that a waiting request holds for each of its workers, by worker id; both may be the same worker."""
    best = queued.placement.best
    yield best.prefill.worker_id, Held(prefill_s=queued.work.prefill_s)
    yield best.decode.worker_id, Held(num_seqs=1, kv_tokens=queued.placement.num_kv_tokens)
