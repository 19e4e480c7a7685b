"""Random draws that depend only on (seed, token position), so that workers need not pass on a generator's state."""

from __future__ import annotations

import hashlib
import struct

__all__ = ["uniform_draw"]


def uniform_draw(seed: int, position: int) -> float:
    """A number in [0, 1) for the output token at `position`, the same in every process."""
    counter = struct.pack("<QQ", seed & 0xFFFFFFFFFFFFFFFF, position)
    word = hashlib.blake2b(counter, digest_size=8, key=b"tandem.draw.v1").digest()
    return (int.from_bytes(word, "little") >> 11) / (1 << 53)
