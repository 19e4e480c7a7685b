"""Scores prompts: log probabilities of their tokens, from the logits of a step. Like sampling, it waits for nothing."""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tandem.engine.device import outcome_on_device, to_device
from tandem.engine.prompt_scores import ScorePiece
from tandem.engine.sampling.logprobs import MIN_LOGPROB, RowLogprobs, slabs
from tandem.engine.sequence import ScheduledChunk, Sequence


class ScoredRows(NamedTuple):
    """Logits that score consecutive tokens of a prompt."""

    sequence: Sequence
    logits: Tensor  # [n, vocab]
    token_ids: array[int]  # [n]; each follows the token whose logits these are


def split_logits(logits: Tensor, chunks: list[ScheduledChunk]) -> tuple[Tensor, list[ScoredRows]]:
    """The logits of a step's chunks as (rows to sample from, rows of prompts), each in the order of the chunks."""
    sampled: list[int] = []
    scored: list[ScoredRows] = []
    end = 0
    for chunk in chunks:
        first, end = end, end + chunk.num_logits
        if chunk.num_scored:
            # The logits of token i score token i + 1. If the chunk samples, its last row has no token to score. Only an
            # answer is drafted, and only a prompt is scored.
            place = chunk.start + chunk.num_tokens - chunk.num_logits + 1
            token_ids = chunk.sequence.token_ids[place : place + chunk.num_scored]
            scored.append(ScoredRows(chunk.sequence, logits[first : first + chunk.num_scored], token_ids))
        sampled += range(end - chunk.num_sampled, end)
    return logits[to_device(np.array(sampled, dtype=np.int64), logits.device)], scored


class LaunchedScores:
    """The scores of a step, which the device may still compute."""

    def __init__(self, scored: list[ScoredRows]) -> None:
        self._scored: list[tuple[Sequence, _Scores | Exception]] = []
        for rows in scored:
            self._scored.append((rows.sequence, outcome_on_device(_Scores, rows)))

    def read(self) -> list[tuple[Sequence, ScorePiece | Exception]]:
        """By sequence, in order; an exception for one that raised. Waits if the device is not done."""
        return [
            (sequence, scores if isinstance(scores, Exception) else outcome_on_device(scores.read))
            for sequence, scores in self._scored
        ]


class _Scores:
    """The scores of one chunk."""

    def __init__(self, rows: ScoredRows) -> None:
        scores = rows.sequence.prompt_scores
        assert scores is not None, f"request {rows.sequence.request_id} asked for no scores"
        token_ids = to_device(np.array(rows.token_ids, dtype=np.int64), rows.logits.device)
        self._num_top = min(scores.num_top, rows.logits.shape[1])
        self._slabs: list[RowLogprobs] = []
        self._pieces: list[ScorePiece] = []
        for part in slabs(range(len(rows.logits)), rows.logits):
            span = slice(part.start, part.stop)
            self._slabs.append(RowLogprobs(rows.logits[span].float(), token_ids[span], self._num_top))
            if not rows.logits.is_cuda:  # it is done: the next slab gets its memory
                self._read_slabs()

    def read(self) -> ScorePiece:
        """The scores on the host."""
        self._read_slabs()
        return ScorePiece(*map(np.concatenate, zip(*self._pieces, strict=True)))

    def _read_slabs(self) -> None:
        for slab in self._slabs:
            chosen, values, ids = (one.numpy() for one in slab.rows(self._num_top))  # sync: scores to host
            self._pieces.append(ScorePiece(_finite(chosen), _finite(values), ids))
        self._slabs.clear()


def _finite(
    logprobs: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The smallest allowed value in place of -inf and nan."""
    return np.where(logprobs > MIN_LOGPROB, logprobs, np.float32(MIN_LOGPROB))
