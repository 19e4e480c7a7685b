from __future__ import annotations

import json
import os
import random

import pytest

from tandem.loadtest.traces import TRACE_BLOCK_SIZE, TraceRequest
from tandem.scheduling.miss_ratio import OTHER_TENANTS, MissRatioCurve
from tests.kv_transfer.test_eviction import LRU_REFERENCE
from tests.support.exact_miss_ratio import ExactCurve, draw_digests, measure
from tests.support.trace_replay import CAPACITIES, TRACES, load

SEED = int(os.environ.get("TEST_SEED", "0"))
DIGESTS = draw_digests(100_000, "digests")


def observe(curve: MissRatioCurve, *blocks: int, num_tokens: int | None = None, tenant: str = "a tenant") -> None:
    digests = [DIGESTS[block] for block in blocks]
    curve.observe(digests, len(blocks) * curve.block_size if num_tokens is None else num_tokens, tenant=tenant)


def test_without_traffic_nothing_is_found() -> None:
    curve = MissRatioCurve(16)
    assert curve.curve([1, 100]) == [0.0, 0.0]
    observe(curve)
    observe(curve, 1, 2, 3)
    assert curve.curve([1, 100]) == [0.0, 0.0]


def test_a_partial_last_block_counts_with_its_real_size() -> None:
    curve = MissRatioCurve(16)
    for _ in range(2):
        observe(curve, 1, 2, num_tokens=20)
    assert curve.curve([10]) == [0.5]


def test_tenants_share_the_stack_and_have_their_own_counts() -> None:
    curve = MissRatioCurve(16)
    for idx in range(50):
        observe(curve, 1, 2, tenant="repeats")
        observe(curve, 100 + idx, tenant="new")
    report = json.loads(json.dumps(curve.report([2, 8])))
    assert report["tenants"]["repeats"]["hit_ratios"][1] == pytest.approx(0.98)
    assert report["tenants"]["repeats"]["hit_ratios"][0] < 0.6
    assert report["tenants"]["new"] == {"num_tokens": 800, "hit_ratios": [0.0, 0.0]}
    assert report["num_tokens"] == 2400
    assert report["hit_ratios"][1] == pytest.approx(0.98 * 2 / 3)


def test_too_many_tenants_share_one_count() -> None:
    curve = MissRatioCurve(16, max_tenants=2)
    for idx in range(5):
        observe(curve, idx, tenant=f"tenant {idx}")
    tenants = curve.report([1])["tenants"]
    assert {name: counts["num_tokens"] for name, counts in tenants.items()} == {
        "tenant 0": 16,
        "tenant 1": 16,
        OTHER_TENANTS: 48,
    }


def test_faded_tenants_make_room() -> None:
    curve = MissRatioCurve(16, max_tenants=1)
    observe(curve, 1, tenant="a")
    curve.fade(0.05)
    observe(curve, 2, tenant="b")
    assert set(curve.report([1])["tenants"]) == {"b"}


def test_an_answer_is_found_by_a_prompt_that_contains_it() -> None:
    curve = MissRatioCurve(16)
    curve.observe(DIGESTS[:2], 32, answer=DIGESTS[2:4])
    curve.observe(DIGESTS[:2], 32, answer=DIGESTS[2:4])  # found again, but not asked for
    assert curve.curve([10]) == [0.5]
    observe(curve, *range(4))
    assert curve.curve([10]) == [0.75]


def test_faded_traffic_weighs_less() -> None:
    curve = MissRatioCurve(16)
    for _ in range(1000):
        observe(curve, 1, tenant="a")
    curve.fade(0.001)
    observe(curve, 2, tenant="a")
    assert curve.curve([10]) == curve.curve([10], tenant="a") == [pytest.approx(0.5, abs=0.01)]


def test_digests_of_another_length_are_refused() -> None:
    with pytest.raises(AssertionError, match="16 bytes"):
        MissRatioCurve(16).observe([b"x" * 12, b"y" * 16], 32)


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        MissRatioCurve(16, num_bytes=1000)


@pytest.mark.parametrize("chain", [1, 800, 20_000])
def test_memory_is_bounded(chain: int) -> None:
    """Under requests of one block, many blocks, and one request longer than the memory."""
    curve = MissRatioCurve(16, num_bytes=40_000)
    for start in range(0, min(80_000, 10_000 * chain), chain):
        observe(curve, *range(start, start + chain))
        assert curve.num_bytes <= 40_000
    assert curve.curve([10**6]) == [0.0]


def test_estimates_are_unbiased_for_any_length_of_the_hit() -> None:
    """Prefixes found at a depth where few blocks are sampled: on average, the length is right."""
    print(f"seed {SEED}")
    num_found = [1, 2, 5, 40]
    rng = random.Random(SEED)
    shares = dict.fromkeys(num_found, 0.0)
    num_draws = 250
    for draw in range(num_draws):
        blocks = iter(draw_digests(2000, f"{SEED}/{draw}"))
        curve = MissRatioCurve(1, num_bytes=12_000)
        chains = {num: [next(blocks) for _ in range(50)] for num in num_found}
        for chain in chains.values():
            curve.observe(chain, 50)
        for _ in range(17):
            curve.observe([next(blocks) for _ in range(100)], 100)
        num = rng.choice(num_found)
        before = sum(curve._tenants["default"].tokens)
        curve.observe([*chains[num][:num], next(blocks)], num + 1)
        shares[num] += (sum(curve._tenants["default"].tokens) - before) / num
    assert sum(shares.values()) / num_draws == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("trace", TRACES[:2])
def test_the_exact_curve_equals_the_reference(trace: str) -> None:
    requests = load(trace)
    digests = draw_digests(100_000, "exact")
    exact = ExactCurve()
    for request in requests:
        exact.observe(request, [digests[block_id] for block_id in request.block_ids])
    assert [round(100 * ratio, 2) for ratio in exact.curve(CAPACITIES)] == LRU_REFERENCE[trace]


@pytest.mark.parametrize("trace", TRACES[:2])
def test_within_a_point_of_the_exact_curve_in_a_hundredth_of_its_memory(trace: str) -> None:
    check_accuracy(load(trace), num_draws=2)


@pytest.mark.slow
@pytest.mark.parametrize("trace", TRACES)
def test_within_a_point_for_any_digests(trace: str) -> None:
    check_accuracy(load(trace), num_draws=10)


def check_accuracy(requests: list[TraceRequest], num_draws: int) -> None:
    print(f"seed {SEED}")
    result = measure(requests, num_draws, SEED)
    assert result["online_bytes"] <= 0.01 * result["exact_bytes"]
    for estimate in result["estimates"]:
        assert 100 * max(abs(a - b) for a, b in zip(estimate, result["exact"], strict=True)) <= 1.0


def test_any_trace_that_fits_is_measured_almost_exactly() -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    parents = [rng.randrange(idx) if idx else None for idx in range(2000)]
    curve, exact = MissRatioCurve(TRACE_BLOCK_SIZE), ExactCurve()
    for _ in range(2000):
        chain: list[int] = []
        block: int | None = min(1999, int(rng.paretovariate(0.7)))
        while block is not None:
            chain.insert(0, block)
            block = parents[block]
        digests = [DIGESTS[idx] for idx in chain]
        curve.observe(digests, len(chain) * TRACE_BLOCK_SIZE)
        exact.observe(TraceRequest(0.0, len(chain) * TRACE_BLOCK_SIZE, 1, tuple(chain)), digests)
    capacities = [10, 30, 100, 300, 1000, 3000]
    assert curve.curve(capacities) == pytest.approx(exact.curve(capacities), abs=0.01)
