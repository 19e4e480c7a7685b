"""Reads a checkpoint's weights into transformers' class, or says which of them are not what the class needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer

from tandem.engine.attention.interface import ATTENTION_NAME
from tandem.protocol.errors import ConfigError

__all__ = ["load_weights"]

# Scales of a quantized KV cache. This engine keeps KV unquantized.
_UNUSED = re.compile(r"\.[kv]_scale$")
# What transformers and the quantizers' packages raise for checkpoints that they cannot read.
_LOAD_ERRORS = (
    AttributeError, ImportError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError,
)  # fmt: skip


def load_weights(
    folder: Path, model_type: type[PreTrainedModel], config: Any, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The model in `folder` with paged attention, in `dtype` (or as it is quantized), on `device`, ready for inference.

    Weights for a GPU are read straight into its memory. Raises ConfigError if a weight is missing, left over or of
    another shape, or if the checkpoint is quantized in a way that cannot run here.
    """
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model={str(folder)!r} has no *.safetensors files; convert its weights to safetensors")
    method = _quantization(folder, config)
    try:
        module, report = model_type.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            device_map=None if device.type == "cpu" else {"": device},  # on a CPU, weights stay mapped files
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
        )
    except _LOAD_ERRORS as exc:
        quantized = f" (quantized: {method})" if method else ""
        raise ConfigError(f"model={str(folder)!r}{quantized} cannot be loaded here: {exc}") from exc
    _check_report(folder, model_type.__name__, report)
    return module.eval()


def _quantization(folder: Path, config: Any) -> str | None:
    """The checkpoint's quantization method. Raises ConfigError for one that transformers would ignore."""
    settings = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(decoder=True), "quantization_config", None
    )
    if not settings:
        return None
    method = settings.get("quant_method")
    if "quant_method" not in settings and not (settings.get("load_in_8bit") or settings.get("load_in_4bit")):
        raise ConfigError(f"model={str(folder)!r}: its quantization_config has no quant_method")
    if not AutoHfQuantizer.supports_quant_method(settings):
        raise ConfigError(
            f"model={str(folder)!r} is quantized by {method!r}, which transformers {transformers.__version__} cannot "
            f"run (it knows {', '.join(sorted(AUTO_QUANTIZER_MAPPING))}); choose another checkpoint, or serve this one "
            "by vLLM or SGLang behind `tandem route`"
        )
    return str(method or "bitsandbytes")


def _check_report(folder: Path, name: str, report: dict[str, Any]) -> None:
    """Raise ConfigError if the weights are not exactly those of the class: others would be random or left out."""
    mismatched = [f"{key} {list(found)} instead of {list(wanted)}" for key, found, wanted in report["mismatched_keys"]]
    for weights, problem in (
        (mismatched, f"has weights of another shape than {name} needs"),
        (report["missing_keys"], f"lacks weights that {name} needs"),
        (
            [key for key in report["unexpected_keys"] if not _UNUSED.search(key)],
            f"has weights that {name} has no use for",
        ),
    ):
        if weights:
            raise ConfigError(
                f"model={str(folder)!r} {problem}: {_some(weights)}; the download is incomplete, or config.json is of "
                "another model"
            )


def _some(names: Iterable[str], most: int = 4) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more
