"""Chooses the attention backend of a device. The choice is a pure function; heavy imports wait until it is made."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from tandem.engine.attention.interface import AttentionBackend, LayerAttention
from tandem.protocol.errors import ConfigError

_OLDEST_GPU = (8, 0)  # Ampere: the first with bfloat16
_HOPPER = 9
_FA3_MAX_HEAD_DIM = 256
_FA3_MODULE = "flash_attn_interface"  # of the package with the kernels; torch imports it when FA3 is activated


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What decides which backends run here."""

    kind: str  # cpu or cuda
    capability: tuple[int, int] = (0, 0)  # CUDA compute capability
    has_fa3: bool = False
    has_triton: bool = False
    is_interpreting: bool = False  # Triton runs kernels on the CPU, slowly: for tests


def read_device(device: torch.device) -> Device:
    """The facts about a device, and about the packages installed here."""
    has_triton = find_spec("triton") is not None
    if device.type != "cuda":
        return Device(kind=device.type, has_triton=has_triton, is_interpreting=has_triton and _is_interpreting())
    return Device(
        kind="cuda",
        capability=torch.cuda.get_device_capability(device),
        has_fa3=find_spec(_FA3_MODULE) is not None,
        has_triton=has_triton,
    )


def choose_backend(
    wanted: str,
    device: Device,
    head_dim: int,
    dtype: torch.dtype,
    attentions: Collection[LayerAttention],
    kv_dtype: torch.dtype | None = None,
) -> str:
    """The name of the backend; `auto` is the fastest that runs. Raises ConfigError if `wanted`, or none, runs.

    `kv_dtype` is the pool's type; None: that of the queries, `dtype`.
    """
    other_kv = "" if kv_dtype in (None, dtype) else f"it reads no KV in {kv_dtype}"
    obstacles = {
        "cpu": other_kv if device.kind == "cpu" else "it runs on CPUs only",
        "fa3": _fa3_obstacle(device, head_dim, dtype, attentions) or other_kv,
        "triton": _triton_obstacle(device),
    }
    if wanted == "auto":
        for name, obstacle in obstacles.items():
            if not obstacle:
                return name
        reasons = "; ".join(f"{name}: {obstacle}" for name, obstacle in obstacles.items())
        raise ConfigError(f"no attention backend runs on this {device.kind} device ({reasons})")
    if obstacles[wanted]:
        raise ConfigError(f"attention_backend={wanted} cannot be used: {obstacles[wanted]}; choose auto")
    return wanted


def make_backend(name: str, num_threads: int, max_model_len: int) -> AttentionBackend:
    """The backend of this name, as `choose_backend` returned it, for a model of this context length."""
    if name == "cpu":
        from tandem.engine.attention.cpu import CpuAttention

        return CpuAttention(num_threads)
    if name == "fa3":
        from tandem.engine.attention.fa3 import Fa3Attention

        return Fa3Attention()
    from tandem.engine.attention.triton import TritonAttention, split_tokens

    return TritonAttention(split_tokens(max_model_len))


def _fa3_obstacle(device: Device, head_dim: int, dtype: torch.dtype, attentions: Collection[LayerAttention]) -> str:
    if device.capability[0] != _HOPPER:
        return "FlashAttention 3 needs a Hopper GPU"
    if not device.has_fa3:
        return f"the package of FlashAttention 3 ({_FA3_MODULE}) is not installed"
    if dtype is torch.float32 or head_dim > _FA3_MAX_HEAD_DIM:
        return f"FlashAttention 3 computes 16-bit types and head dimensions up to {_FA3_MAX_HEAD_DIM}"
    if any(one.softcap for one in attentions):
        return "torch does not pass a logit soft cap on to FlashAttention 3, and this model has one"
    if any(one.has_sinks for one in attentions):
        return "torch does not pass attention sinks on to FlashAttention 3, and this model has them"
    return ""


def _triton_obstacle(device: Device) -> str:
    if not device.has_triton:
        return "Triton is not installed: pip install triton (the CUDA build of torch brings it)"
    if device.kind == "cpu" and not device.is_interpreting:
        return "Triton's kernels need a GPU (or, for tests, TRITON_INTERPRET=1)"
    if device.kind == "cuda" and device.capability < _OLDEST_GPU:
        return f"Triton's kernels need compute capability 8.0, and this GPU has {'.'.join(map(str, device.capability))}"
    return ""


def _is_interpreting() -> bool:
    from triton.knobs import runtime

    return bool(runtime.interpret)
