"""Ends numbers of JSON that have no end: a model that is unsure may write digits until its tokens are used up.

llguidance has no bound for the digits of a number. So after many in a row the mask allows no more of them, if the
output is within a number and the grammar allows something else. Like a matcher, this depends on the output alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import llguidance
import numpy as np

__all__ = ["NumberTokens", "TokenMask", "mask_without", "writes_json"]

TokenMask = np.ndarray[Any, Any]  # [ceil(vocab / 32)], int32; bit i of word w allows token 32 w + i

MAX_DIGITS = 100  # in a row: an integer of 256 bits has 78, and no float needs more than 17
_DIGITS = re.compile(r"([0-9]+)|<0x3[0-9]>")  # in vocabularies of all kinds; the latter is one byte
_SCHEMA = re.compile(r'"json_schema": ?\{|%json ')
_OUTSIDE_NUMBERS = ('"', "a")  # one of them may come next within every string


class NumberTokens:
    """The tokens of one vocabulary that continue a run of digits."""

    def __init__(self, vocab: Mapping[str, int], vocab_size: int, tokenizer: llguidance.LLTokenizer) -> None:
        found = ((i, _DIGITS.fullmatch(name)) for name, i in vocab.items() if i < vocab_size)
        self._num_digits = {i: len(match[1] or "0") for i, match in found if match is not None}
        self._no_digits = mask_without(vocab_size, self._num_digits)
        self._outside = [tokenizer.tokenize_str(text)[0] for text in _OUTSIDE_NUMBERS]

    def run_after(self, run: int, token_ids: Iterable[int]) -> int:
        """Digits in a row at the end of an output that ended with `run` of them before these tokens."""
        for token_id in token_ids:
            num_digits = self._num_digits.get(token_id, 0)
            run = run + num_digits if num_digits else 0
        return run

    def end_number(self, mask: TokenMask, run: int) -> None:
        """Take the digits out of a mask after a run of them that is too long, if it is in a number that may end."""
        if run < MAX_DIGITS or any(mask[i // 32] >> (i % 32) & 1 for i in self._outside):
            return
        without = mask & self._no_digits
        if without.any():
            mask[:] = without


def writes_json(grammar: str) -> bool:
    """Whether a grammar in llguidance's form has JSON of a schema in it."""
    return _SCHEMA.search(grammar) is not None


def mask_without(vocab_size: int, token_ids: Iterable[int]) -> TokenMask:
    """A mask that allows all tokens but these."""
    allowed = np.ones(-(-vocab_size // 32) * 32, dtype=np.uint8)
    allowed[list(token_ids)] = 0
    return np.packbits(allowed, bitorder="little").view(np.int32)
