"""Random draws that depend only on (seed, token position), so that workers need not pass on a generator's state.

The generator is Philox4x32-10 (Salmon et al., 2011): the key is the seed, the counter is the position. It uses integer
arithmetic on 32-bit words alone, so numpy, torch on any device and Triton (`tl.philox`) give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
_WORD = 0xFFFFFFFF
_FEW = 16  # for up to 16 rows, ints take less time than numpy's calls

Words = TypeVar("Words", int, np.ndarray[Any, Any], Tensor)


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four words of random bits for each counter and key.

    Words are ints, or int64 arrays or tensors of numbers below 2^32. A product that exceeds 64 bits wraps around, and
    then has the right bits.
    """
    a, b, c, d = counter
    key_0, key_1 = key
    for _ in range(_NUM_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = ((right >> 32) & _WORD) ^ b ^ key_0, right & _WORD
        c, d = ((left >> 32) & _WORD) ^ d ^ key_1, left & _WORD
        key_0, key_1 = (key_0 + _KEY_STEPS[0]) & _WORD, (key_1 + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


def uniform_draw(seed: int, position: int) -> float:
    """A number in [0, 1) for the output token at `position`, the same in every process: 53 random bits."""
    return _uniform(seed, position)  # type: ignore[no-any-return]


def uniform_draws(seeds: Sequence[int], positions: Sequence[int]) -> list[float]:
    """`uniform_draw` of several rows."""
    if len(seeds) <= _FEW:
        return list(map(uniform_draw, seeds, positions))
    draws: list[float] = _uniform(
        np.array(seeds, dtype=np.uint64).view(np.int64), np.array(positions, dtype=np.int64)
    ).tolist()
    return draws


def _uniform(seed: Words, position: Words) -> Any:
    """Of one row as ints, or of several as int64 arrays."""
    zero = 0 * position
    high, low, *_ = philox((position & _WORD, position >> 32 & _WORD, zero, zero), (seed & _WORD, seed >> 32 & _WORD))
    return ((high >> 5 << 26) + (low >> 6)) / (1 << 53)
