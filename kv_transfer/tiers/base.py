"""The contract of a block store, which holds the bytes of a tier. `tier.py` decides which blocks stay.

A store knows blocks of one size by name. Its calls may block, and several I/O threads make them at once. It never
raises for failures of its medium: a block that cannot be read for any reason is a miss and will be computed again.

`tandem.protocol.plugins.KV_STORES` has the kinds of stores by scheme. Other packages may add their own, whose blocks
are sealed for them (`foreign.py`); `tandem.testing.store_contract` tests a kind.
"""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from tandem.kv_transfer.tiers.key import StoreKey
from tandem.protocol.config import TierSpec
from tandem.protocol.digest import DIGEST_BYTES
from tandem.protocol.load_prior import LoadPrior

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
    # Why a block that was to be written could not be made:
    EVICTED = "evicted before its turn"
    UNFIT = "does not fit its codec"


MakeBlock: TypeAlias = Callable[[Block], Block | StoreFailure]  # called by an I/O thread, with a buffer it may use


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """What a store is opened with."""

    spec: TierSpec
    block_bytes: int
    num_blocks: int  # the most that it will hold at a time
    namespace: bytes  # of the model and what else its KV depends on
    key: StoreKey | None  # of stores beyond the worker's memory

    @property
    def num_bytes(self) -> int:
        """Size of all its blocks."""
        return self.num_blocks * self.block_bytes

    @property
    def folder(self) -> str:
        """A name for the blocks of this namespace, key and codec: those of others must never mix with them."""
        assert self.key is not None, "a store in memory has no folder"
        return f"{self.spec.codec}/{self.key.folder_name(self.namespace)}"

    @property
    def max_listed(self) -> int:
        """A scan that finds more names than this has no end."""
        return 4 * self.num_blocks + 100_000


class BlockStore(abc.ABC):
    """Blocks of `block_bytes` bytes by name. Blocks are immutable: one name always means the same bytes.

    The class attributes are what a kind says of itself. An instance may say otherwise.
    """

    options: Collection[str] = ()  # that its spec may have, beyond those of every tier
    prior = LoadPrior(1e-3, 1e9)
    num_threads = 2
    rescan_s = math.inf  # after which it is scanned again: finite if others add blocks
    shared_by: Literal["worker", "host", "all"] = "worker"  # which workers find each other's blocks
    identity = ""  # names the store, equally for all who share it; "" = nobody does

    @classmethod
    def open(cls, settings: StoreSettings) -> BlockStore:
        """A store. Raises `ConfigError` if it cannot be used."""
        return cls(settings)  # type: ignore[arg-type]  # what a kind of another package takes

    @classmethod  # noqa: B027  (there may be nothing to check)
    def check(cls, spec: TierSpec, *, is_local: bool) -> None:
        """Raise `ConfigError` for a spec with which `open` would fail. Makes nothing.

        `is_local` says that the workers run on this machine.
        """

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

    def whole_or_deleted(self, name: BlockName, data: Block | None) -> Block | StoreFailure:
        """The bytes that a seal has opened; None stands for a block that is not what was written, and is deleted."""
        if data is not None:
            return data
        self.delete(name)
        return StoreFailure.CORRUPT

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
