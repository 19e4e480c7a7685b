"""Memory that is a device or a file: CXL or persistent memory as device dax, or a file of tmpfs, hugetlbfs or pmem.

Several workers may name one device or file: each locks a part of it that no other has locked, for as long as it lives.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import stat
import struct
from pathlib import Path

import numpy as np
from typing_extensions import override

from tandem.kv_transfer.tiers.base import Block, BlockStore, StoreSettings
from tandem.kv_transfer.tiers.memory import MemoryStore, populate
from tandem.protocol.config import TierSpec
from tandem.protocol.errors import ConfigError
from tandem.protocol.load_prior import LoadPrior
from tandem.protocol.user_file import expanded

_DEVICES = Path("/dev")
_LARGE_PAGE = 2 << 20
_MAX_PARTS = 4096


class DaxStore(MemoryStore):
    """`dax:/dev/dax0.0?gb=512`: a slab in a mapped device or file, of which nothing is read that this did not write."""

    prior = LoadPrior(50e-6, 5e9)

    @classmethod
    @override
    def open(cls, settings: StoreSettings) -> BlockStore:
        spec = settings.spec
        path = expanded(spec.setting, spec.place)
        try:
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if Path(path).parent == _DEVICES else os.O_CREAT)
            descriptor = os.open(path, flags, 0o600)
            try:
                slab = _map(descriptor, settings.num_bytes, spec.setting)
            finally:
                os.close(descriptor)  # the mapping has its own, and the lock with it
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{spec.setting}: {path} cannot be mapped: {exc}; choose another place or size") from exc
        return cls(settings.block_bytes, settings.num_blocks, slab[: settings.num_bytes])

    @classmethod
    @override
    def check(cls, spec: TierSpec, *, is_local: bool) -> None:
        path = Path(expanded(spec.setting, spec.place) if is_local else spec.place)
        if not spec.place.startswith(("/", "~")):
            raise ConfigError(f"{spec.setting}: {spec.place!r} must be a whole path, such as dax:/dev/dax0.0?gb=64")
        if not is_local:
            return
        if not (path.exists() or (path.parent.is_dir() and path.parent != _DEVICES)):
            raise ConfigError(f"{spec.setting}: there is no {path}; name a device, or a file of a folder that is there")
        if path.exists() and not (path.is_file() or path.is_char_device()):
            raise ConfigError(f"{spec.setting}: {path} is neither a file nor a device such as /dev/dax0.0; name one")
        if not os.access(path if path.exists() else path.parent, os.R_OK | os.W_OK):
            raise ConfigError(f"{spec.setting}: {path} is closed to this user; open it, or name another")


def _map(descriptor: int, num_bytes: int, setting: str) -> Block:
    """A free part of the device or file, in memory and locked."""
    status = os.fstat(descriptor)
    is_file = stat.S_ISREG(status.st_mode)
    if is_file and status.st_uid != os.geteuid():
        raise ConfigError(f"{setting}: the file belongs to user {status.st_uid}, who could change KV; name another")
    unit, capacity = (max(os.fstatvfs(descriptor).f_bsize, _LARGE_PAGE), None) if is_file else _device(status.st_rdev)
    size = -(-num_bytes // unit) * unit
    offset = _lock_part(descriptor, size, capacity)
    if offset is None:
        raise ConfigError(
            f"{setting}: no {size / 1e9:.1f} GB of it are free of other workers' KV; lower gb, which each of them takes"
        )
    if is_file:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, offset, size)  # a page that were not there later would end the process
    memory = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
    slab = np.frombuffer(memory, np.uint8)
    populate(memory, slab)
    return slab


def _device(number: int) -> tuple[int, int]:
    """Alignment and size of a device dax, by its number."""
    about = Path(f"/sys/dev/char/{os.major(number)}:{os.minor(number)}")
    try:
        align = int((about / "align").read_text(), 0) if (about / "align").exists() else _LARGE_PAGE
        return align, int((about / "size").read_text(), 0)
    except (OSError, ValueError) as exc:
        raise OSError(f"it is not a device dax: {about} tells no size") from exc


def _lock_part(descriptor: int, size: int, capacity: int | None) -> int | None:
    """Offset of the first part that no other process has locked; None if there is none."""
    # Locks of the open file, not of the process: they end with its last descriptor.
    for offset in itertools.islice(itertools.count(0, size), _MAX_PARTS):
        if capacity is not None and offset + size > capacity:
            return None
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, offset, size, 0)  # C's struct flock
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
            return offset
        except (BlockingIOError, PermissionError):  # another has it
            continue
    return None
