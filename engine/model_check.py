"""Checks at load time that a model computes the same through paged steps as with its own attention.

Transformers' models differ in what they pass to an attention function and in how they mix tokens elsewhere. A model
that does not fit must be refused here, by name, before its answers are wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tandem.engine.architecture import text_config
from tandem.engine.attention.choice import choose_backend, make_backend, read_device
from tandem.engine.attention.interface import ATTENTION_NAME, AttentionBackend
from tandem.engine.attention_check import check_attention
from tandem.engine.block_table import BlockTable
from tandem.engine.kv_geometry import FORWARD_ERRORS
from tandem.engine.kv_pool import paged_view
from tandem.engine.loader import LoadedModel
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sequence import ScheduledChunk, Sequence
from tandem.engine.token_array import token_array
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.sampling import SamplingParams

logger = logging.getLogger(__name__)

_LENGTHS = (9, 21, 14, 17, 6)  # prompts computed side by side, each in two chunks
_CUTS = (4, 13, 7, 1, 5)
_TIMES = 2  # that they are beside each other in exact steps: these then have more rows than a narrow tile of a product
_WINDOW = 5  # of sliding layers meanwhile: shorter than the prompts, so that a window that is not applied is seen
# Largest relative difference of the logits, in the median prompt: in bfloat16, rounding sometimes makes a mixture of
# experts choose another expert. Quantized products may round activations as coarsely in float32.
_TOLERANCE, _COARSE_TOLERANCE = 1e-3, 0.1
# A deep model in 16 bits may amplify rounding beyond that. Then twice as much is allowed as one more rounding of each
# attention changes, but never so much that a wrong mask would pass: that gives differences of about 1.
_ULP, _MOST_ROUNDING = 2**-8, 0.5


def make_checked_backend(model: LoadedModel, config: EngineConfig) -> tuple[LoadedModel, AttentionBackend]:
    """The model's attention backend, compared with plain attention, alone and in the model.

    The model is returned as one that is not exact if its rows turn out to depend on each other. Raises ConfigError if
    the model cannot be served, or not with `exact=on`.
    """
    device = read_device(model.device)
    is_exact = config.exact == "on"
    # No row of ours depends on the batch.
    wanted = "triton" if is_exact and device.kind != "cpu" else config.attention_backend
    name = choose_backend(wanted, device, model.head_dim, model.dtype, model.attentions, model.kv_dtype)
    backend = make_backend(name, torch.get_num_threads(), model.max_model_len)
    check_attention(model, backend, config.block_size)
    check_model(replace(model, kv_dtype=model.dtype), backend, config.block_size)  # the model itself rounds no KV
    if model.is_exact and not has_independent_rows(model, backend, config.block_size):
        words = f"logits of {_name(model)} in {model.dtype} depend on the other rows of a step"
        if is_exact:
            raise ConfigError(f"exact=on cannot be kept: {words}; leave it off")
        logger.warning("%s, so last bits may differ between batches and workers, and nothing is drafted", words)
        model = replace(model, is_exact=False)
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # the checks' memory is the pool's
    logger.info("attention backend: %s", name)
    return model, backend


def check_model(model: LoadedModel, backend: AttentionBackend, block_size: int) -> None:
    """Raise ConfigError unless packed, chunked, paged logits equal those of each prompt alone in the plain model."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.vocab_size, (length,), generator=generator) for length in _LENGTHS]
    try:
        with _short_windows(model):
            paged = _paged_logits(model, backend, block_size, prompts)
            plain = _plain_logits(model, prompts)
            error = float(row_errors(paged, plain).median())
            is_right = error < tolerance(model) or error < min(2 * _rounding(model, prompts, plain), _MOST_ROUNDING)
    except FORWARD_ERRORS as exc:
        raise ConfigError(f"{_name(model)} cannot be served: {exc}") from exc
    if not is_right:
        raise ConfigError(
            f"{_name(model)} cannot be served: its paged logits differ from its own by {error:.2g} (relative), so it "
            "attends or mixes tokens in a way that this engine does not know"
        )


def has_independent_rows(model: LoadedModel, backend: AttentionBackend, block_size: int) -> bool:
    """Whether each prompt has the same logits alone as beside the others, bit for bit."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(model.vocab_size, (length,), generator=generator) for length in _LENGTHS]
    together = _paged_logits(model, backend, block_size, _TIMES * prompts, cuts=_TIMES * _CUTS)
    for row, prompt in enumerate(prompts):
        alone = _paged_logits(model, backend, block_size, [prompt], cuts=(len(prompt) - 1,))  # the last as in decoding
        if not torch.equal(alone[0], together[row]):
            return False
    return True


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative differences [n] of the rows of logits [n, vocab]."""
    actual, expected = actual.float(), expected.float()
    errors: Tensor = (actual - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-20)
    return errors


def tolerance(model: LoadedModel) -> float:
    """The largest relative difference of logits that rounding can make."""
    is_coarse = model.dtype is not torch.float32 or hasattr(model.module, "hf_quantizer")
    return _COARSE_TOLERANCE if is_coarse else _TOLERANCE


def _name(model: LoadedModel) -> str:
    return type(model.module).__name__


def _paged_logits(
    model: LoadedModel,
    backend: AttentionBackend,
    block_size: int,
    prompts: list[Tensor],
    cuts: tuple[int, ...] = _CUTS,
) -> Tensor:
    """Logits after each prompt, [n, vocab]: all prompts packed, in two steps, over a pool of their own."""
    num_blocks = [-(-len(prompt) // block_size) for prompt in prompts]
    shape = (sum(num_blocks), model.num_kv_heads, model.num_layers, 2, block_size, model.head_dim)
    runner = ModelRunner(model, backend, paged_view(torch.zeros(shape, dtype=model.kv_dtype, device=model.device)))
    free = list(range(shape[0]))
    first, second = [], []
    for prompt, cut, count in zip(prompts, cuts, num_blocks, strict=True):
        blocks, free = free[-count:], free[:-count]
        sampling = SamplingParams(max_tokens=1)
        sequence = Sequence(
            "", token_array(prompt.tolist()), len(prompt), sampling, root=b"", blocks=BlockTable(blocks)
        )
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


def _rounding(model: LoadedModel, prompts: list[Tensor], plain: Tensor) -> float:
    """How far the plain model's logits move if the output of each attention is rounded once more; 0 for float32."""
    if model.dtype is torch.float32:
        return 0.0
    generator = torch.Generator().manual_seed(1)

    def round_again(_: nn.Module, __: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        noise = (2 * torch.rand(output[0].shape, generator=generator) - 1) * _ULP
        return ((output[0].float() * (1 + noise.to(output[0].device))).to(output[0].dtype), *output[1:])

    modules = model.module.modules()
    attentions = [
        module for module in modules if hasattr(module, "layer_idx") and hasattr(module, "num_key_value_groups")
    ]
    with ExitStack() as hooks:
        for module in attentions:
            hooks.callback(module.register_forward_hook(round_again).remove)
        return float(row_errors(_plain_logits(model, prompts), plain).median())


@contextmanager
def _short_windows(model: LoadedModel) -> Iterator[None]:
    """Shorten the model's sliding window, in its config and in its layers, unless its context is shorter still."""
    text: Any = text_config(model.module.config)
    window = text.to_dict().get("sliding_window")
    if not isinstance(window, int) or not _WINDOW < window < model.max_model_len:
        yield
        return
    holders = [text, *(part for part in model.module.modules() if getattr(part, "sliding_window", None))]
    before = [holder.sliding_window for holder in holders]
    try:
        for holder in holders:
            holder.sliding_window += _WINDOW - window
        yield
    finally:
        for holder, value in zip(holders, before, strict=True):
            holder.sliding_window = value
