"""L2: blocks in host memory, in one slab.

The slab is not page-locked, because no GPU touches it: blocks go through pinned buffers
(`tandem.worker.kv.host_buffers`). So it takes exactly its size, however large, and no limit of locked memory applies.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import numpy as np
import psutil
from typing_extensions import override

from tandem.kv_transfer.tiers.base import Block, BlockName, BlockStore, StoreFailure, StoreSettings
from tandem.protocol.errors import ConfigError
from tandem.protocol.load_prior import TIER_PRIORS
from tandem.runtime import large_pages

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it yet


class MemoryStore(BlockStore):
    """A slab of `num_blocks` slots, `host:64GB`. `read` returns the slot itself, without a copy."""

    prior = TIER_PRIORS["host"]
    num_threads = 1

    @classmethod
    @override
    def open(cls, settings: StoreSettings) -> BlockStore:
        slab = _reserve(settings.num_bytes, settings.spec.setting)
        return cls(settings.block_bytes, settings.num_blocks, slab)

    def __init__(self, block_bytes: int, num_blocks: int, slab: Block | None = None) -> None:
        """`slab`: memory of `num_blocks * block_bytes` bytes; None = host memory is reserved."""
        super().__init__(block_bytes)
        # NOTE: bytes move by numpy. torch would start an OpenMP team in each I/O thread, which stalls the engine's own.
        slab = _reserve(num_blocks * block_bytes, "host memory") if slab is None else slab
        self._slab: Block = slab.reshape(num_blocks, block_bytes)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._slot_of: dict[BlockName, int] = {}
        self._lock = threading.Lock()  # guards the two above; bytes are copied outside it

    @override
    def read(self, name: BlockName, scratch: Block) -> Block | StoreFailure:
        with self._lock:
            slot = self._slot_of.get(name)
        return StoreFailure.ABSENT if slot is None else self._slab[slot]

    @override
    def write(self, name: BlockName, data: Block) -> StoreFailure | None:
        with self._lock:
            if name in self._slot_of:
                return None
            if not self._free:
                return StoreFailure.FULL
            slot = self._free.pop()
        np.copyto(self._slab[slot], data)
        with self._lock:
            if name in self._slot_of:  # another thread was faster
                self._free.append(slot)
            else:
                self._slot_of[name] = slot
        return None

    @override
    def delete(self, name: BlockName) -> StoreFailure | None:
        with self._lock:
            slot = self._slot_of.pop(name, None)
            if slot is not None:
                self._free.append(slot)
        return None

    @override
    def scan(self) -> Sequence[BlockName]:
        with self._lock:
            return list(self._slot_of)

    @override
    def close(self) -> None:
        """Let go of the slab, and with it of a mapped file."""
        self._slab = self._slab[:0].copy()


def _reserve(num_bytes: int, setting: str) -> Block:
    """Host memory. Raises ConfigError if there is not that much."""
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise ConfigError(
            f"{setting}: {num_bytes / 1e9:.1f} GB do not fit: {available / 1e9:.1f} GB of memory are free; lower it"
        )
    memory = large_pages.allocate(num_bytes)
    slab = np.frombuffer(memory, np.uint8)
    populate(memory, slab)
    return slab


def populate(memory: mmap.mmap, slab: Block) -> None:
    """Take all its pages now: a page's first use may take longer than copying it."""
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError:  # an older kernel
        slab.fill(0)
