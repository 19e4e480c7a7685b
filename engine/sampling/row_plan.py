"""What one row of a batch asks of the sampler, as numbers: the host's part of sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tandem.engine.number_tokens import TokenMask
from tandem.engine.sampling.request_plan import RequestPlan, plan_request
from tandem.engine.sequence import Sequence

Array = np.ndarray[Any, Any]


class Edit(NamedTuple):
    """Logits of one row to change: different token ids, and a number for each."""

    ids: Array  # [n], int64
    values: Array  # [n], float32


Edits = tuple[Edit | None, Edit | None, Edit | None, Edit | None]  # scale, subtract, add, ban
NO_EDITS: Edits = (None, None, None, None)


class RowPlan(msgspec.Struct, frozen=True):
    """What one row of a batch asks."""

    request: RequestPlan
    draw: float  # in [0, 1)
    edits: Edits
    mask: TokenMask | None = None  # the tokens that a grammar allows


def plan_of(sequence: Sequence) -> RequestPlan:
    """The plan of a sequence's request, which is made once."""
    plan = sequence.request_plan
    if plan is None or plan.sampling is not sequence.sampling:
        plan = sequence.request_plan = plan_request(sequence.sampling)
    return plan


def plan_row(
    sequence: Sequence,
    vocab_size: int,
    eos_token_ids: frozenset[int],
    draw: float,
    mask: TokenMask | None = None,
    draft: Seq[int] = (),
) -> RowPlan:
    """The plan of a sequence's next token behind this draft. Raises IndexError for ids outside the vocabulary."""
    request = plan_of(sequence)
    has_enough = sequence.num_output_tokens + len(draft) >= request.sampling.min_tokens
    if has_enough and not request.is_edited:
        return RowPlan(request, draw, NO_EDITS, mask)
    with np.errstate(all="ignore"):
        edits = (
            _scaled(sequence, draft),
            _subtracted(sequence, draft),
            _biased(sequence),
            None if has_enough else _banned(sequence, eos_token_ids),
        )
    for edit in edits:
        if edit is not None and not (edit.ids.min() >= 0 and edit.ids.max() < vocab_size):
            raise IndexError(f"token ids {edit.ids.min()} to {edit.ids.max()}: the vocabulary has {vocab_size}")
    return RowPlan(request, draw, edits, mask)


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


def _banned(sequence: Sequence, eos_token_ids: frozenset[int]) -> Edit | None:
    banned = eos_token_ids.union(sequence.sampling.stop_token_ids)
    if not banned:
        return None
    ids = np.array(sorted(banned), dtype=np.int64)
    return Edit(ids, np.full(len(ids), -math.inf, dtype=np.float32))
