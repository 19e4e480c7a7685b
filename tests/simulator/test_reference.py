"""The published reference numbers of the traces are reproduced to the last digit, and placement equals them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.loadtest.traces import TraceRequest, read_trace
from tandem.simulator.reference import ReferenceResult, route

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
# trace, C, policy, then for 8 workers at utilisation 0.7: block hit %, token hit %, imbalance, requests max/mean,
# wait mean, p50 and p99 in s, R in tokens/s. Published with the traces; computed by an independent program.
PUBLISHED = """
mooncake_conversation_a 1000 round_robin 6.12 6.24 1.049 1.000 4.29 2.52 21.60 7328
mooncake_conversation_a 1000 least_loaded 5.98 6.09 1.016 1.057 2.05 1.35 12.50 7328
mooncake_conversation_a 1000 cost 14.74 15.01 1.018 1.066 1.80 1.14 11.83 7328
mooncake_conversation_a 4000 round_robin 9.75 9.93 1.056 1.000 4.00 2.26 20.58 7328
mooncake_conversation_a 4000 least_loaded 9.87 10.05 1.019 1.037 1.92 1.23 12.16 7328
mooncake_conversation_a 4000 cost 27.20 27.71 1.009 1.076 1.49 0.84 11.47 7328
mooncake_conversation_a 16000 round_robin 12.11 12.34 1.058 1.000 3.77 2.13 19.93 7328
mooncake_conversation_a 16000 least_loaded 11.47 11.68 1.014 1.055 1.87 1.19 12.16 7328
mooncake_conversation_a 16000 cost 30.14 30.70 1.013 1.073 1.42 0.79 11.16 7328
mooncake_synthetic_a 1000 round_robin 1.90 1.94 1.050 1.002 3.42 2.44 14.99 8225
mooncake_synthetic_a 1000 least_loaded 1.95 2.00 1.009 1.155 1.59 0.82 6.94 8225
mooncake_synthetic_a 1000 cost 11.93 12.24 1.009 1.130 1.40 0.40 6.88 8225
mooncake_synthetic_a 4000 round_robin 5.29 5.42 1.035 1.002 3.08 2.22 14.13 8225
mooncake_synthetic_a 4000 least_loaded 4.99 5.11 1.009 1.189 1.51 0.62 6.88 8225
mooncake_synthetic_a 4000 cost 28.92 29.65 1.021 1.230 1.15 0.11 6.76 8225
mooncake_synthetic_a 16000 round_robin 5.54 5.67 1.033 1.002 3.07 2.21 14.13 8225
mooncake_synthetic_a 16000 least_loaded 4.98 5.11 1.005 1.197 1.51 0.62 6.88 8225
mooncake_synthetic_a 16000 cost 28.92 29.65 1.021 1.230 1.15 0.11 6.76 8225
weka_replay512_a 4000 round_robin 50.75 50.63 1.061 1.000 6.08 2.31 46.78 15302
weka_replay512_a 4000 least_loaded 49.89 49.78 1.003 1.042 3.83 0.98 32.26 15302
weka_replay512_a 4000 cost 95.05 94.84 1.021 1.264 0.43 0.07 7.77 15302
weka_replay512_a 16000 round_robin 71.05 70.90 1.031 1.000 3.17 0.67 34.05 15302
weka_replay512_a 16000 least_loaded 70.65 70.49 1.005 1.069 2.23 0.51 28.32 15302
weka_replay512_a 16000 cost 95.51 95.29 1.030 1.243 0.39 0.06 7.04 15302
weka_replay512_a 64000 round_robin 74.90 74.73 1.027 1.000 2.61 0.61 30.82 15302
weka_replay512_a 64000 least_loaded 74.42 74.26 1.008 1.083 1.94 0.48 27.25 15302
weka_replay512_a 64000 cost 95.51 95.29 1.030 1.243 0.39 0.06 7.04 15302
"""
CELLS = [tuple(line.split()) for line in PUBLISHED.strip().splitlines()]
QUICK = {("mooncake_conversation_a", "4000"), ("mooncake_synthetic_a", "1000")}
_TRACES: dict[str, list[TraceRequest]] = {}


def load(trace: str) -> list[TraceRequest]:
    if trace not in _TRACES:
        _TRACES[trace] = list(read_trace(DATA / f"{trace}.jsonl.gz"))
    return _TRACES[trace]


def printed(result: ReferenceResult) -> tuple[str, ...]:
    return (
        f"{100 * result.block_hit_ratio:.2f}",
        f"{100 * result.token_hit_ratio:.2f}",
        f"{result.imbalance:.3f}",
        f"{result.request_imbalance:.3f}",
        f"{result.wait_mean_s:.2f}",
        f"{result.wait_p50_s:.2f}",
        f"{result.wait_p99_s:.2f}",
        f"{result.tokens_per_s:.0f}",
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cell",
    [cell if cell[:2] in QUICK else pytest.param(cell, marks=pytest.mark.slow) for cell in CELLS],
    ids=map(" ".join, CELLS),
)
def test_published_numbers_are_reproduced(cell: tuple[str, ...]) -> None:
    trace, capacity, policy, *published = cell
    result = route(load(trace), policy, num_workers=8, capacity_blocks=int(capacity))
    assert printed(result) == tuple(published)


@pytest.mark.parametrize("num_workers", [8, 64])
def test_placement_routes_as_well_as_exact_cost(num_workers: int) -> None:
    cost, ours = (
        route(load("mooncake_synthetic_a"), policy, num_workers=num_workers, capacity_blocks=4000)
        for policy in ("cost", "tandem")
    )
    assert ours.token_hit_ratio >= 0.99 * cost.token_hit_ratio
    assert ours.wait_mean_s <= 1.01 * cost.wait_mean_s


def test_a_full_hit_needs_no_work_and_a_queue_drains() -> None:
    requests = [
        TraceRequest(arrival_s, num_prompt_tokens, 1, block_ids)
        for arrival_s, num_prompt_tokens, block_ids in [(0.0, 700, (1, 2)), (0.0, 700, (1, 2)), (10.0, 1200, (1, 3, 4))]
    ]
    result = route(requests, "cost", num_workers=1, capacity_blocks=10)
    tokens_per_s = 2600 / (10 * 0.7)
    assert result.tokens_per_s == pytest.approx(tokens_per_s)
    assert result.token_hit_ratio == pytest.approx((700 + 512) / 2600)
    assert result.wait_mean_s * 3 == pytest.approx((700 + 700 + 688) / tokens_per_s)
