"""True costs of simulated machines. The router does not know them: it starts from its own priors and learns.

Step time is linear in the batch, as in the router's model. So the simulation shows placement with a model that can
become exact; machines with nonlinear step times are not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.loadtest.traces import TRACE_BLOCK_SIZE
from tandem.scheduling.cost_model import StepCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The hardware of one worker, with the model it runs."""

    kind: str  # as on a worker's card: workers of one kind share a learned cost model
    costs: StepCosts
    kv_token_bytes: int
    pool_tokens: int
    step_tokens: int  # prefill chunk of a prefill or decode worker
    colocated_step_tokens: int  # prefill chunk of a colocated worker: smaller, to keep ITL low
    max_num_seqs: int
    link_latency_s: float
    link_bytes_per_s: float
    host_bytes_per_s: float  # between host memory and the pool

    @property
    def block_bytes(self) -> int:
        """KV bytes of one block of a trace."""
        return self.kv_token_bytes * TRACE_BLOCK_SIZE


# Data sheet figures of an H200 (4.8 TB/s, 141 GB, 990 dense BF16 and 1,979 FP8 TFLOP/s) at efficiencies usual in
# practice: 80 % of bandwidth for weights, 70 % for KV, 50 % of the FLOP/s in linear layers, 40 % in attention.
# Links: 400 Gb/s RDMA at 80 %; host memory over PCIe 5 x16.
_H200_70B = Machine(  # 80 layers, 8,192 wide, 8 KV heads of 128; weights and KV in FP8
    kind="NVIDIA H200, 70B",
    costs=StepCosts(19e-3, 141e-6, 6.6e-9, 30e-6, 49e-9),
    kv_token_bytes=163_840,
    pool_tokens=320_000,
    step_tokens=8192,
    colocated_step_tokens=2048,
    max_num_seqs=128,
    link_latency_s=2e-3,
    link_bytes_per_s=40e9,
    host_bytes_per_s=50e9,
)
_H200_8B = replace(  # 32 layers, 4,096 wide, 8 KV heads of 128; weights and KV in BF16
    _H200_70B,
    kind="NVIDIA H200, 8B",
    costs=StepCosts(5e-3, 32e-6, 1.3e-9, 15e-6, 39e-9),
    kv_token_bytes=131_072,
    pool_tokens=830_000,
)
_CPU = Machine(  # one core and SmolLM2-135M in BF16, as measured in docs/benchmarks.md
    kind="cpu-1",
    costs=StepCosts(24e-3, 0.9e-3, 60e-9, 1.0e-3, 2e-6),
    kv_token_bytes=23_040,
    pool_tokens=65_536,
    step_tokens=512,
    colocated_step_tokens=256,
    max_num_seqs=128,
    link_latency_s=2e-3,
    link_bytes_per_s=3e9,
    host_bytes_per_s=5e9,
)

MACHINES: dict[str, Machine] = {"h200-70b": _H200_70B, "h200-8b": _H200_8B, "cpu-135m": _CPU}
