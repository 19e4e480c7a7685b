from __future__ import annotations

import pytest

from tandem.protocol.errors import ConfigError
from tandem.scheduling.planning.geometry import Geometry, geometry_of
from tandem.scheduling.planning.hardware import GPUS, Efficiency, gpu_named
from tandem.scheduling.planning.roofline import PlannedWorker, plan_worker, scaled, step_costs
from tandem.simulator.machine import MACHINES
from tests.support.published_models import PUBLISHED

FP8 = {"quantization_config": {"quant_method": "fp8"}}


def geometry(name: str, **changes: object) -> Geometry:
    return geometry_of(PUBLISHED[name] | changes, name)


def worker(name: str, gpu: str, num_gpus: int = 0, **changes: object) -> PlannedWorker:
    return plan_worker(geometry(name, **changes), GPUS[gpu], num_gpus)


def test_the_costs_are_those_that_the_simulators_machine_was_given_by_hand() -> None:
    cautious = Efficiency(products=0.5, attention=0.4, kv=0.7)  # as `simulator/machine.py` says
    planned, by_hand = step_costs(geometry("llama-8b"), GPUS["h200"], 1, cautious), MACHINES["h200-8b"].costs
    for name in ("base_s", "attention_s", "kv_token_s"):
        assert getattr(planned, name) == pytest.approx(getattr(by_hand, name), rel=0.03), name
    # The embedding table and the head, an eighth of the model, are no work of a prompt's tokens.
    assert planned.prefill_token_s == pytest.approx(by_hand.prefill_token_s * 7.0 / 8.0, rel=0.03)


def test_prefill_is_the_roofline_of_the_design() -> None:
    """2 * active parameters * n + 2 * layers * heads * width * n^2 FLOP, at what is reached of the data sheet."""
    planned, gpu, efficiency, n = worker("llama-8b", "h200"), GPUS["h200"], Efficiency(), 32_768
    linear_s = 2 * planned.geometry.num_active_params * n / (efficiency.products * gpu.bf16_flops)
    attention_s = 2 * 32 * 32 * 128 * n**2 / (efficiency.attention * gpu.bf16_flops)
    chunks_s = 4 * planned.costs.base_s
    assert planned.prefill_s(n) == pytest.approx(linear_s + attention_s + chunks_s)
    assert planned.prefill_s(n) == pytest.approx(planned.prefill_s(n // 2) + planned.prefill_s(n // 2, n // 2))


# What kernels of vLLM 0.24 and SGLang were measured to take, as aiconfigurator 0.12 adds them up: ranks, GPU, tokens of
# a prompt or before each sequence, sequences of a decode step (0 = the prompt), ms. `benchmarks/silicon.py` has
# all points. The efficiencies were fitted to other ones.
MEASURED = [
    ("llama-8b", 1, "h200", 2048, 0, 43.4),
    ("llama-8b", 1, "h200", 32768, 0, 1109.9),
    ("llama-8b", 1, "h200", 2048, 1, 4.9),
    ("llama-8b", 1, "h200", 16384, 32, 20.7),
    ("llama-8b", 1, "h100", 2048, 0, 46.1),
    ("llama-8b", 1, "h100", 32768, 0, 1174.7),
    ("llama-8b", 1, "h100", 2048, 1, 6.6),
    ("llama-8b", 1, "h100", 16384, 32, 28.7),
    ("llama-8b", 1, "a100", 2048, 0, 125.2),
    ("llama-8b", 1, "a100", 32768, 0, 3430.1),
    ("llama-8b", 1, "a100", 2048, 1, 12.0),
    ("llama-8b", 1, "a100", 16384, 32, 60.5),
    ("llama-8b", 1, "l40s", 2048, 0, 144.9),
    ("llama-8b", 1, "l40s", 32768, 0, 3969.2),
    ("llama-8b", 1, "l40s", 2048, 1, 22.0),
    ("llama-8b", 1, "l40s", 16384, 32, 131.0),
    ("llama-8b", 1, "b200", 2048, 0, 23.5),
    ("llama-8b", 1, "b200", 32768, 0, 559.2),
    ("llama-8b", 1, "b200", 2048, 1, 3.5),
    ("llama-8b", 1, "b200", 16384, 32, 13.0),
]


@pytest.mark.parametrize(("model", "ranks", "gpu", "num_tokens", "batch", "measured_ms"), MEASURED)
def test_a_data_sheet_predicts_what_kernels_were_measured_to_take(
    model: str, ranks: int, gpu: str, num_tokens: int, batch: int, measured_ms: float
) -> None:
    planned = worker(model, gpu, ranks)
    step_s = planned.costs.step_s(float(batch), float(batch * num_tokens))
    assert 1e3 * (step_s if batch else planned.prefill_s(num_tokens)) == pytest.approx(measured_ms, rel=0.25)


def test_a_million_tokens_of_maverick_are_restored_in_milliseconds_and_computed_in_far_longer() -> None:
    """Quoted for a DGX B200 with FP8: 15 ms from memory, 140 ms from NVMe, over two minutes computed (Micron, 2025).

    The first two hold for 15.6 GB of KV; the config's 12 layers without chunks make 25.2 GB, so times here are 1.6
    times as long. Two minutes are about those of attention in full in every layer, without the causal mask: chunks need
    a sixth.
    """
    maverick = geometry_of(PUBLISHED["llama-4-maverick"] | FP8, "m", kv_element_bytes=1)
    eight = plan_worker(maverick, GPUS["b200"], 8)
    num_bytes = maverick.kv_bytes(1e6)
    assert num_bytes == pytest.approx(25.2e9, rel=0.01)
    assert num_bytes / (8 * 128e9) == pytest.approx(15e-3 * 25.2 / 15.6, rel=0.05)  # PCIe 5, both directions
    assert num_bytes / (8 * 14e9) == pytest.approx(140e-3 * 25.2 / 15.6, rel=0.05)  # eight drives of PCIe 5
    assert eight.prefill_s(1e6) == pytest.approx(18, rel=0.05)
    full = geometry_of(PUBLISHED["llama-4-maverick"] | FP8 | {"layer_types": ["full_attention"] * 48}, "m")
    in_full = plan_worker(full, GPUS["b200"], 8)
    assert in_full.prefill_s(1e6) + in_full.costs.attention_s * 1e12 / 2 > 110
    assert eight.restore_s("disk", 1e6) < 0.04 * eight.prefill_s(1e6)
    assert eight.restore_s("host", 1e6) < 0.004 * eight.prefill_s(1e6)


def test_eight_h100_hold_ten_contexts_of_128k_of_a_70b() -> None:
    node = worker("llama-70b", "h100", 8)
    assert node.kv_bytes(131_072) == pytest.approx(42.95e9, rel=0.001)
    assert node.num_contexts(131_072) == 10
    assert 9 < node.prefill_s(131_072) < 15


def test_a_tier_pays_from_its_break_even_on() -> None:
    planned = worker("llama-8b", "b200")
    point = planned.break_even("object")
    assert point == 1 << 20
    assert planned.restore_s("object", point) < planned.prefill_s(point)
    assert planned.restore_s("object", point / 2) >= planned.prefill_s(point / 2)
    assert planned.break_even("host") == 1
    rate = planned.break_even_rate(65_536)
    assert rate == pytest.approx(planned.kv_bytes(65_536) / planned.prefill_s(65_536))


def test_more_ranks_compute_faster_but_not_as_many_times() -> None:
    one, four = (worker("llama-8b", "h100", ranks).prefill_s(8192) for ranks in (1, 4))
    assert one / 4 < four < one / 2
    assert worker("llama-70b", "h200").num_gpus == 2
    assert worker("deepseek-v3", "h200", **FP8).num_gpus == 8


def test_experts_are_read_as_far_as_the_batch_draws_them() -> None:
    sparse = worker("qwen3-30b-a3b", "h200").costs
    dense = geometry("qwen3-30b-a3b")
    read_s = dense.checkpoint_bytes / (0.8 * GPUS["h200"].bytes_per_s)
    assert sparse.base_s < 0.25 * read_s
    assert 0.9 * read_s < sparse.step_s(64.0, 0.0) < 1.4 * read_s


def test_learned_costs_are_scaled_by_the_ratio_of_predictions() -> None:
    small, large = (step_costs(geometry("llama-8b"), GPUS[gpu], 1, Efficiency()) for gpu in ("h100", "b200"))
    learned = small._replace(base_s=2 * small.base_s)
    assert scaled(small, small, large) == pytest.approx(large)
    assert scaled(learned, small, large).base_s == pytest.approx(2 * large.base_s)
    assert scaled(learned, small._replace(kv_token_s=0.0), large).kv_token_s == large.kv_token_s


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(ConfigError, match=r"need 32 of these GPUs a worker.*quantized checkpoint"):
        worker("deepseek-v3", "h100")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=1 gives 72 GB for weights of 141 GB; raise it"):
        worker("llama-70b", "h100", 1)
    with pytest.raises(ConfigError, match="engine=tandem cannot serve"):
        plan_worker(geometry("qwen3-next-80b"), GPUS["h200"], is_own_pool=True)
    with pytest.raises(ConfigError, match=r"gpu='abacus' is unknown; choose one of a100"):
        gpu_named("abacus")
    assert gpu_named("H200") is GPUS["h200"]
