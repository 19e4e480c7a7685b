"""Rates and percentiles of a recent window, from counters that only grow. Knows no clock and no owners of metrics."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from prometheus_client.core import Metric

_COUNTERS = {
    "tandem_router_generation_tokens_total": "output_tokens",
    "tandem_router_prompt_tokens_total": "prompt_tokens",
    "tandem_router_cached_prompt_tokens_total": "cached_tokens",
    "tandem_router_stream_errors_total": "failed",
    "tandem_router_request_duration_seconds_count": "finished",
    "tandem_router_running_requests": "running",  # a gauge
}
_BUCKETS = {"tandem_router_ttft_seconds_bucket": "ttft_s", "tandem_router_itl_seconds_bucket": "itl_s"}
_REQUESTS = "tandem_router_requests_total"
_REFUSED = {"429", "503"}


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the start."""

    counts: dict[str, float] = field(default_factory=dict)
    # By name: pairs of a bucket's upper bound and the number of values up to it, ascending.
    buckets: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    errors: dict[tuple[str, str], float] = field(default_factory=dict)  # by status (499 = the client left) and route


@dataclass(frozen=True, slots=True)
class Change:
    """How much was counted between two times."""

    seconds: float
    first: Totals
    last: Totals

    def total(self, name: str) -> float:
        """Events in this time. A counter that fell was restarted, so nothing is known about it."""
        return max(self.last.counts.get(name, 0.0) - self.first.counts.get(name, 0.0), 0.0)

    def per_s(self, name: str) -> float:
        """Events a second."""
        return self.total(name) / self.seconds

    def ratio(self, part: str, whole: str) -> float | None:
        """One count as a share of another; None if there was nothing."""
        total = self.total(whole)
        return min(self.total(part) / total, 1.0) if total else None

    def quantiles(self, name: str, shares: Sequence[float]) -> list[float | None]:
        """Values that these shares of a histogram's values do not exceed, linear within a bucket; None without any.

        A value beyond the last bound counts as that bound.
        """
        before = dict(self.first.buckets.get(name, ()))
        counts = [(bound, count - before.get(bound, 0.0)) for bound, count in self.last.buckets.get(name, ())]
        if not counts or counts[-1][1] <= 0:
            return [None for _ in shares]
        return [_quantile([(0.0, 0.0), *counts], share) for share in shares]


class TrafficWindow:
    """Totals of the latest time. A gap between two looks does no harm: counters include all that happened."""

    def __init__(self, span_s: float = 60.0) -> None:
        self._span_s = span_s
        self._samples: deque[tuple[float, Totals]] = deque()

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, now: float, totals: Totals) -> None:
        """Note the totals of this moment; forget those that the window does not need."""
        while self._samples and self._samples[0][0] < now - self._span_s:
            self._samples.popleft()
        self._samples.append((now, totals))

    def latest(self, span_s: float) -> Change | None:
        """What changed in about this time before the latest totals; None until there are two of them."""
        if len(self._samples) < 2:
            return None
        last_s, last = self._samples[-1]
        first_s, first = next(sample for sample in self._samples if sample[0] >= last_s - span_s)
        if first_s == last_s:  # the one before is older: nobody looked for a while
            first_s, first = self._samples[-2]
        return Change(last_s - first_s, first, last)


def totals_of(metrics: Iterable[Metric]) -> Totals:
    """The totals in Prometheus' metrics of the HTTP side."""
    counts: defaultdict[str, float] = defaultdict(float)
    buckets: defaultdict[str, dict[float, float]] = defaultdict(dict)
    errors: defaultdict[tuple[str, str], float] = defaultdict(float)
    for metric in metrics:
        for sample in metric.samples:
            if sample.name in _COUNTERS:
                counts[_COUNTERS[sample.name]] += sample.value
            elif sample.name in _BUCKETS:
                buckets[_BUCKETS[sample.name]][float(sample.labels["le"])] = sample.value
            elif sample.name == _REQUESTS:
                status = sample.labels["status"]
                counts["refused" if status in _REFUSED else f"status_{status[0]}xx"] += sample.value
                if status >= "400":
                    errors[status, sample.labels["endpoint"]] += sample.value
    counts["failed"] += counts["status_5xx"]
    return Totals(dict(counts), {name: sorted(values.items()) for name, values in buckets.items()}, dict(errors))


def _quantile(counts: Sequence[tuple[float, float]], share: float) -> float:
    """`counts` are pairs of a bound and the number of values up to it; the first pair counts no values."""
    rank = share * counts[-1][1]
    for (low, num_low), (high, num_high) in pairwise(counts):
        if num_high >= rank and num_high > num_low:
            return low if high == float("inf") else low + (high - low) * (rank - num_low) / (num_high - num_low)
    return counts[-2][0]
