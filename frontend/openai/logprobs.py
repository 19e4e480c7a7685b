"""Log probabilities as text: of an answer's tokens, and of a prompt that is repeated before it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tandem.frontend.openai.answer_shapes import CompletionLogprobs
from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import PromptLogprobs
from tandem.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for -inf, which JSON cannot express
LONG_PROMPT = 4096  # log probabilities that take 5 ms to turn into text


class TokenEntry(NamedTuple):
    """Log probabilities of one token, as text. `offset` counts the characters of the answer before it."""

    text: str
    logprob: float
    top: list[tuple[str, float]]
    offset: int


def token_entry(
    tokenizer: Tokenizer, text: str, token_id: int, logprob: float, top: Sequence[tuple[int, float]], offset: int
) -> TokenEntry:
    """The entry of a token that has this text where it stands."""
    named = [(text if i == token_id else tokenizer.token_text(i), max(value, MIN_LOGPROB)) for i, value in top]
    return TokenEntry(text, max(logprob, MIN_LOGPROB), named, offset)


def completion_logprobs(entries: list[TokenEntry], num_top: int, first_offset: int = 0) -> CompletionLogprobs:
    """The `logprobs` of a completion whose answer begins at this offset of its text."""
    top_logprobs: list[dict[str, float] | None] = []
    for entry in entries:
        # Tokens may have equal texts (parts of characters): the likelier keeps the key. The chosen one is included.
        top: dict[str, float] = {}
        for text, logprob in [*entry.top[:num_top], (entry.text, entry.logprob)]:
            top.setdefault(text, logprob)
        top_logprobs.append(top)
    return CompletionLogprobs(
        tokens=[entry.text for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=top_logprobs,
        text_offset=[first_offset + entry.offset for entry in entries],
    )


def joined_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Those of two texts as those of the text that they make together."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


class ScoredPrompt:
    """The `logprobs` of a prompt that is repeated. Its first choice fills it, and the others show it too.

    The first token has no log probability, because nothing is before it. A special token that the repeated text leaves
    out (a BOS) is spelled in `tokens` and takes no room in the text.
    """

    def __init__(self, token_ids: list[int], text: str, num_top: int, tokenizer: Tokenizer) -> None:
        """`text` is the prompt as it is repeated."""
        self.logprobs = CompletionLogprobs([], [], [], [])
        self._token_ids = token_ids
        self._text = text
        self._num_top = num_top
        self._tokenizer = tokenizer

    async def fill(self, scores: PromptLogprobs | None) -> None:
        """Add the scores. Raises `WorkerError` if they are not those of this prompt."""
        if len(self._token_ids) * (1 + self._num_top) > LONG_PROMPT:
            await asyncio.to_thread(self._fill, scores)
        else:
            self._fill(scores)

    def _fill(self, scores: PromptLogprobs | None) -> None:
        rows = list(self._rows(scores))
        (first_text, first_offset), *pieces = self._pieces()
        entries = [
            token_entry(self._tokenizer, text, token_id, logprob, top, offset)
            for (text, offset), token_id, (logprob, top) in zip(pieces, self._token_ids[1:], rows, strict=True)
        ]
        first = CompletionLogprobs([first_text], [None], [None], [first_offset])
        self.logprobs = joined_logprobs(first, completion_logprobs(entries, self._num_top))

    def _rows(self, scores: PromptLogprobs | None) -> Iterator[tuple[float, list[tuple[int, float]]]]:
        """For each token but the first: its log probability and the likeliest tokens at its place."""
        num_rows, num_top = len(self._token_ids) - 1, self._num_top
        sizes = (0, 0, 0) if scores is None else tuple(map(len, (scores.chosen, scores.top_logprobs, scores.top_ids)))
        if scores is None or sizes != (4 * num_rows, 4 * num_rows * num_top, 4 * num_rows * num_top):
            raise WorkerError(f"The worker sent {sizes} bytes of scores for a prompt of {num_rows + 1} tokens.")
        chosen = struct.unpack(f"<{num_rows}f", scores.chosen)
        values = struct.unpack(f"<{num_rows * num_top}f", scores.top_logprobs)
        ids = struct.unpack(f"<{num_rows * num_top}I", scores.top_ids)
        for row, logprob in enumerate(chosen):
            place = slice(row * num_top, (row + 1) * num_top)
            yield logprob, list(zip(ids[place], values[place], strict=True))

    def _pieces(self) -> list[tuple[str, int]]:
        """Text of each token, and where it begins in the text that is repeated."""
        detokenizer = self._tokenizer.detokenizer(())
        pieces: list[tuple[str, int]] = []
        offset = 0
        for token_id in self._token_ids:
            is_special = token_id in self._tokenizer.special_ids
            text = self._tokenizer.decode([token_id]) if is_special else detokenizer.push([token_id])
            pieces.append((text, offset))
            if not is_special or self._text.startswith(text, offset):
                offset = min(offset + len(text), len(self._text))
        if tail := detokenizer.flush():
            pieces[-1] = (pieces[-1][0] + tail, pieces[-1][1])
        return pieces
