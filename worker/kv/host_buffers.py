"""Buffers in host memory through which blocks go between a GPU and the tiers.

torch's own pinned memory is rounded up to a power of two, is never given back, and taking more of it stalls the GPU. So
for a GPU one region is mapped and page-locked at start, and shared out in exactly the sizes that are asked for.
"""

from __future__ import annotations

import mmap
import resource
import weakref
from bisect import insort
from collections import deque
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tandem.engine.device import DeviceStream, Mark
from tandem.protocol.errors import ConfigError

_ALIGNMENT = 256
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU of the process
_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


class PageLocker(Protocol):
    """Locks pages in memory, so that a GPU can copy them. Both methods return CUDA's error code, 0 for success."""

    def lock(self, address: int, num_bytes: int) -> int:
        """Lock them."""

    def unlock(self, address: int) -> int:
        """Unlock what was locked at this address, once no copy uses it."""


class CudaPages:
    """CUDA's calls."""

    def lock(self, address: int, num_bytes: int) -> int:
        """`cudaHostRegister`."""
        return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))  # type: ignore[no-untyped-call]

    def unlock(self, address: int) -> int:
        """`cudaHostUnregister`, after all work."""
        torch.cuda.synchronize()
        return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


class HostBuffers:
    """Buffers on a machine without a GPU: ordinary memory."""

    def take(self, num_rows: int, num_bytes: int) -> Tensor:
        """A buffer [num_rows, num_bytes], uint8. It is given back when nothing refers to it."""
        return torch.empty(num_rows, num_bytes, dtype=torch.uint8)

    def close(self) -> None:
        """Give the memory back."""


class PinnedBuffers(HostBuffers):
    """Page-locked memory of a fixed size.

    A buffer that nobody refers to may still be read by a copy that was launched before. It is used again once a mark is
    done that was recorded after it came back.
    """

    def __init__(self, num_bytes: int, stream: DeviceStream, pages: PageLocker) -> None:
        """Raises ConfigError if the pages cannot be locked."""
        self._memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        self._stream = stream
        self._pages = pages
        self._free = [(0, num_bytes)]  # (offset, size), ascending, never adjacent
        self._returned: deque[tuple[int, int]] = deque()  # filled by any thread, when it drops the last reference
        self._waiting: deque[tuple[Mark, int, int]] = deque()
        if code := pages.lock(self._memory.ctypes.data, num_bytes):
            raise ConfigError(_refusal(num_bytes, code))
        self._is_locked = True

    @property
    def num_free_bytes(self) -> int:
        """Bytes that neither a buffer nor a copy uses."""
        self._reclaim()
        return sum(size for _, size in self._free)

    @override
    def take(self, num_rows: int, num_bytes: int) -> Tensor:
        """As `HostBuffers.take`. If there is no room, it takes torch's own pinned memory."""
        assert self._is_locked, "it is closed"
        self._reclaim()
        size = -(-max(num_rows * num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        idx = next((idx for idx, (_, room) in enumerate(self._free) if room >= size), None)
        if idx is None:
            return torch.empty(num_rows, num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        offset, room = self._free.pop(idx)
        if room > size:
            self._free.insert(idx, (offset + size, room - size))
        view = self._memory[offset : offset + num_rows * num_bytes]
        weakref.finalize(view, self._returned.append, (offset, size)).atexit = False
        return torch.from_numpy(view).view(num_rows, num_bytes)

    @override
    def close(self) -> None:
        """Unlock the pages, once. The memory itself goes with the last buffer."""
        if not self._is_locked:
            return
        self._is_locked = False
        if code := self._pages.unlock(self._memory.ctypes.data):
            raise RuntimeError(f"pinned host memory could not be unlocked: cudaHostUnregister returned {code}")

    def _reclaim(self) -> None:
        if self._returned:
            mark = self._stream.record()
            while self._returned:
                self._waiting.append((mark, *self._returned.popleft()))
        while self._waiting and self._stream.is_done(self._waiting[0][0]):
            _, offset, size = self._waiting.popleft()
            self._give_back(offset, size)

    def _give_back(self, offset: int, size: int) -> None:
        insort(self._free, (offset, size))
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


def _refusal(num_bytes: int, code: int) -> str:
    refused = (
        f"{num_bytes / 1e6:.1f} MB of host memory cannot be page-locked for the tiers: cudaHostRegister returned {code}"
    )
    if code == _ALREADY_REGISTERED:
        return (
            f"{refused}: some of it is locked already; end what else this process keeps in its tiers, or start it again"
        )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "any amount" if limit == resource.RLIM_INFINITY else f"{limit / 1e6:.1f} MB"
    return (
        f"{refused}, and this process may lock {locked}; raise that (ulimit -l, --ulimit memlock=-1 of a container), "
        "or serve without tiers"
    )
