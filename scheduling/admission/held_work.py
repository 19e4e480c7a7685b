"""The work that waits in the router for each worker, summed by tenant and worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from tandem.scheduling.admission.queued_request import QueuedRequest, held_by
from tandem.scheduling.placement.placement import Held

_NOTHING: Mapping[str, Held] = {}


class HeldWork:
    """Sums over the waiting requests, so that a forecast need not visit each of them."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, Held]] = {}  # by tenant and worker id
        self._num_parts: Counter[tuple[str, str]] = Counter()  # requests in each sum

    def of(self, tenant: str) -> Mapping[str, Held]:
        """The work that the tenant's requests hold for each worker, by worker id."""
        return self._held.get(tenant, _NOTHING)

    def add(self, queued: QueuedRequest) -> None:
        """Count a request for the workers of its placement."""
        self._change(queued, 1)

    def remove(self, queued: QueuedRequest) -> None:
        """Stop counting a request. Its placement must be the one it was added with."""
        self._change(queued, -1)

    def check_integrity(self, requests: Collection[QueuedRequest]) -> None:
        """Raise AssertionError unless exactly these requests are counted."""
        parts = Counter((queued.tenant, worker_id) for queued in requests for worker_id, _ in held_by(queued))
        assert parts == self._num_parts, "the numbers of held requests disagree"
        found = {(tenant, worker_id) for tenant, workers in self._held.items() for worker_id in workers}
        assert parts.keys() == found, "work is held for other workers"
        assert all(self._held.values()), "a tenant without held work is remembered"

    def _change(self, queued: QueuedRequest, sign: int) -> None:
        tenant = queued.tenant
        held = self._held.setdefault(tenant, {})
        for worker_id, (prefill_s, num_seqs, kv_tokens) in held_by(queued):
            part = Held(sign * prefill_s, sign * num_seqs, sign * kv_tokens)
            held[worker_id] = held[worker_id].plus(part) if worker_id in held else part
            num_parts = self._num_parts[tenant, worker_id] = self._num_parts[tenant, worker_id] + sign
            if num_parts == 0:
                del held[worker_id], self._num_parts[tenant, worker_id]
        if not held:
            del self._held[tenant]
