from __future__ import annotations

import pytest

from tandem.protocol.messages import StepStats
from tandem.router.engines.step_timing import StepTiming
from tandem.scheduling.cost_model import CPU_PRIOR, StepModel


def observe_all(model: StepModel, stats: StepStats | None) -> None:
    if stats is not None:
        model.observe(stats)


def test_successive_first_tokens_teach_the_cost_of_a_token() -> None:
    """Prompts sent together to an engine that computes them in order: the second waits for the first."""
    model, timing, now = StepModel(CPU_PRIOR), StepTiming(2048), 0.0
    for i in range(200):
        sizes = (100 + 13 * i % 900, 500)
        sent_s = now = now + 10.0
        for num_tokens in sizes:
            now += 0.05 + 0.002 * num_tokens
            observe_all(
                model,
                timing.first_token(
                    sent_s=sent_s,
                    now=now,
                    num_new_tokens=num_tokens,
                    num_cached_tokens=0,
                    num_decode_seqs=0,
                    num_kv_tokens=0,
                ),
            )
    for num_tokens in (200, 800):
        assert model.prefill_s(num_tokens, 0, 2048) == pytest.approx(0.05 + 0.002 * num_tokens, rel=0.1)


def first_token(timing: StepTiming, now: float, num_tokens: int, sent_s: float = 0.0) -> StepStats | None:
    return timing.first_token(
        sent_s=sent_s, now=now, num_new_tokens=num_tokens, num_cached_tokens=0, num_decode_seqs=2, num_kv_tokens=9
    )


def test_prompts_of_one_step_are_one_span() -> None:
    timing = StepTiming(2048)
    assert first_token(timing, 1.0, 100) is None
    assert first_token(timing, 1.001, 60) is None
    stats = first_token(timing, 2.0, 10)
    assert stats is not None
    assert (stats.duration_s, stats.num_prefill_tokens, stats.num_decode_seqs) == (1.0, 160, 2)


def test_a_prompt_of_several_steps_is_learned_as_their_mean() -> None:
    timing = StepTiming(64)
    first_token(timing, 0.5, 256, sent_s=0.1)
    stats = first_token(timing, 9.0, 1)
    assert stats is not None
    assert stats.duration_s == pytest.approx(0.1)
    assert (stats.num_prefill_tokens, stats.prefill_attention) == (64, 256 * 128 / 4)


def test_one_gap_per_interval_counts_and_bursts_do_not() -> None:
    timing = StepTiming(64)

    def gap(duration_s: float, now: float) -> StepStats | None:
        return timing.gap(duration_s=duration_s, now=now, num_decode_seqs=0, num_kv_tokens=5)

    stats = gap(0.03, 1.0)
    assert stats is not None
    assert (stats.duration_s, stats.num_decode_seqs, stats.num_decode_kv_tokens) == (0.03, 1, 5)
    assert gap(0.03, 1.05) is None
    assert gap(0.0001, 1.2) is None
    assert gap(0.03, 1.2) is not None


def test_a_prompt_with_a_load_ends_the_span_before_it_and_gives_no_step_of_its_own() -> None:
    timing = StepTiming(2048)
    assert timing.service_s(0.25, 1.0) == 0.75
    first_token(timing, 1.0, 100)
    assert timing.service_s(0.5, 1.001) is None  # it came with the other
    assert timing.service_s(0.5, 3.0) == 2.0  # it waited for the other
    before = timing.first_token(
        sent_s=0.5, now=3.0, num_new_tokens=9, num_cached_tokens=900, num_decode_seqs=2, num_kv_tokens=9, has_load=True
    )
    assert before is not None
    assert (before.duration_s, before.num_prefill_tokens) == (1.0, 100)
    assert first_token(timing, 3.001, 60) is None  # in the same span
    assert first_token(timing, 4.0, 10) is None
    after = first_token(timing, 5.0, 10)
    assert after is not None
    assert (after.duration_s, after.num_prefill_tokens) == (pytest.approx(0.999), 10)
