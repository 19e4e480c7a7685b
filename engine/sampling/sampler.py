"""Turns logits into tokens: penalties, temperature, top-k, top-p, min-p, seeded draws, log probabilities.

All rows of a step are sampled together and read back once. A row's token never depends on the rest of the batch.

Every row gives a token, whatever its logits and parameters are: if no probability is left (an infinite logit, nan,
every token banned), the most likely token is taken. If a row raises all the same, the exception is returned in its
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from tandem.engine.device import to_device, to_host
from tandem.engine.sampling.distribution import adjust, choose, top_values
from tandem.engine.sampling.row_plan import RowPlan, plan_row
from tandem.engine.sequence import Sequence
from tandem.protocol.fault_boundary import outcome_of
from tandem.protocol.messages import TokenLogprobs

__all__ = ["LaunchedSample", "SampledToken", "Sampler"]

_MORE_CANDIDATES = 16  # than log probabilities are asked for: tokens may be equally likely
_MIN_LOGPROB = -9999.0  # stands for log(0), which JSON cannot express
# Float32 logits that are sampled together on a CPU, at least one row. Temporaries of this size come from memory that
# glibc has: with twice as many, fresh pages cost a fifth of the time. A GPU samples all rows at once.
_CPU_SLAB_BYTES = 1 << 19


T = TypeVar("T")


class SampledToken(NamedTuple):
    """The chosen token and, if asked for, log probabilities of the model's own distribution."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples next tokens. `eos_token_ids` are banned while a sequence is under its min_tokens."""

    eos_token_ids: frozenset[int]

    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[SampledToken | Exception]:
        """logits: [n, vocab], row i for sequence i. Returns n tokens in order; an exception for a row that raised."""
        return self.launch(logits, sequences).read()

    @torch.inference_mode()
    def launch(self, logits: Tensor, sequences: Seq[Sequence]) -> LaunchedSample:
        """`sample` without waiting for the device. A device that is lost raises, for all rows."""
        launched = LaunchedSample(len(sequences))
        plans: dict[int, RowPlan] = {}
        for row, sequence in enumerate(sequences):
            if _is_plain_greedy(sequence):
                continue
            plan = _outcome_of(self._plan, sequence, logits.shape[1])
            if isinstance(plan, Exception):
                launched.found[row] = plan
            else:
                plans[row] = plan
        if len(plans) + len(launched.found) < len(sequences):
            launched.greedy = to_host(logits.argmax(dim=-1))
        for rows in _slabs(list(plans), logits):
            launched.add(logits, rows, [plans[row] for row in rows])
        return launched

    def _plan(self, sequence: Sequence, vocab_size: int) -> RowPlan:
        return plan_row(sequence, vocab_size, self.eos_token_ids)


class LaunchedSample:
    """The tokens of a step, which the device may still compute."""

    def __init__(self, num_rows: int) -> None:
        self.found: dict[int, SampledToken | Exception] = {}  # by row
        self.greedy: Tensor | None = None  # [n], the most likely token of every row, for those that ask for no more
        self._num_rows = num_rows
        self._slabs: list[_Slab] = []

    def add(self, logits: Tensor, rows: list[int], plans: list[RowPlan]) -> None:
        """Sample these rows; if that raises, each of them alone."""
        slab = _outcome_of(_Slab, logits, rows, plans)
        if isinstance(slab, _Slab):
            self._slabs.append(slab)
            if not logits.is_cuda:  # it is done: the next slab gets its memory
                self._read_slabs()
        elif len(rows) == 1:
            self.found[rows[0]] = slab
        else:
            for row, plan in zip(rows, plans, strict=True):
                self.add(logits, [row], [plan])

    def read(self) -> list[SampledToken | Exception]:
        """The tokens of all rows in order. Waits if the device is not done."""
        self._read_slabs()
        greedy = [] if self.greedy is None else self.greedy.tolist()  # sync: token ids to host
        return [self.found.get(row) or SampledToken(greedy[row], None) for row in range(self._num_rows)]

    def _read_slabs(self) -> None:
        for slab in self._slabs:
            self.found.update(slab.read())
        self._slabs.clear()


class _Slab:
    """Rows that are sampled together, and those of them that want log probabilities."""

    def __init__(self, logits: Tensor, rows: list[int], plans: list[RowPlan]) -> None:
        self._rows, self._plans = rows, plans
        self._raw = _rows_of(logits, rows).float()
        self._adjusted = adjust(self._raw, plans)
        choice = choose(self._adjusted, plans)
        self._token_ids, self._is_final = to_host(choice.token_ids), to_host(choice.is_final)
        self._wanting = [i for i, plan in enumerate(plans) if plan.num_logprobs is not None]
        if self._wanting:
            self._logprobs = _rows_of(self._raw, self._wanting).log_softmax(dim=-1)
            chosen = _rows_of(choice.token_ids, self._wanting)
            self._chosen = to_host(self._logprobs.gather(1, chosen[:, None])[:, 0])
            num_top = max(plans[i].num_logprobs or 0 for i in self._wanting)
            num_candidates = min(2 * num_top + _MORE_CANDIDATES, self._logprobs.shape[1])
            values, ids = top_values(self._logprobs, num_candidates)
            self._top_values, self._top_ids = to_host(values), to_host(ids)

    def read(self) -> Iterator[tuple[int, SampledToken | Exception]]:
        """(row, token) of all rows."""
        token_ids, is_final = self._token_ids.tolist(), self._is_final.tolist()  # sync: token ids to host
        logprobs = dict(zip(self._wanting, self._read_logprobs(token_ids), strict=True)) if self._wanting else {}
        for i, row in enumerate(self._rows):
            if is_final[i]:
                yield row, SampledToken(token_ids[i], logprobs.get(i))
            else:
                yield row, _outcome_of(self._sample_again, i, logprobs.get(i))

    def _read_logprobs(self, token_ids: list[int]) -> Iterator[TokenLogprobs]:
        chosen, values, ids = self._chosen.tolist(), self._top_values.tolist(), self._top_ids.tolist()
        for position, i in enumerate(self._wanting):
            num = self._plans[i].num_logprobs or 0
            row_values, row_ids = values[position], ids[position]
            if 0 < num < len(row_values) and not row_values[num - 1] > row_values[-1]:
                # Others may be as likely as the last one: those with the lowest ids are listed.
                everything = top_values(self._logprobs[position : position + 1], self._logprobs.shape[1])
                row_values, row_ids = (part[0, :num].tolist() for part in everything)  # sync: a rare row
            top = [(token, _finite(value)) for token, value in zip(row_ids[:num], row_values[:num], strict=True)]
            yield TokenLogprobs(token_ids[i], _finite(chosen[position]), top)

    def _sample_again(self, i: int, logprobs: TokenLogprobs | None) -> SampledToken:
        """The token of a row with a flat distribution, or with none."""
        adjusted = self._adjusted[i : i + 1]
        choice = choose(adjusted, self._plans[i : i + 1], is_exhaustive=True)
        is_final = bool(choice.is_final)  # sync: a rare row
        token_id = int(choice.token_ids) if is_final else _last_resort(adjusted[0], self._raw[i])
        if logprobs is None:
            return SampledToken(token_id, None)
        logprob = float(self._logprobs[self._wanting.index(i), token_id])
        return SampledToken(token_id, TokenLogprobs(token_id, _finite(logprob), logprobs.top))


def _outcome_of(function: Callable[..., T], *arguments: object) -> T | Exception:
    """The result of a call, or its exception. Raises errors of the device: it is lost for every row."""
    outcome = outcome_of(function, *arguments)
    if isinstance(outcome, torch.AcceleratorError):
        raise outcome
    return outcome


def _slabs(rows: list[int], logits: Tensor) -> Iterator[list[int]]:
    size = len(rows) if logits.is_cuda else max(_CPU_SLAB_BYTES // (4 * logits.shape[1]), 1)
    for start in range(0, len(rows), max(size, 1)):
        yield rows[start : start + size]


def _rows_of(tensor: Tensor, rows: list[int]) -> Tensor:
    """These rows of a tensor, in ascending order: a view if they are consecutive."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return tensor[rows[0] : rows[-1] + 1]
    return tensor[to_device(np.array(rows), tensor.device)]


def _is_plain_greedy(sequence: Sequence) -> bool:
    sampling = sequence.sampling
    return (
        sampling.temperature == 0
        and sampling.num_logprobs is None
        and not sampling.logit_bias
        and sampling.repetition_penalty == 1.0
        and not (sampling.frequency_penalty or sampling.presence_penalty)
        and sequence.num_output_tokens >= sampling.min_tokens
    )


def _last_resort(logits: Tensor, raw: Tensor) -> int:
    """The most likely token that is finite and not banned, else the most likely one of the model's own logits."""
    numbers = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    token_id = int(numbers.argmax())
    return token_id if float(numbers[token_id]) > -torch.inf else int(raw.argmax())


def _finite(logprob: float) -> float:
    """The log probability, or the smallest allowed one if it is -inf or nan."""
    return logprob if logprob > _MIN_LOGPROB else _MIN_LOGPROB
