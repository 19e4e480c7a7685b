"""Checks at load time that a model computes the same through paged steps as with its own attention.

Transformers' models differ in what they pass to an attention function and in how they mix tokens elsewhere. A model
that does not fit must be refused here, by name, before its answers are wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tandem.engine.attention.interface import ATTENTION_NAME, AttentionBackend
from tandem.engine.loader import LoadedModel
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sequence import ScheduledChunk, Sequence
from tandem.protocol.errors import ConfigError
from tandem.protocol.sampling import SamplingParams

__all__ = ["check_model"]

_LENGTHS = (9, 21, 14, 17, 6)  # prompts computed side by side, each in two chunks
_CUTS = (4, 13, 7, 1, 5)
# Largest relative difference of the logits, in the median prompt: in bfloat16, rounding sometimes makes a mixture of
# experts choose another expert.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


class _Recorder:
    """A backend that records each layer's window."""

    name = "recorder"

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.windows: dict[int, int] = {}

    def __call__(self, layer_idx: int, *tensors: Any, window: int, **options: Any) -> Tensor:
        self.windows[layer_idx] = window
        return self._backend(layer_idx, *tensors, window=window, **options)


def check_model(model: LoadedModel, backend: AttentionBackend, block_size: int) -> None:
    """Raise ConfigError unless packed, chunked, paged logits equal those of each prompt alone in the plain model."""
    recorder = _Recorder(backend)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.vocab_size, (length,), generator=generator) for length in _LENGTHS]
    try:
        paged = _paged_logits(model, recorder, block_size, prompts)
        plain = _plain_logits(model, prompts)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as exc:
        raise ConfigError(f"{_name(model)} cannot be served: {exc}") from exc
    _check_layers(model, recorder.windows)
    error = float(((paged - plain).norm(dim=1) / plain.norm(dim=1).clamp_min(1e-20)).median())
    if not error < _TOLERANCE[model.dtype]:
        raise ConfigError(
            f"{_name(model)} cannot be served: its paged logits differ from its own by {error:.2g} (relative), so it "
            "attends or mixes tokens in a way that this engine does not know"
        )


def _name(model: LoadedModel) -> str:
    return type(model.module).__name__


def _paged_logits(model: LoadedModel, backend: AttentionBackend, block_size: int, prompts: list[Tensor]) -> Tensor:
    """Logits after each prompt, [n, vocab]: all prompts packed, in two steps, over a pool of their own."""
    num_blocks = [-(-len(prompt) // block_size) for prompt in prompts]
    shape = (sum(num_blocks), model.num_layers, 2, block_size, model.num_kv_heads, model.head_dim)
    runner = ModelRunner(model, backend, torch.zeros(shape, dtype=model.dtype, device=model.device))
    free = list(range(shape[0]))
    first, second = [], []
    for prompt, cut, count in zip(prompts, _CUTS, num_blocks, strict=True):
        blocks, free = free[-count:], free[:-count]
        sampling = SamplingParams(max_tokens=1)
        sequence = Sequence("", prompt.tolist(), len(prompt), sampling, root=b"", blocks=blocks)
        first.append(ScheduledChunk(sequence, 0, cut, samples=False))
        second.append(ScheduledChunk(sequence, cut, len(prompt) - cut, samples=True))
    runner.run(first)
    logits = runner.run(second)
    assert logits is not None, "the second chunks end the prompts"
    return logits.float()


@torch.inference_mode()
def _plain_logits(model: LoadedModel, prompts: list[Tensor]) -> Tensor:
    module: Any = model.module
    module.set_attn_implementation("eager")
    try:
        rows = [
            module(input_ids=prompt.to(model.device).unsqueeze(0), use_cache=False).logits[0, -1] for prompt in prompts
        ]
    finally:
        module.set_attn_implementation(ATTENTION_NAME)
    return torch.stack(rows).float()


def _check_layers(model: LoadedModel, windows: dict[int, int]) -> None:
    """Check that all layers attended through the pool, sliding ones with their window (longer than the prompts)."""
    config = model.module.config.get_text_config(decoder=True)  # type: ignore[union-attr, operator]
    missing = sorted(set(range(model.num_layers)) - set(windows))
    if missing:
        raise ConfigError(f"{_name(model)} cannot be served: layers {missing} keep no KV in the pool")
    for layer_idx, layer_type in enumerate(getattr(config, "layer_types", None) or ()):
        expected = config.sliding_window if layer_type == "sliding_attention" else 0
        if layer_idx in windows and windows[layer_idx] != expected:
            raise ConfigError(
                f"{_name(model)} cannot be served: layer {layer_idx} ({layer_type}) attended with "
                f"window={windows[layer_idx]}, its config says {expected}"
            )
