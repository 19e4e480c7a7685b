"""Digests of prompts whose beginnings were seen before: a growing chat or a shared system prompt is hashed once."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.digest import TOKEN_BYTES, chain_digests, token_bytes

__all__ = ["DigestMemo"]

SEGMENT_TOKENS = 1024  # remembered as one; the rest of a prompt, shorter than this, is hashed each time
MAX_SEGMENTS = 2048  # in each of two generations; ~8 KB each with blocks of 16 tokens


class DigestMemo:
    """Remembers the digests of whole segments of prompts by what they follow and by their tokens.

    Looking a segment up takes a tenth of hashing it. Bounded: when the young generation is full it becomes the old
    one, and what the old one had is forgotten unless it was asked for meanwhile. May be used by several threads.
    """

    def __init__(self, *, max_segments: int = MAX_SEGMENTS) -> None:
        self._max_segments = max_segments
        self._young: dict[tuple[bytes, bytes], list[bytes]] = {}
        self._old: dict[tuple[bytes, bytes], list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def digests(self, root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        """As `block_digests`."""
        block_bytes = block_size * TOKEN_BYTES
        segment_bytes = max(SEGMENT_TOKENS // block_size, 1) * block_bytes
        data = token_bytes(token_ids)
        digests: list[bytes] = []
        parent, start = root, 0
        while start + segment_bytes <= len(data):
            digests += self._segment(parent, data[start : start + segment_bytes], block_bytes)
            parent, start = digests[-1], start + segment_bytes
        return digests + chain_digests(parent, data[start : len(data) // block_bytes * block_bytes], block_bytes)

    def _segment(self, parent: bytes, data: bytes, block_bytes: int) -> list[bytes]:
        key = (parent, data)
        digests = self._young.get(key)
        if digests is None:
            digests = self._old.get(key) or chain_digests(parent, data, block_bytes)
            if len(self._young) >= self._max_segments:
                self._young, self._old = {}, self._young
            self._young[key] = digests
        return digests
