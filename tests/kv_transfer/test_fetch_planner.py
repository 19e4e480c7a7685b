"""The planner's choice against all others, and its behaviour at the edges."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv_transfer.fetch_planner import FetchPlan, FetchSource, LoadRange, plan_fetch

SIZE = 16
TOKEN_S = 2e-3  # one CPU core


def compute_s(start: int, end: int) -> float:
    return TOKEN_S * (end - start) + 1e-7 * (end - start) * (start + end) / 2 + (0.02 if end > start else 0.0)


def plan(*sources: FetchSource, first: int = 0, tokens: int = 4001, queue_s: float = 0.0) -> FetchPlan:
    return plan_fetch(
        sources, first_block=first, num_tokens=tokens, block_size=SIZE, compute_s=compute_s, queue_s=queue_s
    )


def total_s(
    loads: list[tuple[FetchSource, int, int]], meet: int, end: int, tokens: int, first: int, queue: float
) -> float:
    """The formula in the module's docstring, written again."""
    by_source = [
        s.latency_s + s.block_s * (s.queued_blocks + b - max(a, meet)) for s, a, b in loads if b > max(a, meet)
    ]
    front = queue + (compute_s(first * SIZE, meet * SIZE) if meet > first else 0.0)
    return max(max(by_source, default=0.0), front) + compute_s(end * SIZE, tokens)


def test_a_fast_tier_gives_everything_it_has() -> None:
    fast = FetchSource("host", 250, 1e-4, 2e-4)
    result = plan(fast, first=10)
    assert result.loads == (LoadRange("host", 10, 250),)
    assert result.predicted_s < result.recompute_s / 15


def test_a_tier_slower_than_computing_is_left_alone_when_it_adds_little() -> None:
    slow = FetchSource("object", 250, 0.05, 100 * SIZE * TOKEN_S)
    result = plan(slow)
    assert result.loads == ()
    assert result.predicted_s == result.recompute_s


def test_a_tier_as_fast_as_computing_takes_the_back_half() -> None:
    even = FetchSource("disk", 250, 0.0, SIZE * TOKEN_S)
    result = plan(even)
    assert result.first_block is not None
    assert result.first_block == pytest.approx(125, abs=8)
    assert result.predicted_s == pytest.approx(result.recompute_s / 2, rel=0.1)


def test_each_block_comes_from_the_fastest_source_that_has_it() -> None:
    sources = (
        FetchSource("disk", 200, 1e-3, 5e-4),
        FetchSource("host", 120, 1e-4, 1e-4),
        FetchSource("peer", 90, 1e-3, 1e-3),
    )
    assert plan(*sources, first=20).loads == (LoadRange("host", 20, 120), LoadRange("disk", 120, 200))


def test_a_busy_engine_makes_loading_worth_more() -> None:
    slowish = FetchSource("object", 100, 0.5, 1.5 * SIZE * TOKEN_S)
    idle, busy = plan(slowish), plan(slowish, queue_s=30.0)
    assert (idle.first_block or 100) > 0
    assert busy.first_block == 0  # all of it is there before the engine is free


def test_a_queue_at_the_tier_counts() -> None:
    free = FetchSource("disk", 250, 1e-3, 1e-3)
    assert plan(free._replace(queued_blocks=100_000)).loads == ()
    assert plan(free).loads


def test_nothing_to_load_is_no_plan() -> None:
    assert plan().loads == ()
    assert plan(FetchSource("host", 10, 0.0, 0.0), first=10).loads == ()
    assert plan(FetchSource("host", 5, 0.0, 0.0), first=10).loads == ()


@given(
    first=st.integers(0, 5),
    sources=st.lists(
        st.builds(
            FetchSource,
            name=st.sampled_from(["host", "disk", "object", "peer"]),
            end_block=st.integers(0, 24),
            latency_s=st.floats(0, 0.5),
            block_s=st.floats(1e-5, 0.2),
            queued_blocks=st.integers(0, 20),
        ),
        max_size=4,
        unique_by=lambda source: source.name,
    ),
    queue_s=st.floats(0, 2.0),
)
def test_no_other_split_is_better(first: int, sources: list[FetchSource], queue_s: float) -> None:
    tokens = 24 * SIZE + 5
    result = plan(*sources, first=first, tokens=tokens, queue_s=queue_s)
    assert result.recompute_s == pytest.approx(queue_s + compute_s(first * SIZE, tokens))
    ends = sorted({source.end_block for source in sources if source.end_block > first})
    loads: list[tuple[FetchSource, int, int]] = []
    best = result.recompute_s
    for start, end in itertools.pairwise([first, *ends]):
        source = min((s for s in sources if s.end_block >= end), key=lambda s: (s.block_s, s.latency_s))
        if loads and loads[-1][0] is source:
            loads[-1] = (source, loads[-1][1], end)
        else:
            loads.append((source, start, end))
        best = min(best, *(total_s(loads, meet, end, tokens, first, queue_s) for meet in range(first, end)))
    if result.loads:
        assert result.predicted_s == pytest.approx(best)
        assert all(a.end_block == b.first_block for a, b in itertools.pairwise(result.loads))
    else:
        assert best >= result.recompute_s * 0.9499


def test_on_a_gpu_the_formula_says_when_a_tier_pays() -> None:
    """A 70B model (320 KB of KV per token) at 7,000 tokens/s: 1 GB/s breaks even below, 10 GB/s far above."""
    token_bytes, rate = 320e3, 7000.0

    def share(bytes_per_s: float) -> float:
        result = plan_fetch(
            [FetchSource("tier", 625, 1e-3, SIZE * token_bytes / bytes_per_s)],
            first_block=0,
            num_tokens=10_001,
            block_size=SIZE,
            compute_s=lambda start, end: (end - start) / rate,
        )
        return result.predicted_s / result.recompute_s

    assert share(1e12) < 0.01
    assert share(112e9) < 0.03
    assert share(1e9) > 0.5
