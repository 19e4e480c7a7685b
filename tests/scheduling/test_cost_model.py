from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages import StepStats
from tandem.scheduling.cost_model import CPU_PRIOR, CostModel, StepCosts, StepModel, TransferModel, prefill_attention

TRUTH = StepCosts(35e-3, 0.3e-3, 20e-9, 1.5e-3, 4e-6)


def make_step(costs: StepCosts, *, new: int = 0, context: int = 0, seqs: int = 0, kv: int = 0) -> StepStats:
    attention = prefill_attention(new, context)
    duration_s = sum(c * x for c, x in zip(costs, (1, new, attention, seqs, kv), strict=True))
    return StepStats(
        duration_s=duration_s,
        num_prefill_tokens=new,
        prefill_attention=attention,
        num_decode_seqs=seqs,
        num_decode_kv_tokens=kv,
    )


def random_step(rng: random.Random, costs: StepCosts = TRUTH) -> StepStats:
    seqs = rng.randint(1, 32)
    new = rng.choice([0, 0, rng.randint(1, 512)])
    return make_step(costs, new=new, context=rng.randint(0, 4096), seqs=seqs, kv=seqs * rng.randint(16, 2048))


def with_duration(step: StepStats, duration_s: float) -> StepStats:
    return msgspec.structs.replace(step, duration_s=duration_s)


def learned(num_steps: int = 400, *, noise: float = 0.05) -> StepModel:
    rng = random.Random(1)
    model = StepModel(CPU_PRIOR)
    for _ in range(num_steps):
        step = random_step(rng)
        model.observe(with_duration(step, step.duration_s * rng.gauss(1, noise)))
    return model


def test_the_prior_predicts_before_any_measurement() -> None:
    model = CostModel().steps("cpu-1")
    assert model.costs.step_s(1, 128) == pytest.approx(20e-3 + 0.6e-3 + 128 * 1.5e-6)
    assert 1.0 < model.prefill_s(2048, 0, 512) < 2.5
    assert CostModel().steps("NVIDIA H200").prefill_s(2048, 0, 8192) < 0.2


def test_learns_the_costs_of_a_worker_from_its_steps() -> None:
    model = learned()
    assert model.costs.step_s(16, 8000) == pytest.approx(35e-3 + 16 * 1.5e-3 + 8000 * 4e-6, rel=0.1)
    expected_s = 4 * 35e-3 + 2048 * 0.3e-3 + 2048 * 1024 * 20e-9
    assert model.prefill_s(2048, 0, 512) == pytest.approx(expected_s, rel=0.15)
    assert model.relative_error < 0.15


def test_prefill_counts_each_chunk_and_the_context() -> None:
    model = StepModel(CPU_PRIOR)
    one_chunk_s, two_chunks_s = model.prefill_s(512, 0, 512), model.prefill_s(513, 0, 512)
    assert two_chunks_s - one_chunk_s > CPU_PRIOR.base_s
    assert model.prefill_s(512, 4096, 512) - one_chunk_s == pytest.approx(512 * 4096 * CPU_PRIOR.attention_s)


def test_one_more_sequence_costs_its_own_steps_and_slows_the_others() -> None:
    model = StepModel(CPU_PRIOR)
    alone_s = model.costs.added_decode_s(model.costs.step_s(0, 0), 0, 100, 10)
    assert alone_s == pytest.approx(10 * model.costs.step_s(1, 100))
    beside_s = model.costs.added_decode_s(model.costs.step_s(4, 400), 4, 100, 10)
    assert beside_s == pytest.approx(
        10 * (model.costs.step_s(5, 500) + 4 * (model.costs.step_s(5, 500) - model.costs.step_s(4, 400)))
    )


def test_keeps_what_it_knows_of_prefill_while_only_decoding() -> None:
    model = learned()
    before_s = model.prefill_s(2048, 0, 512)
    rng = random.Random(3)
    for _ in range(3000):
        seqs = rng.randint(1, 32)
        model.observe(make_step(TRUTH, seqs=seqs, kv=seqs * rng.randint(16, 2048)))
    assert model.prefill_s(2048, 0, 512) == pytest.approx(before_s, rel=0.1)


def test_one_stall_barely_matters() -> None:
    model = learned()
    before_s = model.costs.step_s(8, 4000)
    model.observe(with_duration(make_step(TRUTH, seqs=8, kv=4000), 30.0))
    assert model.costs.step_s(8, 4000) == pytest.approx(before_s, rel=0.1)


@pytest.mark.parametrize("duration_s", [math.nan, math.inf, 0.0, -1.0])
def test_implausible_measurements_change_nothing(duration_s: float) -> None:
    model = learned(20)
    costs, count = model.costs, model.num_measurements
    model.observe(with_duration(make_step(TRUTH, seqs=3, kv=10), duration_s))
    model.observe(StepStats(duration_s=0.1))  # a step without work
    model.observe(StepStats(duration_s=0.1, num_prefill_tokens=5, prefill_attention=math.nan))
    model.observe(StepStats(duration_s=0.1, num_prefill_tokens=5, num_decode_kv_tokens=-7))
    assert (model.costs, model.num_measurements) == (costs, count)


@given(
    steps=st.lists(
        st.tuples(
            st.floats(allow_nan=True, allow_infinity=True),
            st.integers(-10, 10**7),
            st.floats(min_value=0, max_value=1e14),
            st.integers(-10, 10**4),
            st.integers(-10, 10**9),
        ),
        max_size=40,
    )
)
def test_costs_stay_finite_and_non_negative(steps: list[tuple[float, int, float, int, int]]) -> None:
    model = StepModel(CPU_PRIOR)
    names = ("duration_s", "num_prefill_tokens", "prefill_attention", "num_decode_seqs", "num_decode_kv_tokens")
    for step in steps:
        model.observe(StepStats(**dict(zip(names, step, strict=True))))
        assert all(math.isfinite(cost) and cost >= 0 for cost in model.costs)
        assert math.isfinite(model.relative_error)


def test_learns_latency_and_bandwidth_of_a_link() -> None:
    link = TransferModel()
    rng = random.Random(4)
    for _ in range(300):
        num_bytes = rng.randint(0, 50_000_000)
        link.observe(num_bytes, (10e-3 + num_bytes / 4e9) * rng.gauss(1, 0.05))
    assert link.costs.transfer_s(0) == pytest.approx(10e-3, rel=0.15)
    assert link.costs.transfer_s(40_000_000) == pytest.approx(20e-3, rel=0.1)


def test_a_link_whose_bytes_cost_nothing_has_the_latency_that_was_measured() -> None:
    link = TransferModel()
    for num_bytes, measured_s in [(1.5e6, 2.2e-3), (6e6, 1.3e-3), (12e6, 1.9e-3), (9e6, 1.5e-3), (11e6, 1.6e-3)] * 10:
        link.observe(num_bytes, measured_s)
    assert link.costs.transfer_s(8e6) == pytest.approx(1.7e-3, rel=0.15)
    assert link.relative_error < 0.3


def test_prefill_hides_all_of_a_transfer_but_its_tail() -> None:
    costs = TransferModel().costs
    assert costs.exposed_s(100e6, 10e6, prefill_s=10.0) == costs.transfer_s(10e6)
    assert costs.exposed_s(5e6, 10e6, prefill_s=10.0) == costs.transfer_s(5e6)
    assert costs.exposed_s(100e6, 10e6, prefill_s=0.02) == pytest.approx(costs.transfer_s(100e6) - 0.02)
    assert costs.exposed_s(0, 10e6, prefill_s=1.0) == costs.latency_s


def test_workers_of_one_kind_share_a_model_and_export_it() -> None:
    costs = CostModel()
    assert costs.steps("cpu-1") is costs.steps("cpu-1")
    assert costs.steps("cpu-1") is not costs.steps("cpu-2")
    costs.transfer("cpu-1", "cpu-2")
    exported = costs.export()
    assert set(exported) == {"steps", "transfers"}
    assert "cpu-1 -> cpu-2" in str(exported)


@pytest.mark.parametrize(("factor", "num_steps", "rel"), [(2.0, 600, 0.1), (30.0, 60, 0.2), (1 / 30, 60, 0.2)])
def test_a_lasting_change_is_followed_soon(factor: float, num_steps: int, rel: float) -> None:
    model, rng = learned(), random.Random(2)
    changed = StepCosts(*(factor * cost for cost in TRUTH))
    for _ in range(num_steps):
        model.observe(random_step(rng, changed))
    assert model.costs.step_s(8, 8000) == pytest.approx(changed.step_s(8, 8000), rel=rel)


def test_a_link_a_thousand_times_slower_than_its_prior_is_learned_soon() -> None:
    model = TransferModel()
    for _ in range(20):
        model.observe(1e6, 5.0)
    assert model.costs.transfer_s(1e6) == pytest.approx(5.0, rel=0.1)


def test_outliers_to_both_sides_are_not_a_change() -> None:
    model, rng = learned(), random.Random(3)
    before = model.costs.step_s(8, 8000)
    for number in range(40):
        step = random_step(rng)
        model.observe(with_duration(step, step.duration_s * (20 if number % 2 else 0.05)))
    assert model.costs.step_s(8, 8000) == pytest.approx(before, rel=0.3)


@pytest.mark.parametrize("num_stalls", [5, 12])
def test_stalls_of_one_answer_do_not_change_the_cost_of_more(num_stalls: int) -> None:
    """Steps of one sequence tell the sum of two costs. Stalls must not undo what is known of each."""
    rng, model = random.Random(5), StepModel(CPU_PRIOR)

    def observe(seqs: int, factor: float = 1.0) -> None:
        step = make_step(TRUTH, seqs=seqs, kv=seqs * rng.randint(600, 648))
        model.observe(with_duration(step, step.duration_s * factor * rng.lognormvariate(0.0, 0.15)))

    for _ in range(600):
        observe(rng.choice([1, 10, 11, 12]))
    for number in range(1000):
        observe(1, 8.0 if 500 <= number < 500 + num_stalls else 1.0)
    assert model.costs.step_s(8.0, 5000.0) == pytest.approx(TRUTH.step_s(8.0, 5000.0), rel=0.35)


@pytest.mark.parametrize("seed", range(3))
def test_a_noisy_machine_does_not_change_how_costs_relate(seed: int) -> None:
    """For minutes one answer runs at a time, beside other work that comes and goes: its steps tell only a sum."""
    rng, model, slowness = random.Random(seed), StepModel(CPU_PRIOR), 0.0
    truth = StepCosts(45e-3, 2e-3, 50e-9, 1.2e-3, 2e-6)

    def observe(factor: float, **work: int) -> None:
        step = make_step(truth, **work)
        model.observe(with_duration(step, step.duration_s * factor * rng.lognormvariate(0.0, 0.08)))

    def growth(costs: StepCosts) -> float:
        return costs.step_s(12, 7488) / costs.step_s(1, 624)

    for number in range(600):
        seqs = rng.randint(1, 12)
        observe(1.0, seqs=seqs, kv=seqs * rng.randint(600, 648))
        if number % 7 == 0:
            observe(1.0, new=600, seqs=seqs, kv=620 * seqs)
    for number in range(4000):
        slowness = 0.98 * slowness + rng.gauss(0, 0.09)
        observe(math.exp(slowness), seqs=1, kv=600 + number % 48)
        if number % 48 == 0:
            observe(math.exp(slowness), new=8, context=600)
    assert growth(model.costs) == pytest.approx(growth(truth), rel=0.15)
