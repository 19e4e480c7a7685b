from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tandem.loadtest.traces import TRACE_BLOCK_SIZE, read_trace
from tandem.scheduling.miss_ratio import MissRatioCurve
from tandem.scheduling.planning.advice import LEAST_GAIN, Worth, advise, best_size, size_text
from tests.support.exact_miss_ratio import ExactCurve, draw_digests

DATA = Path(__file__).parents[3] / "benchmarks" / "data"
GB = 1e9
SIZES = [64 * GB * 2**n for n in range(5)]
FASTER = Worth(compute_s=30e-6, load_s=3e-6)


def test_the_last_doubling_that_finds_more_is_recommended() -> None:
    advice = advise("host", SIZES, [0.3, 0.41, 0.414, 0.416, 0.417], FASTER, present=64 * GB)
    assert advice["text"] == "host 128 GB: +11.0 points, pays back; 256 GB: +0.4, does not"
    assert (advice["recommended_bytes"], advice["is_saturated"]) == (128 * GB, False)
    assert advice["saved_share"] == pytest.approx(0.11 * 0.9)


def test_a_plateau_is_not_taken_for_the_end() -> None:
    """Coding agents' curves: nothing is found until a whole conversation fits."""
    hits = [0.040, 0.043, 0.055, 0.31, 0.33]
    assert best_size(SIZES, hits, FASTER) == 4
    assert best_size(SIZES, [0.3, 0.301, 0.302, 0.303, 0.304], FASTER) == 0


def test_a_saturated_tier_is_named() -> None:
    advice = advise("disk", SIZES, [0.4, 0.402, 0.402, 0.402, 0.402], FASTER, present=64 * GB)
    assert advice["text"] == "disk 128 GB: +0.2 points, does not"
    assert advice["is_saturated"]
    assert (advice["gain"], advice["recommended_bytes"]) == (0, 64 * GB)


def test_a_tier_slower_than_computing_never_pays() -> None:
    advice = advise("object", SIZES, [0.1, 0.9, 0.9, 0.9, 0.9], Worth(10e-6, 20e-6, 1e4, 1.0), present=0)
    assert advice["text"] == "object: loading a token takes 20 us and computing it 10: does not pay back"
    assert (advice["gain"], advice["saved_share"], advice["is_saturated"]) == (0, 0, False)


def test_the_most_valuable_size_is_found_when_memory_has_a_price() -> None:
    hits = [0.0, 0.2, 0.3, 0.35, 0.37]
    costs = Worth(30e-6, 3e-6, tokens_per_s=20_000, dollars_per_s=1e-3, dollars_per_byte_s=1.5e-16)
    values = costs.value_per_s(hits, SIZES)
    assert best_size(SIZES, hits, costs) == int(np.argmax(values)) == 2
    assert best_size(SIZES, hits, costs._replace(dollars_per_byte_s=1e-10)) == 0  # nothing is worth it
    assert best_size(SIZES, hits, costs._replace(dollars_per_byte_s=0.0)) == 4


def test_sizes_have_units() -> None:
    assert [size_text(size) for size in (0, 5e8, 1.5e9, 64e9, 2e12)] == [
        "0.0 MB",
        "500 MB",
        "1.5 GB",
        "64 GB",
        "2.0 TB",
    ]


@pytest.mark.parametrize("name", ["mooncake_conversation_a", "mooncake_synthetic_a", "weka_replay512_a"])
@pytest.mark.parametrize("dollars_per_s", [0.0, 1e-3])
def test_advice_of_the_curve_is_the_best_size_within_a_doubling(name: str, dollars_per_s: float) -> None:
    """The sampled curve of 128 KB against an exact LRU cache of every size, on recorded traffic."""
    requests = list(itertools.islice(read_trace(DATA / f"{name}.jsonl.gz"), 2500))
    digests = draw_digests(1 + max(max(one.block_ids, default=0) for one in requests), name)
    exact, sampled = ExactCurve(), MissRatioCurve(TRACE_BLOCK_SIZE)
    for request in requests:
        chain = [digests[block_id] for block_id in request.block_ids]
        exact.observe(request, chain)
        sampled.observe(chain, request.num_prompt_tokens)
    capacities = [125 << n for n in range(12)]
    sizes = [capacity * TRACE_BLOCK_SIZE * 131_072.0 for capacity in capacities]
    tokens_per_s = sum(one.num_prompt_tokens for one in requests) / (requests[-1].arrival_s - requests[0].arrival_s)
    worth = Worth(30e-6, 3e-6, tokens_per_s, dollars_per_s, 5.8e-17)
    hits = exact.curve(capacities)
    if dollars_per_s:
        best = max(range(len(sizes)), key=lambda n: worth.value_per_s(hits, sizes)[n])
    else:
        best = max(n for n in range(1, len(sizes)) if hits[n] - hits[n - 1] >= LEAST_GAIN)
    advised = best_size(sizes, sampled.curve(capacities), worth)
    assert 0 < best < len(sizes) - 1, "the range of sizes has the best one inside"
    assert abs(advised - best) <= 1, f"advised {capacities[advised]} blocks, best {capacities[best]}"


@pytest.mark.parametrize("load_s", [0.0, 1e-6])
def test_where_computing_is_learned_to_take_no_time_nothing_pays(load_s: float) -> None:
    advice = advise("host", [1e9, 2e9], [0.1, 0.9], Worth(compute_s=0.0, load_s=load_s), present=1e9)
    assert (advice["gain"], advice["saved_share"]) == (0.0, 0.0)
    assert "computing it 0: does not pay back" in advice["text"]
