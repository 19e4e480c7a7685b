"""L3: blocks in files on a local disk, which outlive the process.

One file per block, written under another name and renamed, so a block is there whole or not at all whenever a process
is killed; after a power cut a file may be short, which its footer shows, so nothing is ever flushed. Several processes
may share a folder. Reads and writes go through the page cache, which is a tier by itself for what was written lately.

Measured for blocks of 360 KB in the page cache, in turns, best of 8: `preadv` 10.3 GB/s, or 5.9 with checksum and copy;
NIXL's POSIX plugin 6.3 for single blocks and 9.2 for 16 at once, without either. Slots of one large file are read no
faster than a file each, and would have to be allocated among processes. GPUDirect Storage would be another store over
the same files.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path

from typing_extensions import override

from kv_transfer.tiers.base import Block, BlockName, BlockStore, Failure, file_name, parse_file_name
from kv_transfer.tiers.footer import FOOTER_BYTES, make_footer
from protocol.errors import ConfigError

__all__ = ["DiskStore"]

logger = logging.getLogger(__name__)

_UNFINISHED = ".tmp"
_ABANDONED_AFTER_S = 60.0  # a writer slower than that loses its file and so drops its block
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # says nothing about the file that was asked for


class DiskStore(BlockStore):
    """Files `<folder>/<namespace>/<first byte of the digest>/<digest>-<parent>`."""

    def __init__(self, folder: Path, namespace: bytes, block_bytes: int) -> None:
        super().__init__(block_bytes)
        self._folder = folder / namespace.hex()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"the disk tier's folder {self._folder} cannot be made: {exc.strerror}") from exc

    @override
    def read(self, name: BlockName, scratch: Block) -> Block | Failure:
        footer = bytearray(FOOTER_BYTES)
        try:
            num_bytes = _read_file(self._path(name), scratch.data, footer)
        except FileNotFoundError:
            return Failure.ABSENT
        except OSError as exc:
            if exc.errno in _NO_RESOURCES:
                return Failure.UNREACHABLE
            logger.warning("block %s cannot be read: %s", name.digest.hex(), exc)
            num_bytes = 0
        if num_bytes != self.block_bytes + FOOTER_BYTES or footer != make_footer(name, scratch):
            self.delete(name)
            return Failure.CORRUPT
        return scratch

    @override
    def write(self, name: BlockName, data: Block) -> Failure | None:
        path = self._path(name)
        if os.path.isfile(path):  # another worker's; replacing a file would make ext4 flush the new one
            return None
        unfinished = f"{path}.{secrets.token_hex(4)}{_UNFINISHED}"
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            if _write_file(unfinished, data.data, make_footer(name, data)) == data.nbytes + FOOTER_BYTES:
                os.rename(unfinished, path)
                return None
            failure = Failure.FULL  # only a full disk takes a part
        except OSError as exc:
            failure = Failure.FULL
            if exc.errno not in _NO_ROOM:
                failure = Failure.UNREACHABLE
                logger.warning("block %s cannot be written: %s", name.digest.hex(), exc)
        _unlink(unfinished)
        return failure

    @override
    def delete(self, name: BlockName) -> None:
        _unlink(self._path(name))

    @override
    def scan(self) -> Sequence[BlockName] | Failure:
        """Names of the blocks, oldest file first. Removes what writers that were killed have left behind."""
        found: list[tuple[int, BlockName]] = []
        abandoned_before_s = time.time() - _ABANDONED_AFTER_S
        try:
            for entry, written_ns in self._files():
                if (name := parse_file_name(entry.name)) is not None:
                    found.append((written_ns, name))
                elif entry.name.endswith(_UNFINISHED) and written_ns < abandoned_before_s * 1e9:
                    _unlink(entry.path)
        except OSError as exc:
            logger.warning("%s cannot be listed: %s", self._folder, exc)
            return Failure.UNREACHABLE
        found.sort(key=itemgetter(0))
        return [name for _, name in found]

    def _path(self, name: BlockName) -> str:
        return f"{self._folder}/{name.digest[:1].hex()}/{file_name(name)}"

    def _files(self) -> Iterator[tuple[os.DirEntry[str], int]]:
        """All files with the time of their last change in nanoseconds; other processes may remove them meanwhile."""
        for folder in self._folder.iterdir():
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        yield entry, entry.stat().st_mtime_ns
                    except FileNotFoundError:
                        continue


def _read_file(path: str, *buffers: memoryview | bytearray) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.preadv(descriptor, buffers, 0)
    finally:
        os.close(descriptor)


def _write_file(path: str, *buffers: memoryview | bytes) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.writev(descriptor, buffers)
    finally:
        os.close(descriptor)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as exc:
        logger.warning("%s cannot be deleted: %s", path, exc)
