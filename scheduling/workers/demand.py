"""What clients ask for: arrivals, lengths, hits and SLOs, counted as they come. Its size does not grow with traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

# Used where no SLO is set: what feels prompt to a person who reads along.
DEFAULT_TTFT_S = 2.0
DEFAULT_ITL_S = 0.1
NUM_BUCKETS = 21  # buckets of new prompt tokens, by powers of two; the last one holds all prompts beyond 2^19


class Bucket(NamedTuple):
    """Requests of similar prompts. All are sums."""

    num_requests: float = 0.0
    new_tokens: float = 0.0
    ttft_slo_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Sums over requests since the start."""

    num_requests: float = 0.0
    cached_tokens: float = 0.0
    prompt_tokens: float = 0.0
    prompt_squares: float = 0.0  # sum of the squares of prompts' lengths
    itl_slo_s: float = 0.0
    buckets: tuple[Bucket, ...] = (Bucket(),) * NUM_BUCKETS
    num_answers: float = 0.0
    output_tokens: float = 0.0


class DemandMeter:
    """Counts each request once, when it arrives, also if it has to wait or is refused."""

    def __init__(self) -> None:
        self._num_requests = self._cached_tokens = self._prompt_tokens = self._prompt_squares = 0
        self._itl_slo_s = 0.0
        self._num_answers = self._output_tokens = 0
        self._buckets = [Bucket()] * NUM_BUCKETS
        self.num_waiting_tokens = 0  # prompt tokens that wait in the router, and so are booked on no worker

    def note(
        self, num_prompt_tokens: int, num_cached_tokens: int, ttft_slo_s: float | None, itl_slo_s: float | None
    ) -> None:
        """Count a request that arrived. Without an SLO, in seconds, the default counts."""
        ttft_slo_s = DEFAULT_TTFT_S if ttft_slo_s is None or math.isinf(ttft_slo_s) else ttft_slo_s
        num_new = max(num_prompt_tokens - num_cached_tokens, 1)
        self._num_requests += 1
        self._cached_tokens += num_cached_tokens
        self._prompt_tokens += num_prompt_tokens
        self._prompt_squares += num_prompt_tokens**2
        self._itl_slo_s += itl_slo_s or DEFAULT_ITL_S
        idx = min(math.ceil(math.log2(num_new)), NUM_BUCKETS - 1)
        num, tokens, slo_s = self._buckets[idx]
        self._buckets[idx] = Bucket(num + 1, tokens + num_new, slo_s + ttft_slo_s)

    def note_answer(self, num_output_tokens: int) -> None:
        """Count an answer that ended by itself."""
        self._num_answers += 1
        self._output_tokens += num_output_tokens

    @property
    def total(self) -> Demand:
        """All requests so far."""
        return Demand(
            self._num_requests,
            self._cached_tokens,
            self._prompt_tokens,
            self._prompt_squares,
            self._itl_slo_s,
            tuple(self._buckets),
            self._num_answers,
            self._output_tokens,
        )
