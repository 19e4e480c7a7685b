"""The outcomes of requests, counted by tenant."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from tandem.protocol.errors import ServingError
from tandem.scheduling.admission.tenants import Tenants

WAIT_BUCKETS_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(slots=True)
class TenantStats:
    """The outcomes of one tenant's requests."""

    num_admitted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # refused at once, by reason
    dropped: Counter[str] = field(default_factory=Counter)  # gave up after waiting, by reason
    wait_s: float = 0.0  # sum over the admitted requests
    waits: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BUCKETS_S) + 1))  # by bucket, the last is +Inf

    def add(self, other: TenantStats) -> None:
        """Add the counts of another queue."""
        self.num_admitted += other.num_admitted
        self.rejected.update(other.rejected)
        self.dropped.update(other.dropped)
        self.wait_s += other.wait_s
        self.waits = [sum(pair) for pair in zip(self.waits, other.waits, strict=True)]


class AdmissionStats:
    """The counts of all tenants, under their labels in metrics."""

    def __init__(self, tenants: Tenants) -> None:
        self.by_label: dict[str, TenantStats] = {}
        self._tenants = tenants

    def note_admitted(self, tenant: str, wait_s: float) -> None:
        """Count a request that was sent to its workers."""
        stats = self._of(tenant)
        stats.num_admitted += 1
        stats.wait_s += wait_s
        stats.waits[bisect_left(WAIT_BUCKETS_S, wait_s)] += 1

    def note_rejected(self, tenant: str, error: ServingError) -> None:
        """Count a request that was refused at once."""
        self._of(tenant).rejected[error.code or "other"] += 1

    def note_dropped(self, tenant: str, reason: str) -> None:
        """Count a request that left the queue unserved."""
        self._of(tenant).dropped[reason] += 1

    def _of(self, tenant: str) -> TenantStats:
        label = self._tenants.label(tenant)
        stats = self.by_label.get(label)
        if stats is None:
            stats = self.by_label[label] = TenantStats()
        return stats
