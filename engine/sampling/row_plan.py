"""What one row of a batch asks of the sampler, as numbers: the host's part of sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tandem.engine.number_tokens import TokenMask
from tandem.engine.sampling.draw import uniform_draw
from tandem.engine.sequence import Sequence

_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6

Array = np.ndarray[Any, Any]


class Edit(NamedTuple):
    """Logits of one row to change: different token ids, and a number for each."""

    ids: Array  # [n], int64
    values: Array  # [n], float32


Edits = tuple[Edit | None, Edit | None, Edit | None, Edit | None]  # scale, subtract, add, ban
NO_EDITS: Edits = (None, None, None, None)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row's parameters, made safe to compute with: the tensors' part of sampling raises for no value here."""

    temperature: float  # 0 = greedy
    top_k: int  # 0 = all
    top_p: float
    min_p: float
    draw: float  # in [0, 1)
    num_logprobs: int | None
    edits: Edits
    mask: TokenMask | None = None  # the tokens that a grammar allows


def plan_row(
    sequence: Sequence,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    mask: TokenMask | None = None,
    draft: Seq[int] = (),
) -> RowPlan:
    """The plan of a sequence's next token behind this draft. Raises IndexError for ids outside the vocabulary."""
    sampling = sequence.sampling
    temperature = sampling.temperature
    if temperature != 0:  # near 0 it means greedy, while 1e-40 would give inf - inf
        temperature = 0.0 if math.isnan(temperature) else min(max(temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)
    with np.errstate(all="ignore"):
        edits = (
            _scaled(sequence, draft),
            _subtracted(sequence, draft),
            _biased(sequence),
            _banned(sequence, eos_token_ids, len(draft)),
        )
    for edit in edits:
        if edit is not None and not (edit.ids.min() >= 0 and edit.ids.max() < vocab_size):
            raise IndexError(f"token ids {edit.ids.min()} to {edit.ids.max()}: the vocabulary has {vocab_size}")
    return RowPlan(
        temperature=temperature,
        top_k=min(max(sampling.top_k, 0), vocab_size),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        draw=uniform_draw(sampling.seed, sequence.num_output_tokens + len(draft)) if temperature > 0 else 0.0,
        num_logprobs=None if sampling.num_logprobs is None else min(max(sampling.num_logprobs, 0), vocab_size),
        edits=edits,
        mask=mask,
    )


def _scaled(sequence: Sequence, draft: Seq[int]) -> Edit | None:
    penalty = sequence.sampling.repetition_penalty
    if penalty == 1.0:
        return None
    if sequence.prompt_ids is None:  # sorting a long prompt for each token would take longer than the step
        sequence.prompt_ids = np.unique(np.array(sequence.token_ids[: sequence.num_prompt_tokens], dtype=np.int64))
    prompt_ids, others = sequence.prompt_ids, np.unique(np.array([*sequence.output_ids, *draft], dtype=np.int64))
    places = np.searchsorted(prompt_ids, others)
    is_new = prompt_ids[np.minimum(places, len(prompt_ids) - 1)] != others
    ids = np.concatenate([prompt_ids, others[is_new]])
    return Edit(ids, np.full(len(ids), penalty, dtype=np.float32))


def _subtracted(sequence: Sequence, draft: Seq[int]) -> Edit | None:
    sampling = sequence.sampling
    if not (sampling.frequency_penalty or sampling.presence_penalty):
        return None
    output = [*sequence.output_ids, *draft]
    if not output:
        return None
    ids, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
    penalties = sampling.frequency_penalty * counts + sampling.presence_penalty
    return Edit(ids, penalties.astype(np.float32))


def _biased(sequence: Sequence) -> Edit | None:
    """The request's logit_bias, made at its first token."""
    bias = sequence.sampling.logit_bias
    if bias and sequence.logit_bias is None:
        ids, values = np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float64)
        sequence.logit_bias = ids, values.astype(np.float32)
    return Edit(*sequence.logit_bias) if bias and sequence.logit_bias is not None else None


def _banned(sequence: Sequence, eos_token_ids: frozenset[int], num_drafted: int) -> Edit | None:
    sampling = sequence.sampling
    banned = eos_token_ids.union(sampling.stop_token_ids)
    if sequence.num_output_tokens + num_drafted >= sampling.min_tokens or not banned:
        return None
    ids = np.array(sorted(banned), dtype=np.int64)
    return Edit(ids, np.full(len(ids), -math.inf, dtype=np.float32))
