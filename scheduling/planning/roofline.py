"""Seconds of steps and restores of a model on an accelerator: from data sheets, or scaled from learned costs.

All are linear in the batch, as in the router's own model (`scheduling/cost_model.py`), so that what a server has
learned can take the place of any of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.protocol.errors import ConfigError
from tandem.protocol.load_prior import LoadPrior
from tandem.scheduling.cost_model import StepCosts, TransferCosts, prefill_attention
from tandem.scheduling.planning.geometry import Geometry
from tandem.scheduling.planning.hardware import Efficiency, Gpu, Tier, tiers_of

_MAX_RANKS = 8  # of one node's fast links
_LEAST_KV_SHARE = 0.25  # of a worker's memory
_TYPICAL_BATCH = 64  # sequences for which the experts that a step reads are averaged
_LINK = TransferCosts(2e-3, 1 / 40e9)  # 400 Gb/s of each accelerator at 80 %
STEP_TOKENS = 8192  # prefill chunk of a worker that only prefills
COLOCATED_STEP_TOKENS = 2048  # of one that decodes too: smaller, to keep ITL low


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorker:
    """One worker: a model on one or several accelerators."""

    geometry: Geometry
    num_gpus: int  # tensor-parallel ranks
    costs: StepCosts
    tiers: Mapping[str, Tier]  # of the whole worker: ranks load side by side
    link: TransferCosts  # of a handoff to another worker
    pool_bytes: float
    max_num_seqs: int = 256
    step_tokens: int = STEP_TOKENS
    colocated_step_tokens: int = COLOCATED_STEP_TOKENS
    kv_token_bytes: int = 0  # of a pool with one size for every token; 0 = what the context's length makes it

    def kv_bytes(self, num_tokens: float) -> float:
        """KV bytes of a context."""
        return self.kv_token_bytes * num_tokens if self.kv_token_bytes else self.geometry.kv_bytes(num_tokens)

    def prefill_s(self, num_tokens: float, num_context: float = 0.0) -> float:
        """Seconds to compute a prompt alone, after a context: one step's base for each chunk, and the work."""
        steps_s = math.ceil(num_tokens / self.step_tokens) * self.costs.base_s
        return steps_s + self.costs.prefill_work_s(num_tokens, prefill_attention(num_tokens, num_context))

    def transfer_s(self, num_tokens: float) -> float:
        """Seconds to hand a prompt's KV over, of which prefill hides a part."""
        return self.link.transfer_s(self.kv_bytes(num_tokens))

    def restore_s(self, tier: str, num_tokens: float) -> float:
        """Seconds to load a context from a tier."""
        return self.tiers[tier].restore_s(self.kv_bytes(num_tokens))

    def break_even(self, tier: str) -> int | None:
        """Context in tokens, a power of two up to 1 Mi, from which on loading is faster than computing; None = never.

        The first of two inequalities by which a tier pays: load < compute. The second, that hits still grow with
        its size, is `advice.py`.
        """
        pays = [self.restore_s(tier, 1 << n) < self.prefill_s(1 << n) for n in range(21)]
        if not pays[-1]:
            return None
        return 1 << max((n + 1 for n, does in enumerate(pays) if not does), default=0)

    def break_even_rate(self, num_tokens: int) -> float:
        """Bytes per second above which loading a context is faster than computing it: KV bytes / prefill seconds."""
        return self.kv_bytes(num_tokens) / self.prefill_s(num_tokens)

    def num_contexts(self, num_tokens: int) -> int:
        """Contexts of this length that the pool holds at once."""
        return int(self.pool_bytes // self.kv_bytes(num_tokens))


def plan_worker(
    geometry: Geometry, gpu: Gpu, num_gpus: int = 0, efficiency: Efficiency = Efficiency(), *, is_own_pool: bool = False
) -> PlannedWorker:
    """A worker as the data sheet predicts it, with the least ranks that leave room for KV if `num_gpus` is 0.

    `is_own_pool` is for Tandem's own engine, whose pool keeps every layer in full. Raises `ConfigError` if the model
    does not fit.
    """
    num_gpus = num_gpus or _least_ranks(geometry, gpu, efficiency)
    usable = efficiency.usable_memory * gpu.memory_bytes * num_gpus
    if geometry.checkpoint_bytes >= usable:
        raise ConfigError(
            f"tensor_parallel_size={num_gpus} gives {usable / 1e9:.0f} GB for weights of "
            f"{geometry.checkpoint_bytes / 1e9:.0f} GB; raise it, or choose a GPU with more memory"
        )
    if is_own_pool and not geometry.pool_token_elements:
        raise ConfigError("engine=tandem cannot serve this model: layers with a state; use --engine vllm or sglang")
    tiers = {
        name: Tier(LoadPrior(tier.load.latency_s, tier.load.bytes_per_s * num_gpus), tier.dollars_per_gb_month)
        for name, tier in tiers_of(gpu, efficiency).items()
    }
    return PlannedWorker(
        geometry=geometry,
        num_gpus=num_gpus,
        costs=step_costs(geometry, gpu, num_gpus, efficiency),
        tiers=tiers,
        link=TransferCosts(_LINK.latency_s, _LINK.byte_s / num_gpus),
        pool_bytes=usable - geometry.checkpoint_bytes,
        kv_token_bytes=geometry.pool_token_bytes if is_own_pool else 0,
    )


def step_costs(geometry: Geometry, gpu: Gpu, num_gpus: int, efficiency: Efficiency) -> StepCosts:
    """The coefficients of a step (roofline: Williams et al., CACM 2009), of the terms that grow with the batch.

        base_s           weights that a step reads / bandwidth + launches + sums over ranks
        prefill_token_s  2 * active parameters / FLOP/s + the rank's share of sums; attention inside windows
        attention_s      2 * heads * (key + value width), all layers that attend in full, / FLOP/s
        decode_seq_s     2 * active parameters / FLOP/s + experts that one more sequence adds + KV inside windows
        kv_token_s       KV bytes of a token in layers that keep all / bandwidth

    Over a causal prompt of n tokens attention_s * n^2 / 2 is 2 * layers * heads * width * n^2 FLOP. Weights that are
    read while products run are added, not hidden, which overestimates a chunk by a few percent.
    """
    bandwidth = gpu.bytes_per_s * num_gpus
    flops = (gpu.fp8_flops if geometry.weight_bytes == 1 else gpu.bf16_flops) * num_gpus * efficiency.products
    attention_flops = gpu.bf16_flops * num_gpus * efficiency.attention
    full, windows = geometry.of_kind("full", "latent"), geometry.of_kind("window")
    kv_byte_s = geometry.kv_element_bytes / (efficiency.kv * bandwidth)
    read_s = geometry.weight_bytes / (efficiency.weights * bandwidth)
    always = geometry.num_params - geometry.num_expert_params
    one, many = (_experts_read(geometry, batch) for batch in (1, _TYPICAL_BATCH))
    token_s = 2 * geometry.num_active_params / flops
    sums_s, sum_s = _sums_s(geometry, gpu, num_gpus, efficiency)
    return StepCosts(
        base_s=(always + one) * read_s + efficiency.launch_s + sums_s,
        prefill_token_s=token_s + sum_s + sum(2 * one.pair_elements * one.window for one in windows) / attention_flops,
        attention_s=sum(2 * layer.pair_elements for layer in full) / attention_flops,
        decode_seq_s=token_s
        + sum_s
        + 2 * geometry.head_params / flops
        + (many - one) * read_s / (_TYPICAL_BATCH - 1)
        + sum(layer.token_elements * layer.window for layer in windows) * kv_byte_s,
        kv_token_s=sum(layer.token_elements for layer in full) * kv_byte_s,
    )


def scaled(learned: StepCosts, measured: StepCosts, planned: StepCosts) -> StepCosts:
    """Learned costs for other hardware or another model: each times the ratio of the two predictions."""
    return StepCosts(
        *(cost * new / old if old else new for cost, old, new in zip(learned, measured, planned, strict=True))
    )


def _least_ranks(geometry: Geometry, gpu: Gpu, efficiency: Efficiency) -> int:
    room = efficiency.usable_memory * gpu.memory_bytes * (1 - _LEAST_KV_SHARE)
    ranks = 1 << max(math.ceil(math.log2(geometry.checkpoint_bytes / room)), 0)
    if ranks > _MAX_RANKS:
        raise ConfigError(
            f"{geometry.checkpoint_bytes / 1e9:.0f} GB of weights need {ranks} of these GPUs a worker, more than a "
            f"node's {_MAX_RANKS}; choose a larger GPU or a quantized checkpoint, or give --tensor-parallel-size"
        )
    return ranks


def _experts_read(geometry: Geometry, batch: int) -> float:
    """Parameters of routed experts that a step of this many tokens reads, if each token draws its own."""
    return geometry.num_expert_params * (1 - (1 - geometry.expert_share) ** batch)


def _sums_s(geometry: Geometry, gpu: Gpu, num_gpus: int, efficiency: Efficiency) -> tuple[float, float]:
    """Seconds of the two all-reduces of each layer: of a step, and of each token of 2 bytes an element in it."""
    if num_gpus == 1:
        return 0.0, 0.0
    num_sums = 2 * len(geometry.layers)
    moved = 2 * (num_gpus - 1) / num_gpus * 2 * geometry.hidden_size
    return num_sums * efficiency.reduce_s, num_sums * moved / (efficiency.link * gpu.peer_bytes_per_s)
