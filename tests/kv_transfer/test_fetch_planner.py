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
    by_source = [s.latency_s + s.block_s * (s.queued_blocks + b - max(a, meet)) for s, a, b in loads if meet < b > a]
    front = queue + (compute_s(first * SIZE, meet * SIZE) if meet > first else 0.0)
    return max(max(by_source, default=0.0), front) + compute_s(end * SIZE, tokens)


def test_a_tier_slower_than_computing_is_left_alone_when_it_adds_little() -> None:
    slow = FetchSource("object", 250, 0.05, 100 * SIZE * TOKEN_S)
    result = plan(slow)
    assert result.loads == ()
    assert result.predicted_s == result.recompute_s


def test_each_block_comes_from_the_fastest_source_that_has_it() -> None:
    sources = [FetchSource("disk", 200, 1e-3, 5e-4), FetchSource("host", 120, 1e-4, 1e-4)]
    sources.append(FetchSource("peer", 90, 1e-3, 1e-3))
    assert plan(*sources, first=20).loads == (LoadRange("host", 20, 120), LoadRange("disk", 120, 200))


def test_nothing_to_load_gives_no_plan() -> None:
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
    assert result.first_block == (result.loads[0].first_block if result.loads else None)
    if result.loads:
        assert result.predicted_s == pytest.approx(best)
        assert all(a.end_block == b.first_block for a, b in itertools.pairwise(result.loads))
    else:
        assert best >= result.recompute_s * 0.9499
