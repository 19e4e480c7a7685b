"""Stores of every kind for the tests of tiers, and blocks whose bytes follow from their digests."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import numpy as np
import obstore
import pytest
from obstore.store import from_url

from tandem.kv_transfer.eviction.lru import LRU
from tandem.kv_transfer.tiers.base import Block, BlockName, BlockStore, StoreSettings, file_name
from tandem.kv_transfer.tiers.disk import DiskStore
from tandem.kv_transfer.tiers.key import StoreKey
from tandem.kv_transfer.tiers.kinds import open_store
from tandem.kv_transfer.tiers.memory import MemoryStore
from tandem.kv_transfer.tiers.object import ObjectStore
from tandem.kv_transfer.tiers.seal import make_seal
from tandem.kv_transfer.tiers.tier import Tier
from tandem.protocol.config import parse_tier
from tandem.testing.store_contract import BLOCK_BYTES, KEY, NAMESPACE, content
from tests.support.waiting import poll_until

PERSISTENT = ["disk", "object-file", "object-s3", "disk-encrypted", "object-s3-encrypted"]
IN_MEMORY = ["memory", "numa", "dax"]
KINDS = [*IN_MEMORY, *PERSISTENT]
NUMA_NODES = Path("/sys/devices/system/node/has_memory")
DEADLINE_S = 20.0
S3_TIMEOUT_S = 1.0


def zeros(count: int = 1) -> Block:
    return np.zeros((count, BLOCK_BYTES), np.uint8)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class S3Server:
    """An S3 server in a process of its own."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start with an empty bucket; after `kill`, on the same port again."""
        script = Path(__file__).with_name("s3_server.py")
        self._process = subprocess.Popen([sys.executable, script, str(self.port)], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        httpx.put(f"{self.endpoint}/bucket", timeout=DEADLINE_S).raise_for_status()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, str]:
        return {
            "endpoint": self.endpoint,
            "access_key_id": "tandem",
            "secret_access_key": "secret",
            "region": "us-east-1",
        }

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


class World:
    """The place of a store of one kind. It can be opened again, as after a restart, and its bytes can be damaged."""

    def __init__(self, kind: str, folder: Path, server: S3Server | None = None) -> None:
        self.kind = kind.removesuffix("-encrypted")
        self.key = StoreKey(KEY.secret, encrypts=kind != self.kind)
        self._folder = folder
        self._server = server
        self._url = f"s3://bucket/{folder.name}" if self.kind == "object-s3" else f"file://{folder}/objects"

    def open(
        self,
        num_blocks: int = 100,
        namespace: bytes = NAMESPACE,
        block_bytes: int = BLOCK_BYTES,
        key: StoreKey | None = None,
    ) -> BlockStore:
        key = key or self.key
        if self.kind == "memory":
            return MemoryStore(block_bytes, num_blocks)
        if self.kind == "numa":
            if not NUMA_NODES.exists():
                pytest.skip("this kernel has no NUMA nodes")
            return opened("numa:0?gb=1", block_bytes=block_bytes, num_blocks=num_blocks)
        if self.kind == "dax":
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a tmpfs: the mapping outlives the name
                return opened(f"dax:{folder}/slab?gb=1", block_bytes=block_bytes, num_blocks=num_blocks)
        if self.kind == "disk":
            return DiskStore(self._folder / "blocks", namespace, block_bytes, key)
        assert self.kind in ("object-file", "object-s3"), f"{self.kind} is of no store that this knows"
        options = self._server.options if self._server is not None and self.kind == "object-s3" else {}
        return ObjectStore(self._url, namespace, block_bytes, key, timeout_s=S3_TIMEOUT_S, options=options)

    def change(self, name: BlockName, change: Callable[[bytes], bytes]) -> None:
        """Replace what is stored for a block, behind the store's back."""
        if self.kind == "object-s3":
            assert self._server is not None
            bucket = from_url(self._url, config=self._server.options, client_options={"allow_http": True})
            path = f"{self.key.folder_name(NAMESPACE)}/{self._file_name(name)}"
            obstore.put(bucket, path, change(bytes(obstore.get(bucket, path).bytes())))
        else:
            path = self.path(name)
            path.write_bytes(change(path.read_bytes()))

    def path(self, name: BlockName) -> Path:
        """The block's file."""
        (path,) = self._folder.rglob(self._file_name(name))
        return path

    def stored(self) -> bytes:
        """All that is stored, names included."""
        if self.kind == "object-s3":
            assert self._server is not None
            bucket = from_url(self._url, config=self._server.options, client_options={"allow_http": True})
            paths = [entry["path"] for page in obstore.list(bucket) for entry in page]
            return b"".join(path.encode() + bytes(obstore.get(bucket, path).bytes()) for path in paths)
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        return b"".join(str(path).encode() + path.read_bytes() for path in files)

    def _file_name(self, name: BlockName) -> str:
        return file_name(make_seal(self.key).stored_name(name))


def opened(spec: str, *, block_bytes: int = BLOCK_BYTES, num_blocks: int = 100) -> BlockStore:
    """The store of a spec, as a worker opens it."""
    settings = {"block_bytes": block_bytes, "num_blocks": num_blocks, "namespace": NAMESPACE, "key": KEY}
    return open_store(StoreSettings(spec=parse_tier(spec, eviction="lru"), **settings))  # type: ignore[arg-type]


def make_tier(
    store: BlockStore,
    *,
    capacity: int = 100,
    num_threads: int = 1,
    clock: Callable[[], float] = time.monotonic,
    **more: float,
) -> Tier:
    """A tier that has finished its first scan."""
    tier = Tier(
        "test",
        store,
        LRU(capacity),
        capacity_blocks=capacity,
        num_threads=num_threads,
        clock=clock,
        max_queued_stores=int(more.pop("max_queued_stores", 256)),
        **more,
    )
    poll_until(tier, lambda: not tier.is_scanning)
    return tier


def put(tier: Tier, names: Sequence[BlockName]) -> None:
    """Store blocks and wait for them."""
    writes = [tier.store(*name, content(name)) for name in names]
    poll_until(tier, lambda: all(write is None or write.is_done for write in writes))


def get(tier: Tier, names: Sequence[BlockName]) -> int:
    """Load blocks, wait for them and check their bytes; returns how many were loaded."""
    buffers = zeros(len(names))
    load = tier.load([name.digest for name in names], buffers)
    poll_until(tier, lambda: load.is_done)
    for name, buffer in zip(names[: load.num_loaded], buffers, strict=False):
        assert np.array_equal(buffer, content(name)), f"{name.digest.hex()} has other bytes"
    return load.num_loaded
