"""Fetch or recompute: which blocks of a prompt are loaded from where, in predicted seconds. Pure.

    block   0 ········ a ·············· m ·························· n ······ end
            in the pool | computed      | loaded, from the back      | computed

KV of a later block can be loaded while an earlier one is still computed, so both ends are worked on at once: the
engine computes from `a` on, the loads come in from `n` downwards, and they meet at `m`. A tier faster than computing
gives m = a; one far slower m = n, which is no load at all.

    T(m, n) = max(load_s(m, n), queue_s + compute_s(a, m)) + compute_s(n, end)

is minimised. Recomputing, `T(n, n) = queue_s + compute_s(a, end)`, is one of the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A plan must save at least this share of recomputing: predictions are not that exact, and a load that only breaks even
# takes bandwidth from others.
_MIN_GAIN = 0.05


class FetchSource(NamedTuple):
    """A tier or a peer that has leading blocks of the chain, beyond those in the pool."""

    name: str
    end_block: int  # it has the blocks from the first one that is not in the pool up to here
    latency_s: float  # cost of any load, however small
    block_s: float  # cost per block
    queued_blocks: int = 0  # blocks of earlier loads that are still waiting


class LoadRange(NamedTuple):
    """Blocks [first_block, end_block) of the prompt to load from one source."""

    source: str
    first_block: int
    end_block: int


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """What to do with a prompt's blocks. Without `loads` everything beyond the pool is computed."""

    loads: tuple[LoadRange, ...]  # in order, without gaps
    predicted_s: float  # until the whole prompt is computed
    load_s: float  # until all loads have arrived
    recompute_s: float  # the same as `predicted_s`, without loads

    @property
    def first_block(self) -> int | None:
        """Where the loads begin. Blocks before it are computed meanwhile."""
        return self.loads[0].first_block if self.loads else None


def plan_fetch(
    sources: Sequence[FetchSource],
    *,
    first_block: int,
    num_tokens: int,
    block_size: int,
    compute_s: Callable[[int, int], float],
    queue_s: float = 0.0,
) -> FetchPlan:
    """The fastest way to a prompt whose blocks before `first_block` are in the pool.

    `compute_s(start, end)` is the predicted time to compute tokens [start, end) behind their context. Each block comes
    from the fastest source that has it; loads from different sources run side by side.
    """
    # [0, first_block)         in the pool
    # [first_block, meet)      computed from the front, while
    # [meet, end_block)        is loaded, the last blocks first
    # [end_block, num_tokens)  computed behind both
    recompute_s = queue_s + compute_s(first_block * block_size, num_tokens)
    best = FetchPlan((), recompute_s, 0.0, recompute_s)
    limit_s = recompute_s * (1 - _MIN_GAIN)
    segments = _segments(sources, first_block)
    # A source need not be used to its end: the queue may hide the loads of some blocks but not of one more.
    for end_block in sorted({source.end_block for source in sources if source.end_block > first_block}):
        rest_s = compute_s(end_block * block_size, num_tokens)

        def front_s(meet: int) -> float:
            # With nothing to compute before the loads, the queue delays only the tokens behind them.
            return queue_s + (compute_s(first_block * block_size, meet * block_size) if meet > first_block else 0.0)

        used = [s._replace(end_block=min(s.end_block, end_block)) for s in segments if s.first_block < end_block]
        for meet in _meeting_blocks(used, first_block, end_block, front_s):
            load_s = _load_s(used, meet)
            total_s = max(load_s, front_s(meet)) + rest_s
            if total_s < min(best.predicted_s, limit_s):
                best = FetchPlan(tuple(_ranges(used, meet)), total_s, load_s, recompute_s)
    return best


class _Segment(NamedTuple):
    source: FetchSource
    first_block: int
    end_block: int


def _segments(sources: Sequence[FetchSource], first_block: int) -> list[_Segment]:
    """Consecutive runs of blocks, each with the fastest source that has it."""
    ends = sorted({source.end_block for source in sources if source.end_block > first_block})
    segments: list[_Segment] = []
    start = first_block
    for end in ends:
        source = min((s for s in sources if s.end_block >= end), key=lambda s: (s.block_s, s.latency_s))
        if segments and segments[-1].source is source:
            segments[-1] = segments[-1]._replace(end_block=end)
        else:
            segments.append(_Segment(source, start, end))
        start = end
    return segments


def _meeting_blocks(
    segments: list[_Segment], first_block: int, end_block: int, front_s: Callable[[int], float]
) -> tuple[int, ...]:
    """The blocks around the point where loading from the back and computing from the front take equally long."""
    # With a later `meet`, `front_s` grows and `_load_s` shrinks. `low` becomes the first block where computing takes at
    # least as long; the fastest plan meets there or one block before.
    low, high = first_block, end_block
    while low < high:
        middle = (low + high) // 2
        if front_s(middle) >= _load_s(segments, middle):
            high = middle
        else:
            low = middle + 1
    return tuple(meet for meet in (low - 1, low) if first_block <= meet < end_block)


def _load_s(segments: list[_Segment], meet: int) -> float:
    """Seconds until the blocks from `meet` on are loaded."""
    times = [0.0]
    for source, first, end in segments:
        num_blocks = end - max(first, meet)
        if num_blocks > 0:
            times.append(source.latency_s + source.block_s * (source.queued_blocks + num_blocks))
    return max(times)


def _ranges(segments: list[_Segment], meet: int) -> list[LoadRange]:
    return [LoadRange(source.name, max(first, meet), end) for source, first, end in segments if end > max(first, meet)]
