"""A store of limited speed, for tests and benchmarks of slow tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from typing_extensions import override

from tandem.kv_transfer.tiers.base import Block, BlockName, BlockStore, StoreFailure


class ThrottledStore(BlockStore):
    """Another store whose reads and writes share `bytes_per_s` and each take at least `latency_s`.

    Both may be changed at any time, for the calls that come after.
    """

    def __init__(
        self,
        store: BlockStore,
        *,
        bytes_per_s: float = float("inf"),
        latency_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(store.block_bytes)
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self._store, self._clock, self._sleep = store, clock, sleep
        self._free_at = 0.0  # the time at which the bytes of all calls so far have passed
        self._lock = threading.Lock()

    @override
    def read(self, name: BlockName, scratch: Block) -> Block | StoreFailure:
        self._wait()
        return self._store.read(name, scratch)

    @override
    def write(self, name: BlockName, data: Block) -> StoreFailure | None:
        self._wait()
        return self._store.write(name, data)

    @override
    def delete(self, name: BlockName) -> StoreFailure | None:
        return self._store.delete(name)

    @override
    def scan(self) -> Sequence[BlockName] | StoreFailure:
        return self._store.scan()

    @override
    def close(self) -> None:
        self._store.close()

    def _wait(self) -> None:
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now) + self.block_bytes / self.bytes_per_s
            wait_s = self._free_at - now + self.latency_s
        if wait_s > 0:
            self._sleep(wait_s)
