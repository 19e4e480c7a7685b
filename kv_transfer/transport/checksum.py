"""Checksums of blocks and notifications in transit. They catch torn, stale and flipped bytes, not an adversary."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import torch
import xxhash
from torch import Tensor

from tandem.kv_transfer.transport.beside_steps import beside_steps
from tandem.kv_transfer.transport.shards import shards_of

_CHECKSUM_BYTES = 8
_HOST, _DEVICE = b"h", b"d"
_SLAB_BYTES = 64 << 20  # bytes of blocks whose words a device widens at a time


def block_checksums(shards: Tensor | Sequence[Tensor], block_ids: Sequence[int]) -> list[bytes]:
    """One checksum per block.

    In host memory it is XXH3, which reads as fast as memory is copied (12 GB/s on one core here) and releases the
    interpreter lock. On a GPU, where copying the bytes to the host would cost more than sending them, it is a weighted
    sum that the device computes. A checksum names its kind, so both kinds of pool can check either.

    The blocks must be in memory: a GPU computes the sums beside the launched steps, not after them.

    shards: the pool, or its shards, each [num_blocks, ...] and contiguous; a block is its parts of them, in order
    """
    shards = shards_of(shards)
    kind = _DEVICE if shards[0].is_cuda else _HOST
    return [kind + digest for digest in _DIGESTS[kind](shards, list(block_ids))]


def wrong_blocks(shards: Tensor | Sequence[Tensor], block_ids: Sequence[int], checksums: Sequence[bytes]) -> list[int]:
    """The blocks whose bytes do not match their checksum; b"" is not checked.

    All of `block_ids` if the number of checksums differs.
    """
    if len(checksums) != len(block_ids):
        return list(block_ids)
    pairs = [(block, checksum) for block, checksum in zip(block_ids, checksums, strict=True) if checksum]
    right = set()
    for kind, digests_of in _DIGESTS.items():
        of_kind = [(block, checksum) for block, checksum in pairs if checksum[:1] == kind]
        if not of_kind:
            continue
        digests = digests_of(shards_of(shards), [block for block, _ in of_kind])
        right |= {pair for pair, digest in zip(of_kind, digests, strict=True) if pair[1] == kind + digest}
    return [block for block, checksum in pairs if (block, checksum) not in right]


def append_checksum(message: bytes) -> bytes:
    """The message followed by its 64-bit XXH3.

    TCP checks control messages, but notifications travel with the transport's blocks. A flipped bit could change the
    first token or the generation, which no checksum of a block would show.
    """
    return message + xxhash.xxh3_64_digest(message)


def strip_checksum(sealed: bytes) -> bytes | None:
    """The message before its checksum, or None if they do not match."""
    message, checksum = sealed[:-_CHECKSUM_BYTES], sealed[-_CHECKSUM_BYTES:]
    return message if checksum == xxhash.xxh3_64_digest(message) else None


def _host_digests(shards: Sequence[Tensor], block_ids: list[int]) -> list[bytes]:
    if not block_ids:
        return []
    if shards[0].is_cuda:
        shards, block_ids = [_to_host(shard, block_ids) for shard in shards], list(range(len(block_ids)))
    parts = [shard.flatten(1).view(torch.uint8).numpy() for shard in shards]
    if len(parts) == 1:
        return [xxhash.xxh3_64_digest(parts[0][block].data) for block in block_ids]
    return [_digest_of([part[block].data for part in parts]) for block in block_ids]


def _digest_of(parts: Sequence[memoryview]) -> bytes:
    """The digest of the parts, end to end."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.digest()


def _to_host(shard: Tensor, block_ids: list[int]) -> Tensor:
    with beside_steps(shard.device):
        return shard[block_ids].cpu()


def _device_digests(shards: Sequence[Tensor], block_ids: list[int]) -> list[bytes]:
    """Sums of 32-bit words times odd weights, modulo 2^64. Any flipped bit and any swapped words change them."""
    widths = [shard[0].numel() * shard.element_size() // 4 for shard in shards]
    firsts = itertools.accumulate(widths, initial=0)
    sums = [_weighted_sums(shard, block_ids, first, sum(widths)) for shard, first in zip(shards, firsts, strict=False)]
    return [(sum(parts) % (1 << 64)).to_bytes(8, "little") for parts in zip(*sums, strict=True)]


def _weighted_sums(shard: Tensor, block_ids: list[int], first_word: int, num_words: int) -> list[int]:
    """Each block's sum over this shard, whose part of the block's `num_words` words begins at `first_word`."""
    rows = shard.flatten(1).view(torch.int32)
    per_slab = max(_SLAB_BYTES // (4 * rows.shape[1]), 1)
    slabs = [block_ids[start : start + per_slab] for start in range(0, len(block_ids), per_slab)]
    with beside_steps(shard.device):
        weights = _weights(num_words, shard.device)[first_word : first_word + rows.shape[1]]
        sums = [(rows[slab].to(torch.int64) * weights).sum(dim=1) for slab in slabs]
        return [total for part in sums for total in part.tolist()]


@cache
def _weights(num_words: int, device: torch.device) -> Tensor:
    """Odd numbers drawn from a fixed seed: [num_words], int64."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 62), 1 << 62, (num_words,), generator=generator).mul(2).add(1).to(device)


_DIGESTS = {_HOST: _host_digests, _DEVICE: _device_digests}
