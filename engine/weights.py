"""Reads a checkpoint's weights into transformers' class, or says which of them are not what the class needs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AutoHfQuantizer

from tandem.engine.attention.interface import ATTENTION_NAME, register
from tandem.engine.tensor_parallel.group import RankGroup
from tandem.engine.tensor_parallel.layers import localize
from tandem.engine.tensor_parallel.loading import sharded
from tandem.protocol.errors import ConfigError

# Scales of a quantized KV cache, and of quantized activations: neither is quantized here, unless the quantizer does it.
_UNUSED = re.compile(r"\.([kv]_scale|input_scale|input_zero_point|input_global_scale)$")
# Without a GPU transformers turns these into plain weights. It looks for a GPU, and not for the device it loads to.
_PLAIN_ON_CPU = frozenset({"fp8", "mxfp4", "mxfp8"})
# What transformers and the quantizers' packages raise for checkpoints that they cannot read.
_LOAD_ERRORS = (
    AttributeError, ImportError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, ValueError,
)  # fmt: skip


class _LoadReport(logging.Filter):
    """Keeps transformers' table of problems with the weights out of the log, and the names in it."""

    def __init__(self) -> None:
        super().__init__()
        self.unconverted: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is something else."""
        text = record.getMessage()
        self.unconverted += re.findall(r"^(\S+) +\| \S*CONVERSION", text, re.MULTILINE)
        return "LOAD REPORT" not in text


def load_weights(
    folder: Path,
    model_type: type[PreTrainedModel],
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None = None,
) -> PreTrainedModel:
    """The model in `folder` with paged attention, in `dtype` (or as it is quantized), on `device`, ready for inference.

    Weights for a GPU are read straight into its memory. With `group` only this rank's shard is read. Raises ConfigError
    if a weight is missing, left over or of another shape, or if the checkpoint is quantized in a way that cannot run
    here.
    """
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model={str(folder)!r} has no *.safetensors files; convert its weights to safetensors")
    method = _quantization(folder, config, device)
    if method and group is not None:
        raise ConfigError(
            f"model={str(folder)!r} is quantized by {method!r}, whose weights this engine cannot cut for "
            f"tensor_parallel_size={group.size}; use 1, or serve it by vLLM or SGLang (`--engine vllm`)"
        )
    register()
    logged = _LoadReport()
    transformers_logger = logging.getLogger("transformers.modeling_utils")
    transformers_logger.addFilter(logged)
    try:
        with _placed(device) if group is None else sharded(group, device) as placement:
            module, report = model_type.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
                **placement,
            )
    except _LOAD_ERRORS as exc:
        quantized = f" (quantized: {method})" if method else ""
        problem = f"its weights do not make {_some(logged.unconverted)}" if logged.unconverted else str(exc)
        remedy = f" (pip install {exc.name})" if isinstance(exc, ModuleNotFoundError) else ""
        raise ConfigError(f"model={str(folder)!r}{quantized} cannot be loaded here: {problem}{remedy}") from exc
    finally:
        transformers_logger.removeFilter(logged)
    _check_report(folder, model_type.__name__, report)
    if method and not getattr(module, "hf_quantizer", None):
        _cast_dequantized(module, dtype)
    if group is not None:
        localize(module, group)
    return module.eval()


@contextmanager
def _placed(device: torch.device) -> Iterator[dict[str, Any]]:
    """Arguments of `from_pretrained` for all weights on one device. On a CPU they stay mapped files."""
    yield {"device_map": None if device.type == "cpu" else {"": device}}


def _cast_dequantized(module: PreTrainedModel, dtype: torch.dtype) -> None:
    """Where a quantizer made plain weights, give the rest the same dtype: it left them as they are in the file."""
    kept = tuple(module._get_dtype_plan(dtype))  # parts that the class computes in float32
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)


def quantization_settings(config: Any) -> Any:
    """How a checkpoint is quantized, or None."""
    of_text = config.get_text_config(decoder=True)
    return getattr(config, "quantization_config", None) or getattr(of_text, "quantization_config", None)


def _quantization(folder: Path, config: Any, device: torch.device) -> str | None:
    """The checkpoint's quantization method. Raises ConfigError for one that transformers would ignore.

    Methods whose quantized products this engine has no use for are set to give plain weights.
    """
    settings = quantization_settings(config)
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
    if method == "compressed-tensors" or (method in _PLAIN_ON_CPU and device.type == "cpu"):
        settings["dequantize"] = True
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
