"""The contract of a block store: where the bytes of a tier lie. Which of them stay is decided above, in `tier.py`.

A store knows blocks of one size by name. It blocks, is called from several I/O threads at once, and never raises for
what the world does to it: a block that cannot be read, whatever the reason, is a miss and will be computed again.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tandem.protocol.digest import DIGEST_BYTES

__all__ = ["Block", "BlockName", "BlockStore", "StoreFailure", "file_name", "parse_file_name"]

Block: TypeAlias = npt.NDArray[np.uint8]  # [block_bytes], contiguous; `Tensor.numpy()` shares a host tensor's memory


class BlockName(NamedTuple):
    """What a block is stored under. The parent follows from the digest; with it a mere listing rebuilds the chains."""

    digest: bytes
    parent: bytes | None  # digest of the block before it; None for the first of a chain


class StoreFailure(enum.Enum):
    """Why a block was not read or written. The first two say that the block is not there any more."""

    ABSENT = "absent"
    CORRUPT = "corrupt"  # it cannot be read or is not what was written; the store has deleted it if it was ours
    FULL = "full"
    OCCUPIED = "occupied"  # something that is not ours is in the block's place
    UNREACHABLE = "unreachable"  # the store itself does not work: asking for other blocks now will not either


class BlockStore(abc.ABC):
    """Blocks of `block_bytes` bytes by name. Blocks are immutable: one name always means the same bytes."""

    is_instant = False  # a write is a copy in memory: handing it to another thread would take longer

    def __init__(self, block_bytes: int) -> None:
        assert block_bytes > 0, f"block_bytes={block_bytes}"
        self.block_bytes = block_bytes

    @abc.abstractmethod
    def read(self, name: BlockName, scratch: Block) -> Block | StoreFailure:
        """The block's bytes: in `scratch`, which is the caller's, or where the store holds them.

        They are the bytes that were written, or it is a failure. The caller only reads them, before `scratch` is used
        again and before it lets anyone delete the block.
        """

    @abc.abstractmethod
    def write(self, name: BlockName, data: Block) -> StoreFailure | None:
        """Keep a copy of the block: whole, or not at all. A block that is there already is left as it is."""

    @abc.abstractmethod
    def delete(self, name: BlockName) -> None:
        """Forget the block, if it is there."""

    @abc.abstractmethod
    def scan(self) -> Sequence[BlockName] | StoreFailure:
        """Names of all blocks that are there, oldest first, without looking at their bytes."""

    def close(self) -> None:  # noqa: B027  (most have nothing to let go of)
        """Let go of what the store holds; what is persistent stays. Called once no thread uses it any more."""


def file_name(name: BlockName) -> str:
    """Name of the block's file or object, without a folder."""
    return f"{name.digest.hex()}-{(name.parent or b'').hex()}"


def parse_file_name(text: str) -> BlockName | None:
    """The block of that file or object; None if its name was not made by `file_name`."""
    try:
        digest, parent = map(bytes.fromhex, text.split("-"))
    except ValueError:
        return None
    name = BlockName(digest, parent or None)
    is_made_by_us = len(digest) == DIGEST_BYTES and len(parent) in (0, DIGEST_BYTES) and file_name(name) == text
    return name if is_made_by_us else None
