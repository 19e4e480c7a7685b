"""Statistics of measured streams: percentiles, and one summary per run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

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
        p50, p90, p99 = np.percentile(ordered, (50, 90, 99)).tolist()
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
        """All fields and rates, ready for JSON."""
        rates = {"output_tokens_per_s": self.output_tokens_per_s, "requests_per_s": self.requests_per_s}
        plain: dict[str, Any] = without_nan(asdict(self) | rates)
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


def without_nan(value: Any) -> Any:
    """The value ready for JSON: NaN, which means no sample, becomes null."""
    if isinstance(value, dict):
        return {str(key): without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def minutes_of(seconds: float) -> str:
    """A duration in minutes and seconds, such as 4:08."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02}"
