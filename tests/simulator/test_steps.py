from __future__ import annotations

import random

import pytest

from tandem.scheduling.cost_model import StepCosts, prefill_attention
from tandem.simulator.steps import Chunk, Run

COSTS = StepCosts(20e-3, 1e-4, 2e-9, 1e-4, 1e-7)


def make_run(
    num_steps: int = 100, num_seqs: int = 7, kv_tokens: int = 9_000, chunk: Chunk | None = None, start_s: float = 0.0
) -> Run:
    return Run(COSTS, start_s, num_steps, num_seqs, kv_tokens, [] if chunk is None else [chunk])


def step_s(run: Run, idx: int) -> float:
    """Duration of step `idx`, from the formula of the cost model."""
    total = COSTS.base_s + COSTS.decode_seq_s * run.num_seqs
    total += COSTS.kv_token_s * (run.kv_tokens + idx * run.num_seqs)
    for new, context in run.chunks:
        total += COSTS.prefill_token_s * new + COSTS.attention_s * prefill_attention(new, context + idx * new)
    return total


@pytest.mark.parametrize("chunk", [None, Chunk(2048, 0), Chunk(300, 50_000)])
@pytest.mark.parametrize("num_seqs", [0, 1, 90])
def test_duration_is_the_sum_of_the_steps(chunk: Chunk | None, num_seqs: int) -> None:
    run = make_run(num_seqs=num_seqs, kv_tokens=1000 * num_seqs, chunk=chunk)
    for num_steps in (1, 2, 17, 100):
        assert run.duration_s(num_steps) == pytest.approx(sum(step_s(run, idx) for idx in range(num_steps)), rel=1e-12)


def test_mean_step_has_the_mean_features() -> None:
    run = make_run(num_steps=50, chunk=Chunk(512, 4096))
    stats = run.mean_stats()
    assert stats.duration_s * 50 == pytest.approx(run.duration_s(50))
    whole = COSTS.base_s + COSTS.prefill_token_s * stats.num_prefill_tokens
    whole += COSTS.attention_s * stats.prefill_attention + COSTS.decode_seq_s * stats.num_decode_seqs
    whole += COSTS.kv_token_s * stats.num_decode_kv_tokens
    assert whole == pytest.approx(stats.duration_s, rel=1e-5)  # KV tokens are reported as an integer


@pytest.mark.parametrize("start_s", [0.0, 3_000.0])
@pytest.mark.parametrize("num_seqs", [0, 5])
def test_steps_done_are_those_that_have_ended(start_s: float, num_seqs: int) -> None:
    run = make_run(num_seqs=num_seqs, chunk=Chunk(2048, 0), start_s=start_s)
    rng = random.Random(1)
    for now in [start_s, *(start_s + rng.uniform(0, 1.2 * run.duration_s(100)) for _ in range(300))]:
        counted = sum(start_s + run.duration_s(idx) <= now for idx in range(1, 101))
        assert run.num_done(now) == counted
    for idx in (1, 50, 99, 100):
        assert run.num_done(start_s + run.duration_s(idx)) == idx


def test_a_cut_ends_with_the_step_in_progress() -> None:
    run = make_run()
    middle = (run.duration_s(10) + run.duration_s(11)) / 2
    assert run.cut(middle)
    assert run.num_steps == 11
    assert not run.cut(middle)
    assert run.cut(run.duration_s(5))  # the end of a step is a valid cut
    assert run.num_steps == 5
