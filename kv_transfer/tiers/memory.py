"""L2: blocks in host memory, in one slab; pinned where there is a GPU to copy to."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from kv_transfer.tiers.base import Block, BlockName, BlockStore, Failure

__all__ = ["MemoryStore"]


class MemoryStore(BlockStore):
    """A slab of `num_blocks` slots. `read` returns the slot itself, without a copy."""

    is_instant = True

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        super().__init__(block_bytes)
        import torch  # the other stores need none

        pinned = torch.cuda.is_available()
        # NOTE: bytes move by numpy. torch would start an OpenMP team in each I/O thread, which stalls the engine's own.
        # numpy also asks for huge pages, so that touching the slab for the first time takes less than copying.
        self._slab: Block = (
            torch.empty((num_blocks, block_bytes), dtype=torch.uint8, pin_memory=True).numpy()
            if pinned
            else np.empty((num_blocks, block_bytes), np.uint8)
        )
        self._free = list(range(num_blocks - 1, -1, -1))
        self._slot_of: dict[BlockName, int] = {}
        self._lock = threading.Lock()  # of the two above; bytes are copied outside of it

    @override
    def read(self, name: BlockName, scratch: Block) -> Block | Failure:
        with self._lock:
            slot = self._slot_of.get(name)
        return Failure.ABSENT if slot is None else self._slab[slot]

    @override
    def write(self, name: BlockName, data: Block) -> Failure | None:
        with self._lock:
            if name in self._slot_of:
                return None
            if not self._free:
                return Failure.FULL
            slot = self._free.pop()
        np.copyto(self._slab[slot], data)
        with self._lock:
            if name in self._slot_of:  # another thread was faster
                self._free.append(slot)
            else:
                self._slot_of[name] = slot
        return None

    @override
    def delete(self, name: BlockName) -> None:
        with self._lock:
            slot = self._slot_of.pop(name, None)
            if slot is not None:
                self._free.append(slot)

    @override
    def scan(self) -> Sequence[BlockName]:
        with self._lock:
            return list(self._slot_of)
