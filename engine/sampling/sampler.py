"""Turns logits into tokens: penalties, temperature, top-k, top-p, min-p, seeded draws, log probabilities.

All rows of a step are sampled together and read back once. A row's token never depends on the rest of the batch.

Every row gives a token, whatever its logits and parameters are: if no probability is left (an infinite logit, nan,
every token banned), the most likely token is taken. If a row still raises, the exception is returned in its
place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import repeat

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from tandem.engine.device import outcome_on_device, to_device, to_host
from tandem.engine.number_tokens import TokenMask
from tandem.engine.sampling.distribution import adjust, choose, most_likely
from tandem.engine.sampling.draw import uniform_draws
from tandem.engine.sampling.logprobs import MIN_LOGPROB, RowLogprobs, slabs
from tandem.engine.sampling.prompt_scoring import LaunchedScores, split_logits
from tandem.engine.sampling.row_plan import NO_EDITS, RowPlan, plan_of, plan_row
from tandem.engine.sequence import ScheduledChunk, Sequence
from tandem.protocol.messages import TokenLogprobs

_NO_MASKS: Mapping[Sequence, Seq[TokenMask] | Exception] = {}
_NO_DRAFTS: Mapping[Sequence, tuple[int, ...]] = {}

SamplePlan = RowPlan | Exception | None  # of a row; None = the most likely token and no more


class SampledToken(msgspec.Struct, frozen=True):
    """The chosen token and, if asked for, log probabilities of the model's own distribution."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    is_on_device: bool = True  # False if the host chose it: `LaunchedSample.token_ids` has another one


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples next tokens. `eos_token_ids` are banned while a sequence is under its min_tokens."""

    eos_token_ids: frozenset[int]

    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[SampledToken | Exception]:
        """logits: [n, vocab], row i for sequence i. Returns n tokens in order; an exception for a row that raised."""
        return self.launch(logits, self.plan(sequences, logits.shape[1])).read()

    def plan(
        self,
        sequences: Seq[Sequence],
        vocab_size: int,
        masks: Mapping[Sequence, Seq[TokenMask] | Exception] = _NO_MASKS,
        drafts: Mapping[Sequence, tuple[int, ...]] = _NO_DRAFTS,
    ) -> list[SamplePlan]:
        """Plan on the host how each sequence's next token is sampled, and one more behind each token of its draft.

        `masks`: of the sequences with a grammar, behind each leading part of their draft, as far as they are known.
        """
        rows = list(_rows_of(sequences, drafts))
        plans = outcome_on_device(self._plan_rows, rows, vocab_size, masks)
        if isinstance(plans, list):
            return plans
        alone = [outcome_on_device(self._plan_rows, [row], vocab_size, masks) for row in rows]
        return [plan if isinstance(plan, Exception) else plan[0] for plan in alone]

    @torch.inference_mode()
    def launch(self, logits: Tensor, plans: Seq[SamplePlan], rows: list[int] | None = None) -> LaunchedSample:
        """The device's part, which is not waited for. A device that is lost raises, for all rows.

        `rows` are those of the logits for the plans, if several plans have one row. None: one plan for each row.
        """
        if rows is not None:
            logits = logits[_index_of(rows, logits.device)]
        launched = LaunchedSample(logits, plans)
        planned = [row for row, plan in enumerate(plans) if isinstance(plan, RowPlan)]
        for rows in slabs(planned, logits):
            launched.add(logits, rows, plans)
        return launched

    @torch.inference_mode()
    def score(self, logits: Tensor, chunks: list[ScheduledChunk]) -> tuple[LaunchedScores, Tensor]:
        """Scores of the prompt tokens that the chunks score, not waited for, and the logits of those that sample."""
        sampled, scored = split_logits(logits, chunks)
        return LaunchedScores(scored), sampled

    def _plan_rows(
        self,
        rows: list[tuple[Sequence, tuple[int, ...]]],
        vocab_size: int,
        masks: Mapping[Sequence, Seq[TokenMask] | Exception],
    ) -> list[SamplePlan]:
        """Plan the next token of each sequence behind a draft. Raises what one of them raises."""
        requests = [plan_of(sequence) for sequence, _ in rows]
        draws: Iterable[float] = repeat(0.0)
        if any(request.temperature for request in requests):
            positions = [sequence.num_output_tokens + len(draft) for sequence, draft in rows]
            draws = uniform_draws([request.sampling.seed for request in requests], positions)
        return [
            None
            if request.is_plain_greedy and sequence.num_output_tokens + len(draft) >= request.sampling.min_tokens
            else plan_row(sequence, vocab_size, self.eos_token_ids, draw, _mask_of(sequence, draft, masks), draft)
            for request, (sequence, draft), draw in zip(requests, rows, draws, strict=False)
        ]


class LaunchedSample:
    """The tokens of a step, which the device may still compute.

    token_ids: [n], int64, on the device. Where a row's final token is not among them, `SampledToken` says so.
    """

    def __init__(self, logits: Tensor, plans: Seq[SamplePlan]) -> None:
        """Choose the tokens of plain greedy rows; `add` those of the others."""
        self._found: dict[int, SampledToken | Exception] = {
            row: plan for row, plan in enumerate(plans) if isinstance(plan, Exception)
        }
        has_greedy = None in plans
        self.token_ids = most_likely(logits) if has_greedy else logits.new_zeros(len(plans), dtype=torch.int64)
        self._greedy = to_host(self.token_ids) if has_greedy else None
        self._num_rows = len(plans)
        self._slabs: list[_Slab] = []

    def add(self, logits: Tensor, rows: list[int], plans: Seq[SamplePlan]) -> None:
        """Sample these rows; if that raises, each of them alone."""
        slab = outcome_on_device(_Slab, logits, rows, [plans[row] for row in rows])
        if isinstance(slab, _Slab):
            self._slabs.append(slab)
            self.token_ids[_index_of(rows, logits.device)] = slab.token_ids
            if not logits.is_cuda:  # it is done: the next slab gets its memory
                self._read_slabs()
        elif len(rows) == 1:
            self._found[rows[0]] = slab
        else:
            for row in rows:
                self.add(logits, [row], plans)

    def read(self) -> list[SampledToken | Exception]:
        """The tokens of all rows in order. Waits if the device is not done."""
        self._read_slabs()
        greedy = [0] * self._num_rows if self._greedy is None else self._greedy.tolist()  # sync: token ids to host
        tokens: list[SampledToken | Exception] = list(map(SampledToken, greedy))
        for row, token in self._found.items():
            tokens[row] = token
        return tokens

    def _read_slabs(self) -> None:
        for slab in self._slabs:
            self._found.update(slab.read())
        self._slabs.clear()


class _TopLogprobs:
    """Log probabilities of the rows of a slab that ask for them."""

    def __init__(self, raw: Tensor, plans: list[RowPlan], token_ids: Tensor) -> None:
        rows = [row for row, plan in enumerate(plans) if plan.request.num_logprobs is not None]
        self._place = {row: place for place, row in enumerate(rows)}
        index = _index_of(rows, raw.device)
        self._logprobs = RowLogprobs(
            raw[index], token_ids[index], max(plan.request.num_logprobs or 0 for plan in plans)
        )

    def read(self, row: int, num_top: int, token_id: int, *, is_first_choice: bool) -> TokenLogprobs:
        """Log probabilities of one row. `is_first_choice`: its token is the one that the device chose."""
        place = self._place[row]
        values, ids = self._logprobs.top(place, num_top)
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        logprob = self._logprobs.chosen(place) if is_first_choice else self._logprobs.other(place, token_id)
        return TokenLogprobs(token_id, _finite(logprob), [(top_id, _finite(value)) for top_id, value in pairs])


class _Slab:
    """Rows that are sampled together."""

    def __init__(self, logits: Tensor, rows: list[int], plans: list[RowPlan]) -> None:
        self._rows, self._plans = rows, plans
        self._raw = logits[_index_of(rows, logits.device)].float()
        self._adjusted = adjust(self._raw, plans)
        choice = choose(self._adjusted, plans)
        self.token_ids = choice.token_ids
        self._token_ids, self._is_final = to_host(choice.token_ids), to_host(choice.is_final)
        has_logprobs = any(plan.request.num_logprobs is not None for plan in plans)
        self._logprobs = _TopLogprobs(self._raw, plans, choice.token_ids) if has_logprobs else None

    def read(self) -> Iterator[tuple[int, SampledToken | Exception]]:
        """(row, token) of all rows; an exception for a row that raises."""
        token_ids, is_final = self._token_ids.tolist(), self._is_final.tolist()  # sync: token ids to host
        if self._logprobs is None and all(is_final):
            yield from zip(self._rows, map(SampledToken, token_ids), strict=True)
            return
        for i, row in enumerate(self._rows):
            yield row, outcome_on_device(self._token, i, token_ids[i] if is_final[i] else None)

    def _token(self, i: int, first_choice: int | None) -> SampledToken:
        token_id = self._choose_again(i) if first_choice is None else first_choice
        num_top = self._plans[i].request.num_logprobs
        is_first_choice = first_choice is not None
        if self._logprobs is None or num_top is None:
            return SampledToken(token_id, None, is_first_choice)
        logprobs = self._logprobs.read(i, num_top, token_id, is_first_choice=is_first_choice)
        return SampledToken(token_id, logprobs, is_first_choice)

    def _choose_again(self, i: int) -> int:
        """The token of a row with a flat distribution, or with none."""
        choice = choose(self._adjusted[i : i + 1], self._plans[i : i + 1], is_exhaustive=True)
        is_final = bool(choice.is_final)  # sync: a rare row
        return int(choice.token_ids) if is_final else _last_resort(self._adjusted[i], self._raw[i], self._plans[i])


def _index_of(rows: list[int], device: torch.device) -> slice | Tensor:
    """An index of these rows, in ascending order, for the first axis: a slice, which copies nothing, if they adjoin."""
    if rows == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return to_device(np.array(rows), device)


def _rows_of(
    sequences: Seq[Sequence], drafts: Mapping[Sequence, tuple[int, ...]]
) -> Iterator[tuple[Sequence, tuple[int, ...]]]:
    """Each sequence with each leading part of its draft, the empty one first."""
    for sequence in sequences:
        draft = drafts.get(sequence, ())
        for num in range(1 + len(draft)):
            yield sequence, draft[:num]


def _mask_of(
    sequence: Sequence, draft: tuple[int, ...], masks: Mapping[Sequence, Seq[TokenMask] | Exception]
) -> TokenMask | None:
    found = masks.get(sequence)
    if isinstance(found, Exception):
        raise found
    return None if found is None else found[len(draft)]


def _last_resort(logits: Tensor, raw: Tensor, plan: RowPlan) -> int:
    """The most likely token that is finite and not banned, else the most likely one of the model's own logits.

    A grammar holds in either case: at its end it may allow only tokens that `min_tokens` bans.
    """
    numbers = logits.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    token_id = int(numbers.argmax())
    if float(numbers[token_id]) > -torch.inf:
        return token_id
    return int(adjust(raw[None], [replace(plan, edits=NO_EDITS)])[0].argmax())


def _finite(logprob: float) -> float:
    """The log probability, or the smallest allowed one if it is -inf or nan."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
