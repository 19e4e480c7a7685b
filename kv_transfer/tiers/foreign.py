"""Makes a store of another package keep the contract: what it raises, claims or returns can only cost time.

Its blocks are sealed as those on disk are, so bytes that are not those that a worker wrote under this name are a miss.
It sees names and bytes as a disk would: encrypted with `kv_encryption`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from tandem.kv_transfer.tiers.base import Block, BlockName, BlockStore, StoreFailure, StoreSettings
from tandem.kv_transfer.tiers.seal import FOOTER_BYTES, make_seal
from tandem.protocol.digest import DIGEST_BYTES
from tandem.protocol.errors import ConfigError
from tandem.protocol.load_prior import LoadPrior
from tandem.protocol.plugins import foreign_outcome

logger = logging.getLogger(__name__)

_MAX_THREADS = 64
_HOST_ID = Path("/proc/sys/kernel/random/boot_id")


class ForeignStore(BlockStore):
    """Blocks of `block_bytes`, sealed, in a store of another package."""

    def __init__(self, store: BlockStore, settings: StoreSettings) -> None:
        """`store` was opened for blocks that are `FOOTER_BYTES` larger. Raises `ConfigError` for one that cannot be."""
        super().__init__(settings.block_bytes)
        assert settings.key is not None, "a store of another package needs the key of its seals"
        self._setting = settings.spec.setting
        self._store = store
        self._seal = make_seal(settings.key)
        self._max_listed = settings.max_listed
        self._check(isinstance(store, BlockStore), f"{store!r} is no BlockStore")
        self._check(store.block_bytes == self._sealed_bytes, f"block_bytes={store.block_bytes} is not the size it got")
        self._take_over(store)
        if store.shared_by != "worker":
            host = _HOST_ID.read_text().strip() if store.shared_by == "host" else ""
            self.identity = str(store.identity) or f"{host}{settings.spec.url}#{settings.folder}"

    @override
    def read(self, name: BlockName, scratch: Block) -> Block | StoreFailure:
        room = np.empty(self._sealed_bytes, np.uint8)
        found = self._call("read", self._store.read, self._seal.stored_name(name), room)
        if isinstance(found, StoreFailure):
            return found
        is_block = isinstance(found, np.ndarray) and (found.dtype, found.shape) == (np.uint8, (self._sealed_bytes,))
        # What was checked must stay what is served: a copy, which the store does not know.
        data = self._seal.open(name, self._seal.split(found.copy()), scratch) if is_block else None
        return self.whole_or_deleted(name, data)

    @override
    def write(self, name: BlockName, data: Block) -> StoreFailure | None:
        parts = [np.frombuffer(part, np.uint8) for part in self._seal.seal(name, data)]
        return self._told("write", self._store.write, self._seal.stored_name(name), np.concatenate(parts))

    @override
    def delete(self, name: BlockName) -> StoreFailure | None:
        return self._told("delete", self._store.delete, self._seal.stored_name(name))

    @override
    def scan(self) -> Sequence[BlockName] | StoreFailure:
        names: Sequence[BlockName] | StoreFailure = self._call("scan", self._names)
        return names

    @override
    def close(self) -> None:
        self._call("close", self._store.close)

    @property
    def _sealed_bytes(self) -> int:
        return self.block_bytes + FOOTER_BYTES

    def _call(self, what: str, function: Callable[..., object], *arguments: object) -> Any:
        result = foreign_outcome(function, *arguments)
        return self._unreachable(what, result) if isinstance(result, Exception) else result

    def _told(self, what: str, function: Callable[..., object], *arguments: object) -> StoreFailure | None:
        told = self._call(what, function, *arguments)
        return told if told is None or isinstance(told, StoreFailure) else self._unreachable(what, told)

    def _unreachable(self, what: str, result: object) -> StoreFailure:
        logger.warning("%s: %s ended with %.200r", self._setting, what, result)
        return StoreFailure.UNREACHABLE

    def _names(self) -> list[BlockName] | StoreFailure:
        """The names among what a scan finds."""
        found: Any = self._store.scan()
        if isinstance(found, StoreFailure):
            return found
        return [self._seal.true_name(BlockName(*one)) for one in islice(found, self._max_listed) if _is_name(one)]

    def _take_over(self, store: BlockStore) -> None:
        """What the kind says of itself."""
        self.prior = LoadPrior(*map(float, store.prior))
        self._check(all(0 < value < math.inf for value in self.prior), f"prior={store.prior} must be above 0")
        self.num_threads = store.num_threads
        is_number = type(self.num_threads) is int and 1 <= self.num_threads <= _MAX_THREADS
        self._check(is_number, f"num_threads={self.num_threads!r} must be from 1 to {_MAX_THREADS}")
        self.rescan_s = store.rescan_s
        self._check(self.rescan_s >= 1, f"rescan_s={self.rescan_s} must be 1 or more")
        self.shared_by = store.shared_by
        is_known = self.shared_by in ("worker", "host", "all")
        self._check(is_known, f"shared_by={self.shared_by!r} must be worker, host or all")

    def _check(self, condition: bool, what: str) -> None:
        if not condition:
            raise ConfigError(f"{self._setting}: {what}; repair the package that has this kind of store")


def _is_name(one: object) -> bool:
    """Whether it is a block's name that a chain may have."""
    if not isinstance(one, tuple) or len(one) != 2:
        return False
    digest, parent = one
    return all(type(part) is bytes and len(part) == DIGEST_BYTES for part in (digest, parent or digest)) and (
        digest != parent
    )
