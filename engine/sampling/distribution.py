"""The device's part of sampling: from logits of many rows to one token each. Tensors only; nothing is read back.

A row never depends on the other rows. Probabilities are added as integers, whose sums do not depend on an order, and
the most probable tokens are found by keys that are all different: equal probabilities are ordered by token id.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem.engine.device import to_device
from tandem.engine.number_tokens import TokenMask
from tandem.engine.sampling.request_plan import RequestPlan
from tandem.engine.sampling.row_plan import NO_EDITS, Edit, RowPlan

# Most nuclei are far smaller than this; only flat distributions need the full sort of the vocabulary.
_NUCLEUS_GUESS, _FEWEST = 512, 64
_GREEDY, _UNFILTERED = 0, -1  # in place of a number of candidates
_ONE = 1 << 44  # probability 1 as an integer: what rounding down loses of each token is far below float32's rounding
_LAST_ID = 0xFFFFFFFF


class Choice(NamedTuple):
    """Chosen tokens of m rows."""

    token_ids: Tensor  # [m], int64
    is_final: Tensor  # [m], bool; False if no probability is left, or if more of the nucleus must be looked at


class _Parameters(NamedTuple):
    """Parameters of m rows, each [m, 1] on the device."""

    temperature: Tensor  # float32
    top_k: Tensor | None  # float64, the vocabulary's size for those without; None if all are
    top_p: Tensor  # float64
    min_p: Tensor | None  # float32; None if no row has one
    draw: Tensor  # float64


def adjust(logits: Tensor, plans: Sequence[RowPlan]) -> Tensor:
    """Logits after penalties, bias, bans and grammars, in this order. logits: [m, vocab], float32, not changed."""
    if all(plan.mask is None and plan.edits is NO_EDITS for plan in plans):
        return logits
    masked = [row for row, plan in enumerate(plans) if plan.mask is not None]
    adjusted = logits.clone()
    flat = adjusted.view(-1)
    scaled, subtracted, added, banned = (_flatten([plan.edits[stage] for plan in plans], logits) for stage in range(4))
    if scaled is not None:
        values, penalties = flat[scaled[0]], scaled[1]
        flat[scaled[0]] = torch.where(values > 0, values / penalties, values * penalties)
    if subtracted is not None:
        flat[subtracted[0]] -= subtracted[1]
    if added is not None:
        flat[added[0]] += added[1]
    if banned is not None:
        flat[banned[0]] = banned[1]
    if masked:
        masks = np.stack([plan.mask for plan in plans if plan.mask is not None])
        rows = to_device(np.array(masked), logits.device)
        adjusted[rows] = adjusted[rows].add_(_penalties(masks, logits))
    return adjusted


def choose(logits: Tensor, plans: Sequence[RowPlan], *, is_exhaustive: bool = False) -> Choice:
    """A token for each row of adjusted logits [m, vocab], float32.

    Filters apply in the order temperature, top-k, top-p, min-p, each to what the previous one left. `is_exhaustive`
    looks at the whole vocabulary, so that only rows without any probability are not final.
    """
    groups: dict[int, list[int]] = {}
    for row, plan in enumerate(plans):
        groups.setdefault(_num_candidates(plan.request, logits.shape[1], is_exhaustive), []).append(row)
    if len(groups) == 1:
        return _choose_alike(logits, plans, next(iter(groups)))
    token_ids = torch.empty(len(plans), dtype=torch.int64, device=logits.device)
    is_final = torch.empty(len(plans), dtype=torch.bool, device=logits.device)
    for num_candidates, rows in groups.items():
        index = to_device(np.array(rows), logits.device)
        choice = _choose_alike(logits[index], [plans[row] for row in rows], num_candidates)
        token_ids[index], is_final[index] = choice
    return Choice(token_ids, is_final)


def top_values(values: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """The largest values of each row, largest first, and their columns; of equal ones the first column comes first.

    Which of the columns that equal the last value are found is arbitrary, unless `num` is all of them.

    values: [m, n], float32. Returns [m, num] twice.
    """
    if num == values.shape[1]:
        return _in_order(values, torch.arange(num, device=values.device))
    return _in_order(*values.topk(num))


def most_likely(logits: Tensor) -> Tensor:
    """[n, vocab] -> [n], int64: the first of the largest logits of each row, where nan is larger than all numbers.

    On a CPU numpy's argmax takes a fifteenth of the time of torch's, which has no vector instructions for it.
    """
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.tensor([_as_floats(row).argmax() for row in logits], dtype=torch.int64)


def _as_floats(row: Tensor) -> npt.NDArray[np.float32]:
    if row.dtype != torch.bfloat16:
        return row.float().numpy()
    return (row.view(torch.int16).numpy().astype(np.int32) << 16).view(np.float32)


def _penalties(masks: TokenMask, logits: Tensor) -> Tensor:
    """[k, vocab]: 0 for the tokens that the masks [k, words] allow, -inf for the others.

    On a CPU, looking up eight tokens at a time takes a quarter of what `masked_fill_` takes.
    """
    table = _penalties_of_byte(logits.device)
    index = to_device(masks.view(np.uint8), logits.device).long()
    return table[index].flatten(1)[:, : logits.shape[1]]


@functools.cache
def _penalties_of_byte(device: torch.device) -> Tensor:
    """[256, 8]: what each byte of a mask stands for."""
    allowed = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(bool)
    return torch.from_numpy(np.where(allowed, np.float32(0), np.float32(-np.inf))).to(device)


def _num_candidates(plan: RequestPlan, vocab_size: int, is_exhaustive: bool) -> int:
    """How many of the most probable tokens to look at: a multiple of what is expected. It depends on the row alone."""
    if plan.temperature == 0:
        return _GREEDY
    if plan.top_k == 0 and plan.top_p >= 1.0:
        return _UNFILTERED
    size = _NUCLEUS_GUESS if plan.top_k == 0 else max(_FEWEST, 1 << (2 * plan.top_k - 1).bit_length())
    return vocab_size if is_exhaustive else min(size, vocab_size)


def _choose_alike(logits: Tensor, plans: Sequence[RowPlan], num_candidates: int) -> Choice:
    if num_candidates == _GREEDY:
        token_ids = most_likely(logits)[:, None]
        return Choice(token_ids[:, 0], (logits.gather(1, token_ids) > -torch.inf)[:, 0])
    parameters = _parameters(plans, logits.shape[1], logits.device)
    largest = logits.amax(dim=-1, keepdim=True)
    probabilities = (logits - largest).div_(parameters.temperature).softmax(dim=-1)
    if num_candidates == _UNFILTERED:
        choice = _draw(_weights(probabilities), probabilities, None, parameters)
    else:
        choice = _draw_from_nucleus(probabilities, parameters, num_candidates)
    return Choice(choice.token_ids, choice.is_final & largest[:, 0].isfinite())


def _draw_from_nucleus(probabilities: Tensor, parameters: _Parameters, size: int) -> Choice:
    """Draw from the tokens that top-k and top-p leave, which are looked for among the `size` most probable ones."""
    kept, ids = top_values(probabilities, size)
    weights, ranks = _weights(kept), torch.arange(size, device=kept.device)
    # Of tokens as probable as the last one some may be missing. That matters unless they have no weight.
    is_known = (kept > kept[:, -1:]) | (weights == 0) | (size == probabilities.shape[1])
    top_k, top_p = parameters.top_k, parameters.top_p
    if top_k is None:
        weights *= is_known
        limit, is_enough = top_p * _ONE, is_known[:, -1:]
        is_enough = is_enough | (weights.sum(dim=-1, keepdim=True) >= limit)
    else:  # top-p applies to what top-k leaves
        is_out = ranks >= top_k
        weights *= is_known & ~is_out
        found, is_limited = weights.sum(dim=-1, keepdim=True), top_k < probabilities.shape[1]
        limit = top_p * torch.where(is_limited, found, _ONE)
        is_enough = (is_known | is_out).all(dim=-1, keepdim=True) | (~is_limited & (found >= limit))
    # A token is in if the tokens before it do not reach top_p; the first one always is.
    weights *= (weights.cumsum(dim=-1) - weights < limit) | (ranks == 0)
    choice = _draw(weights, kept, ids, parameters)
    return Choice(choice.token_ids, choice.is_final & is_enough[:, 0])


def _draw(weights: Tensor, probabilities: Tensor, ids: Tensor | None, parameters: _Parameters) -> Choice:
    """Invert the cumulative distribution of each row, after min-p. weights, probabilities, ids: [m, n]."""
    if parameters.min_p is not None:
        most = probabilities.amax(dim=-1, keepdim=True)
        weights.masked_fill_(probabilities < parameters.min_p * most, 0)
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = (parameters.draw * total.double()).long().minimum(total - 1)
    columns = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1)
    token_ids = columns if ids is None else ids.gather(1, columns)
    return Choice(token_ids[:, 0], total[:, 0] > 0)


def _weights(probabilities: Tensor) -> Tensor:
    """Probabilities as integers: exact, because scaling by a power of two is."""
    return (probabilities * float(_ONE)).long()


def _in_order(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sort by value, largest first, then by id. No two keys are equal, so there is one order."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    keys = (_mirrored(bits).long() << 32) | (_LAST_ID - ids)
    if keys.is_cuda:
        keys = keys.sort(dim=-1, descending=True).values
    else:  # torch takes fifteen times as long for a vocabulary
        keys = torch.from_numpy(np.sort(keys.neg_().numpy())).neg_()
    return _mirrored((keys >> 32).int()).view(torch.float32), _LAST_ID - (keys & _LAST_ID)


def _mirrored(bits: Tensor) -> Tensor:
    """The bits of float32 numbers as integers in the order of the numbers, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _parameters(plans: Sequence[RowPlan], vocab_size: int, device: torch.device) -> _Parameters:
    numbers = np.empty((5, len(plans), 1))
    numbers[:4, :, 0] = np.frombuffer(b"".join([plan.request.numbers for plan in plans])).reshape(-1, 4).T
    numbers[4, :, 0] = [plan.draw for plan in plans]
    has_top_k, has_min_p = any(plan.request.top_k for plan in plans), any(plan.request.min_p > 0 for plan in plans)
    if has_top_k:
        numbers[1, numbers[1] == 0] = vocab_size
    temperature, top_k, top_p, min_p, draw = to_device(numbers, device).unbind()
    return _Parameters(
        temperature.float(), top_k if has_top_k else None, top_p, min_p.float() if has_min_p else None, draw
    )


def _flatten(edits: Sequence[Edit | None], logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """One edit for all rows, laid end to end: positions in the flat logits [n], values [n]."""
    vocab = logits.shape[1]
    pairs = [(row, edit) for row, edit in enumerate(edits) if edit is not None]
    if not pairs:
        return None
    positions = np.concatenate([edit.ids + row * vocab for row, edit in pairs])
    values = np.concatenate([edit.values for _, edit in pairs])
    return to_device(positions, logits.device), to_device(values, logits.device)
