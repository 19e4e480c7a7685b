"""Ends numbers of JSON that have no end: a model that is unsure may write digits until its tokens are used up.

llguidance has no bound for the length of a number. So after many characters of one the mask allows no more of them, if
the output is within a number and the grammar allows something else. Like a matcher, this depends on the output alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import llguidance
import numpy as np

TokenMask = np.ndarray[Any, Any]  # [ceil(vocab / 32)], int32; bit i of word w allows token 32 w + i

MAX_NUMBER_CHARS = 100  # an integer of 256 bits has 78 digits, and no float needs more than 17
# Tokens in vocabularies of all kinds; those after the bar are one byte.
_NUMBER = re.compile(r"([0-9.eE+-]+)|<0x(?:3[0-9]|2[BDE]|[46]5)>")
_SCHEMA = re.compile(r'"json_schema": ?\{|%json ')
_OUTSIDE_NUMBERS = ('"', "a")  # one of them may come next within every string


class NumberTokens:
    """The tokens of one vocabulary that continue a number."""

    def __init__(self, vocab: Mapping[str, int], vocab_size: int, tokenizer: llguidance.LLTokenizer) -> None:
        found = ((i, _NUMBER.fullmatch(name)) for name, i in vocab.items() if i < vocab_size)
        self._num_chars = {i: len(match[1] or "0") for i, match in found if match is not None}
        self._others = mask_without(vocab_size, self._num_chars)
        self._outside = [tokenizer.tokenize_str(text)[0] for text in _OUTSIDE_NUMBERS]

    def run_after(self, run: int, token_ids: Iterable[int]) -> int:
        """Characters of numbers in a row at the end of an output that ended with `run` of them before these tokens."""
        for token_id in token_ids:
            num_chars = self._num_chars.get(token_id, 0)
            run = run + num_chars if num_chars else 0
        return run

    def end_number(self, mask: TokenMask, run: int) -> None:
        """Take these tokens out of a mask after a run that is too long, if it is a number that may end."""
        if run < MAX_NUMBER_CHARS or any(mask[i // 32] >> (i % 32) & 1 for i in self._outside):
            return
        others = mask & self._others
        if others.any():
            mask[:] = others


def writes_json(grammar: str) -> bool:
    """Whether a grammar in llguidance's form has JSON of a schema in it."""
    return _SCHEMA.search(grammar) is not None


def mask_without(vocab_size: int, token_ids: Iterable[int]) -> TokenMask:
    """A mask that allows all tokens but these."""
    allowed = np.ones(-(-vocab_size // 32) * 32, dtype=np.uint8)
    allowed[list(token_ids)] = 0
    return np.packbits(allowed, bitorder="little").view(np.int32)
