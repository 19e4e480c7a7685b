"""Loads any decoder model of transformers for paged serving, and describes the shape of its KV cache."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.utils.logging import disable_progress_bar

from tandem.engine.architecture import load_config, model_class, text_config
from tandem.engine.attention.interface import LayerAttention
from tandem.engine.kv_geometry import measure_kv
from tandem.engine.products import inexact_parts
from tandem.engine.quantization import QUANTIZED_DTYPES
from tandem.engine.tensor_parallel.group import RankGroup
from tandem.engine.tensor_parallel.layers import sum_experts
from tandem.engine.tensor_parallel.loading import check_config, check_heads
from tandem.engine.text_part import dropping_idle_parts
from tandem.engine.weights import load_weights, quantization_settings
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

_SAMPLE_STRIDE_BYTES, _SAMPLE_BYTES = 1 << 20, 4096


def _nothing(_: torch.device) -> None:
    """Default of `join`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready for paged steps, with the geometry of its KV cache."""

    module: nn.Module
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype  # of activations
    kv_dtype: torch.dtype  # of KV in the pool
    device: torch.device
    revision: str
    attentions: frozenset[LayerAttention]  # the kinds of its layers
    num_ranks: int = 1  # of tensor parallelism; the figures above are those of one rank
    kernels: str  # what computes it; between two kinds the last bits differ
    is_exact: bool  # whether no row of a step depends on how many rows there are, bit for bit
    attention: str  # other settings that change the KV's content, rope and window, as canonical JSON

    @property
    def kv_type(self) -> str:
        """Names the type of KV in the pool, and the one that it was computed in if that is another."""
        return str(self.dtype) if self.kv_dtype is self.dtype else f"{self.kv_dtype} of {self.dtype}"


def resolve_device(name: str, group: RankGroup | None = None) -> torch.device:
    """The device of this name; `auto` is a GPU if there is one. Ranks have a GPU each.

    Raises ConfigError for cuda without a GPU, or with too few for the ranks.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not num_gpus):
        return torch.device("cpu")
    if not num_gpus:
        raise ConfigError("device=cuda was asked for, but torch sees no CUDA device; use --device cpu")
    if group is None:
        return torch.device("cuda")
    if num_gpus < group.size:
        raise ConfigError(f"tensor_parallel_size={group.size} needs as many GPUs; this worker sees {num_gpus}")
    return torch.device("cuda", group.rank)


def resolve_dtype(name: str, config: Any) -> torch.dtype:
    """The dtype of this name; `auto` is the checkpoint's. Our CPU kernels read bfloat16 on any CPU."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    return torch.float32 if text_config(config).dtype == torch.float32 else torch.bfloat16


def model_revision(folder: Path) -> str:
    """Identifies exactly these weights: a hash of the config and of each weight file's name, size, head and samples.

    The head of a safetensors file holds its tensor table. Fine-tunes of one model often share table and embeddings; one
    page of every MiB distinguishes them without reading gigabytes at each start.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE_STRIDE_BYTES))
            for offset in range(_SAMPLE_STRIDE_BYTES, size, _SAMPLE_STRIDE_BYTES):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def load_model(
    config: EngineConfig, group: RankGroup | None = None, join: Callable[[torch.device], None] = _nothing
) -> LoadedModel:
    """Load `config.model` onto its device in its dtype, with paged attention in every layer.

    With `group`, load this rank's shard, and call `join` to meet the other ranks before the first forward. Raises
    ConfigError when the folder is not a model, lacks weights, or has an architecture or a quantization that cannot
    be served here.
    """
    folder = Path(config.model)
    device = resolve_device(config.device, group)
    if config.weights == "fp8" and device.type == "cpu":
        raise ConfigError("weights=fp8 has kernels for GPUs only; use weights=int8 on a CPU")
    # Triton's kernels, if they are asked for by name, may be interpreted on a CPU.
    if config.kv_cache_dtype == "fp8" and device.type == "cpu" and config.attention_backend != "triton":
        raise ConfigError("kv_cache_dtype=fp8 has kernels for GPUs only; leave it out on a CPU")
    if config.exact == "on" and device.type != "cpu" and group is not None:
        raise ConfigError("exact=on is for one GPU a worker: sums between GPUs are in NCCL's order; leave it off")
    disable_progress_bar()  # a worker has no terminal
    model_config = load_config(folder)
    model_type = model_class(config.model, model_config)
    text = text_config(model_config)
    dtype = resolve_dtype(config.dtype, model_config)
    if group is not None:
        check_config(config.model, text, group.size)
    # What is rounded here is read where it has room: a GPU gets it layer by layer.
    is_rounded = config.weights != "as-loaded" and group is None and not quantization_settings(model_config)
    reads_to = torch.device("cpu") if is_rounded else device
    module = load_weights(folder, model_type, model_config, dtype, reads_to, group)
    join(device)
    with dropping_idle_parts(module):
        kv = measure_kv(module)
    if group is not None:
        check_heads(config.model, text, kv, group.size)
    kernels = _use_kernels(module, device, kv.dtype, config)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading took and gave back is free for the pool
    if group is not None:
        sum_experts(module, group)
    parts = inexact_parts(module)
    if parts and config.exact == "on":
        raise ConfigError(f"exact=on cannot be kept: products of {', '.join(parts)} are not known here; leave it off")
    return LoadedModel(
        module=module,
        num_layers=kv.num_layers,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        vocab_size=text.vocab_size,
        max_model_len=_max_model_len(text),
        eos_token_ids=_eos_token_ids(folder, model_config, text.vocab_size),
        dtype=kv.dtype,
        kv_dtype=kv.dtype if config.kv_cache_dtype == "auto" else QUANTIZED_DTYPES[config.kv_cache_dtype],
        device=device,
        revision=model_revision(folder),
        attentions=kv.attentions,
        kernels=kernels,
        is_exact=not parts and (device.type == "cpu" or config.exact == "on"),
        attention=_attention_identity(text),
        num_ranks=1 if group is None else group.size,
    )


def _use_kernels(module: nn.Module, device: torch.device, dtype: torch.dtype, config: EngineConfig) -> str:
    """Replace parts of the model with kernels for the device. Returns their name."""
    suffix = "" if config.weights == "as-loaded" else f" {config.weights}"
    if device.type == "cpu":
        from tandem.engine.cpu import optimize as for_cpu
        from tandem.engine.cpu.kinds import kernels_of
        from tandem.engine.native_layers import use_native_layers

        for_cpu.optimize(module, is_int8=config.weights == "int8")
        _leave_weight_files(module)
        use_native_layers(module)
        return kernels_of(dtype) + suffix
    is_exact = config.exact == "on"
    if find_spec("triton") is None:
        if is_exact or suffix:
            setting = "exact=on" if is_exact else f"weights={config.weights}"
            raise ConfigError(f"{setting} needs Triton's kernels on a GPU: install triton, or leave it off")
        return device.type
    from tandem.engine.gpu import optimize as for_gpu

    if suffix:
        for_gpu.quantize_products(module, QUANTIZED_DTYPES[config.weights], device, is_exact=is_exact)
    else:
        for_gpu.optimize(module, is_exact=is_exact)
    if not is_exact:
        return f"{device.type} fused{suffix}"
    major, minor = torch.cuda.get_device_capability(device)  # others may multiply by other instructions
    return f"{device.type} exact {major}.{minor}{suffix}"


def _leave_weight_files(module: nn.Module) -> None:
    """Copy the weights that were not packed. Each is a view of a mapped file, which would keep all of it in memory."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()


def _max_model_len(text: Any) -> int:
    """The model's context length, up to which a token's KV depends only on its position."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "longrope":
        # Beyond this, transformers switches the whole batch to other frequencies, even if keys are cached.
        original = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
        if original < text.max_position_embeddings:
            logger.warning("longrope: serving contexts up to %d of %d", original, text.max_position_embeddings)
        return int(min(original, text.max_position_embeddings))
    return int(text.max_position_embeddings)


def _eos_token_ids(folder: Path, config: Any, vocab_size: int) -> frozenset[int]:
    """The end tokens within the vocabulary: some configs say -1, or name a token that the model cannot produce."""
    eos = getattr(text_config(config), "eos_token_id", None)
    if (folder / "generation_config.json").is_file():
        try:
            eos = GenerationConfig.from_pretrained(folder).eos_token_id or eos
        except (OSError, ValueError) as exc:
            raise ConfigError(f"model={str(folder)!r}: its generation_config.json cannot be read: {exc}") from exc
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos]).intersection(range(vocab_size))


def _attention_identity(text: Any) -> str:
    fields = ("rope_parameters", "rope_theta", "sliding_window", "layer_types", "max_position_embeddings")
    settings = text.to_dict()
    return json.dumps({name: settings.get(name) for name in fields}, sort_keys=True, default=str)
