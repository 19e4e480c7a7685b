"""Accelerators and the memory around them, from their makers' data sheets, and what is reached of that in practice."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.errors import ConfigError
from tandem.protocol.load_prior import LoadPrior


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator. Rates are of one direction; FLOP/s are without sparsity."""

    memory_bytes: float
    bytes_per_s: float  # of its memory
    bf16_flops: float
    fp8_flops: float  # as bfloat16 where it has no 8-bit products
    watts: float  # of the board, as its maker limits it
    host_bytes_per_s: float  # between host memory and the accelerator
    peer_bytes_per_s: float  # between accelerators of one node, each with all others


# Data sheets: NVIDIA A100 80GB SXM (2021), L4 and L40S (2023), H100 SXM (2023), H20, H200 SXM (2024), B200 and GB200
# (2025, of a DGX and an NVL72), B300 (2025); AMD Instinct MI300X (2023), MI325X (2024), MI355X (2025). Host links: PCIe
# 4 and 5 x16 are 32 and 64 GB/s, NVLink-C2C 450.
GPUS: dict[str, Gpu] = {
    "a100": Gpu(80e9, 2.04e12, 312e12, 312e12, 400, 32e9, 300e9),
    "l4": Gpu(24e9, 0.30e12, 121e12, 242e12, 72, 32e9, 32e9),
    "l40s": Gpu(48e9, 0.86e12, 362e12, 733e12, 350, 32e9, 32e9),
    "h20": Gpu(96e9, 4.0e12, 148e12, 296e12, 400, 64e9, 450e9),
    "h100": Gpu(80e9, 3.35e12, 989e12, 1979e12, 700, 64e9, 450e9),
    "h200": Gpu(141e9, 4.8e12, 989e12, 1979e12, 700, 64e9, 450e9),
    "b200": Gpu(180e9, 8.0e12, 2250e12, 4500e12, 1000, 64e9, 900e9),
    "gb200": Gpu(186e9, 8.0e12, 2500e12, 5000e12, 1200, 450e9, 900e9),
    "b300": Gpu(270e9, 8.0e12, 2250e12, 4500e12, 1100, 64e9, 900e9),
    "mi300x": Gpu(192e9, 5.3e12, 1307e12, 2615e12, 750, 64e9, 448e9),
    "mi325x": Gpu(256e9, 6.0e12, 1307e12, 2615e12, 1000, 64e9, 448e9),
    "mi355x": Gpu(288e9, 8.0e12, 2500e12, 5000e12, 1400, 64e9, 538e9),
}


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a data sheet's figures that serving engines reach, and fixed times.

    The first four are fitted to what vLLM 0.24's kernels take by the measurements in aiconfigurator 0.12 (Llama 3.1 8B
    and 70B on H100, H200 and B200); `benchmarks/silicon.py` compares other models and GPUs.
    """

    products: float = 0.75  # of FLOP/s, in linear layers
    attention: float = 0.5  # of bfloat16 FLOP/s
    weights: float = 0.8  # of memory bandwidth
    kv: float = 0.9  # of memory bandwidth
    link: float = 0.8  # of any link
    launch_s: float = 0.8e-3  # of each step: scheduling, launches, sampling
    reduce_s: float = 8e-6  # of each sum over tensor-parallel ranks
    usable_memory: float = 0.9  # the rest is for activations and graphs


@dataclass(frozen=True, slots=True)
class Tier:
    """Memory from which KV is restored into the pool, as one accelerator sees it."""

    load: LoadPrior
    dollars_per_gb_month: float  # assumed

    def restore_s(self, num_bytes: float) -> float:
        """Seconds to load this much: latency + bytes / rate."""
        return self.load.latency_s + num_bytes / self.load.bytes_per_s


def gpu_named(name: str) -> Gpu:
    """The accelerator of this name. Raises `ConfigError`."""
    if name.lower() not in GPUS:
        raise ConfigError(f"gpu={name!r} is unknown; choose one of {', '.join(GPUS)}, or measure with --from URL")
    return GPUS[name.lower()]


def tiers_of(gpu: Gpu, efficiency: Efficiency) -> dict[str, Tier]:
    """Each tier's cost beside this accelerator.

    Host memory is as fast as the link to it. The others are assumed: one PCIe 4 drive of 7 GB/s for each accelerator,
    and 10 Gb/s of an object store. So are prices: DRAM 7 $/GB and flash 0.2 $/GB over 48 months; S3's list price.
    """
    share = efficiency.link
    return {
        "host": Tier(LoadPrior(50e-6, share * gpu.host_bytes_per_s), 0.15),
        "disk": Tier(LoadPrior(1e-3, share * 7e9), 0.004),
        "object": Tier(LoadPrior(50e-3, share * 1.25e9), 0.023),
    }
