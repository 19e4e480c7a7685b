"""Statistics of measured streams: percentiles, and one summary per run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tandem.loadtest.client import StreamTiming


@dataclass(frozen=True, slots=True)
class Distribution:
    """Count, mean and percentiles of durations in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution:
        """Distribution of the values; all NaN if there are none."""
        ordered = sorted(values)
        if not ordered:
            return cls(0, math.nan, math.nan, math.nan, math.nan, math.nan)
        p50, p90, p99 = (_percentile_of_sorted(ordered, q) for q in (50, 90, 99))
        return cls(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """The result of one run."""

    concurrency: int
    num_requests: int
    num_errors: int
    first_error: str
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: Distribution
    itl_s: Distribution  # gaps between events, of all streams together
    tpot_s: Distribution  # one value per stream

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of all good streams per second of the run."""
        return self.num_output_tokens / self.duration_s

    @property
    def requests_per_s(self) -> float:
        """Good requests per second."""
        return (self.num_requests - self.num_errors) / self.duration_s

    def as_dict(self) -> dict[str, Any]:
        """All fields and rates, ready for JSON: NaN, which means no sample, becomes None."""
        rates = {"output_tokens_per_s": self.output_tokens_per_s, "requests_per_s": self.requests_per_s}
        plain: dict[str, Any] = _without_nan(asdict(self) | rates)
        return plain


def summarize(timings: Sequence[StreamTiming], *, concurrency: int, duration_s: float) -> LoadSummary:
    """Summary of a run. A stream with an error counts as an error and in nothing else."""
    good = [timing for timing in timings if not timing.error]
    errors = [timing.error for timing in timings if timing.error]
    return LoadSummary(
        concurrency=concurrency,
        num_requests=len(timings),
        num_errors=len(errors),
        first_error=errors[0] if errors else "",
        duration_s=duration_s,
        num_prompt_tokens=sum(timing.num_prompt_tokens for timing in good),
        num_cached_tokens=sum(timing.num_cached_tokens for timing in good),
        num_output_tokens=sum(timing.num_output_tokens for timing in good),
        ttft_s=Distribution.of(timing.ttft_s for timing in good),
        itl_s=Distribution.of(gap for timing in good for gap in timing.itl_s),
        tpot_s=Distribution.of(tpot for timing in good if (tpot := timing.tpot_s) is not None),
    )


def percentile(values: Iterable[float], q: float) -> float:
    """The q-th percentile (0 to 100), linear between neighbours like numpy's default; NaN without values."""
    ordered = sorted(values)
    return _percentile_of_sorted(ordered, q) if ordered else math.nan


def _percentile_of_sorted(ordered: Sequence[float], q: float) -> float:
    position = (len(ordered) - 1) * q / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def minutes_of(seconds: float) -> str:
    """A duration in minutes and seconds, such as 4:08."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}"
