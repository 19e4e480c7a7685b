"""The contract of a block store, which holds the bytes of a tier. `tier.py` decides which blocks stay.

A store knows blocks of one size by name. Its calls may block, and several I/O threads make them at once. It never
raises for failures of its medium: a block that cannot be read for any reason is a miss and will be computed again.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tandem.protocol.digest import DIGEST_BYTES

Block: TypeAlias = npt.NDArray[np.uint8]  # [block_bytes], contiguous; `Tensor.numpy()` shares a host tensor's memory


class BlockName(NamedTuple):
    """The name under which a block is stored. With the parent in it, a listing is enough to rebuild the chains."""

    digest: bytes
    parent: bytes | None  # digest of the block before it; None for the first block of a chain


class StoreFailure(enum.Enum):
    """Why a block was not read or written. After the first two the block is gone."""

    ABSENT = "absent"
    CORRUPT = "corrupt"  # unreadable or not what was written; the store has deleted it if it was ours
    FULL = "full"
    OCCUPIED = "occupied"  # something that is not ours is in the block's place
    UNREACHABLE = "unreachable"  # the store itself does not work, so other blocks would fail too


class BlockStore(abc.ABC):
    """Blocks of `block_bytes` bytes by name. Blocks are immutable: one name always means the same bytes."""

    is_instant = False  # a write is only a copy in memory, so passing it to another thread would take longer

    def __init__(self, block_bytes: int) -> None:
        assert block_bytes > 0, f"block_bytes={block_bytes}"
        self.block_bytes = block_bytes

    @abc.abstractmethod
    def read(self, name: BlockName, scratch: Block) -> Block | StoreFailure:
        """The block's bytes, exactly as they were written: in the caller's `scratch`, or where the store holds them.

        The caller only reads them, before it uses `scratch` again and before the block can be deleted.
        """

    @abc.abstractmethod
    def write(self, name: BlockName, data: Block) -> StoreFailure | None:
        """Keep a copy of the block, whole or not at all. An existing block is left as it is."""

    @abc.abstractmethod
    def delete(self, name: BlockName) -> StoreFailure | None:
        """Delete the block, if it exists. Returns `UNREACHABLE` if deleting others would fail too."""

    @abc.abstractmethod
    def scan(self) -> Sequence[BlockName] | StoreFailure:
        """Names of all stored blocks, without reading their bytes. About oldest first: clocks are coarse."""

    def close(self) -> None:  # noqa: B027  (most stores have nothing to release)
        """Release the store's resources; persistent blocks stay. Called when no thread uses the store."""


def file_name(name: BlockName) -> str:
    """Name of the block's file or object, without a folder."""
    return f"{name.digest.hex()}-{(name.parent or b'').hex()}"


def parents_first(names: Sequence[BlockName]) -> list[BlockName]:
    """The same names in the same order, but none before its parent; each once, also where parents form a circle."""
    waiting = {name.digest: name for name in names}
    ordered: list[BlockName] = []
    for name in names:
        chain: list[BlockName] = []
        ancestor = waiting.pop(name.digest, None)
        while ancestor is not None:
            chain.append(ancestor)
            ancestor = None if ancestor.parent is None else waiting.pop(ancestor.parent, None)
        ordered += reversed(chain)
    return ordered


def parse_file_name(text: str) -> BlockName | None:
    """The block of that file or object; None if `file_name` did not make the name."""
    try:
        digest, parent = map(bytes.fromhex, text.split("-"))
    except ValueError:
        return None
    name = BlockName(digest, parent or None)
    is_made_by_us = len(digest) == DIGEST_BYTES and len(parent) in (0, DIGEST_BYTES) and file_name(name) == text
    return name if is_made_by_us else None
