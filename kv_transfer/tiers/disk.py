"""L3: blocks in files on a local disk, which outlive the process.

Each block is one file. It is written under another name and then renamed, so a block exists whole or not at all when
a process is killed. After a power cut a file may be short; its footer shows that, so nothing is ever flushed. Several
processes may share a folder. Reads and writes go through the page cache, which is a tier of its own for recent blocks.

Measured for blocks of 360 KB in the page cache, interleaved, best of 8: `preadv` 10.3 GB/s, or 5.9 with XXH3 and copy;
NIXL's POSIX plugin 6.3 for single blocks and 9.2 for 16 at once, without either. Slots of one large file are read no
faster than separate files, and processes would have to share their allocation. GPUDirect Storage would be another store
over the same files.

Blocks are as secret as the text they were computed from, so only their user may enter the folder. Other files, folders
and links in it are neither used, followed nor removed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path

from typing_extensions import override

from tandem.kv_transfer.tiers.base import (
    Block,
    BlockName,
    BlockStore,
    StoreFailure,
    StoreSettings,
    file_name,
    parse_file_name,
)
from tandem.kv_transfer.tiers.key import StoreKey
from tandem.kv_transfer.tiers.seal import FOOTER_BYTES, Part, make_seal
from tandem.protocol.config import TierSpec
from tandem.protocol.errors import ConfigError
from tandem.protocol.load_prior import TIER_PRIORS
from tandem.protocol.user_file import expanded

logger = logging.getLogger(__name__)

_SHARD = re.compile(r"[0-9a-f]{2}")
_UNFINISHED = re.compile(r"[0-9a-f]{32}-[0-9a-f]*\.[0-9a-f]{8}\.tmp")
_ABANDONED_AFTER_S = 60.0  # a slower writer loses its unfinished file, and its block is dropped
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # these say nothing about the requested file
_STRAY = {errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.EACCES, errno.EPERM}
_HERE = os.O_CLOEXEC | os.O_NOFOLLOW  # for every open: the target of a link is not ours


class DiskStore(BlockStore):
    """Files `<folder>/<namespace and key>/<first byte of the digest>/<digest>-<parent>`."""

    prior = TIER_PRIORS["disk"]
    rescan_s = 60.0
    shared_by = "host"

    @classmethod
    @override
    def open(cls, settings: StoreSettings) -> BlockStore:
        spec, key = settings.spec, settings.key
        assert key is not None, f"{spec.setting} has no key"
        folder = Path(expanded(spec.setting, spec.place)) / spec.codec
        store = cls(folder, settings.namespace, settings.block_bytes, key)
        store.identity = f"{folder_id(folder)}#{key.folder_name(settings.namespace)}"
        return store

    @classmethod
    @override
    def check(cls, spec: TierSpec, *, is_local: bool) -> None:
        if not spec.place:
            raise ConfigError(f"{spec.setting} names no folder; write one, such as disk:/ssd/kv?gb=2000")
        if is_local:
            check_folder(spec.setting, Path(expanded(spec.setting, spec.place)))

    def __init__(self, folder: Path, namespace: bytes, block_bytes: int, key: StoreKey) -> None:
        super().__init__(block_bytes)
        self._folder = folder / key.folder_name(namespace)
        self._seal = make_seal(key)
        make_private(self._folder)

    @override
    def read(self, name: BlockName, scratch: Block) -> Block | StoreFailure:
        stored, parts = self._seal.stored_name(name), self._seal.parts(scratch)
        try:
            with self._shard(_shard_of(stored)) as shard:
                num_bytes = _read_file(shard, file_name(stored), parts)
        except FileNotFoundError:
            return StoreFailure.ABSENT
        except OSError as exc:
            if exc.errno in _NO_RESOURCES:
                return StoreFailure.UNREACHABLE
            logger.warning("block %s cannot be read: %s", name.digest.hex(), exc)
            num_bytes = 0
        is_whole = num_bytes == self.block_bytes + FOOTER_BYTES
        data = self._seal.open(name, parts, scratch) if is_whole else None
        return self.whole_or_deleted(name, data)

    @override
    def write(self, name: BlockName, data: Block) -> StoreFailure | None:
        try:
            stored = self._seal.stored_name(name)
            with self._shard(_shard_of(stored), is_made=True) as shard:
                return self._write_in(shard, file_name(stored), name, data)
        except OSError as exc:
            if exc.errno in _NO_ROOM:
                return StoreFailure.FULL
            logger.warning("block %s cannot be written: %s", name.digest.hex(), exc)
            return StoreFailure.OCCUPIED if exc.errno in _STRAY else StoreFailure.UNREACHABLE

    def _write_in(self, shard: int, path: str, name: BlockName, data: Block) -> StoreFailure | None:
        with contextlib.suppress(FileNotFoundError):
            # Usually another worker has written it. Replacing a file would make ext4 flush the new one.
            return None if _is_ours(os.stat(path, dir_fd=shard, follow_symlinks=False)) else StoreFailure.OCCUPIED
        unfinished = f"{path}.{secrets.token_hex(4)}.tmp"
        try:
            if _write_file(shard, unfinished, self._seal.seal(name, data)) == data.nbytes + FOOTER_BYTES:
                os.rename(unfinished, path, src_dir_fd=shard, dst_dir_fd=shard)
                return None
        except OSError:
            _unlink(shard, unfinished)
            raise
        _unlink(shard, unfinished)
        return StoreFailure.FULL  # only a full disk accepts a part of a write

    @override
    def delete(self, name: BlockName) -> StoreFailure | None:
        stored = self._seal.stored_name(name)
        try:
            with self._shard(_shard_of(stored)) as shard:
                if _is_ours(os.stat(file_name(stored), dir_fd=shard, follow_symlinks=False)):
                    _unlink(shard, file_name(stored))
        except FileNotFoundError:
            return None
        except OSError as exc:
            logger.warning("block %s cannot be deleted: %s", name.digest.hex(), exc)
        return None

    @override
    def scan(self) -> Sequence[BlockName] | StoreFailure:
        """Names of the blocks, oldest file first. Removes unfinished files of killed writers."""
        found: list[tuple[int, BlockName]] = []
        try:
            for shard in filter(_SHARD.fullmatch, os.listdir(self._folder)):
                found += self._scan_shard(shard)
        except OSError as exc:
            logger.warning("%s cannot be listed: %s", self._folder, exc)
            return StoreFailure.UNREACHABLE
        found.sort(key=itemgetter(0))
        return [self._seal.true_name(stored) for _, stored in found]

    def _scan_shard(self, text: str) -> Iterator[tuple[int, BlockName]]:
        """Stored names in a shard folder, with times of change in nanoseconds; none if the folder is not ours."""
        abandoned_before_ns = (time.time() - _ABANDONED_AFTER_S) * 1e9
        try:
            with self._shard(text) as shard, os.scandir(shard) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:  # another process has removed it
                        continue
                    if not _is_ours(status):
                        continue
                    if (name := parse_file_name(entry.name)) is not None and _shard_of(name) == text:
                        yield status.st_mtime_ns, name
                    elif _UNFINISHED.fullmatch(entry.name) and status.st_mtime_ns < abandoned_before_ns:
                        _unlink(shard, entry.name)
        except OSError as exc:
            if exc.errno not in _STRAY and not isinstance(exc, FileNotFoundError):
                raise

    @contextlib.contextmanager
    def _shard(self, text: str, *, is_made: bool = False) -> Iterator[int]:
        """A descriptor of that folder. With `is_made` a missing folder is created."""
        path = f"{self._folder}/{text}"
        try:
            shard = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _HERE)
        except FileNotFoundError:
            if not is_made:
                raise
            with contextlib.suppress(FileExistsError):
                _make_folders(Path(path))
            shard = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _HERE)
        try:
            yield shard
        finally:
            os.close(shard)


def folder_id(folder: Path) -> str:
    """A random name of this folder, which is kept in it: workers that share the folder read the same one.

    Host names and paths do not tell whether they share it: hosts may have the same name, or mount the same folder.
    Raises `ConfigError`.
    """
    make_private(folder)
    file, unfinished = folder / "id", folder / f"id.{secrets.token_hex(4)}"
    try:
        if not file.exists():
            unfinished.write_text(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):  # another worker was faster
                os.link(unfinished, file)
            unfinished.unlink()
        return file.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the tier's folder {folder} cannot be used: {exc}; choose another place") from exc


def check_folder(name: str, folder: Path) -> None:
    """Raise `ConfigError` unless this user may write to the folder, or make it."""
    there = folder
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise ConfigError(f"{name}: {folder} cannot be a folder: {there} is not one; choose another place")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}: {folder} cannot be written to: {there} is closed to this user; choose another")
    try:  # root's rights allow writing everywhere, even where the file system takes no files, such as /proc
        os.rmdir(tempfile.mkdtemp(prefix=".tandem-", dir=there))
    except OSError as exc:
        raise ConfigError(
            f"{name}: {folder} cannot be written to: {there} takes no folders ({exc.strerror}); choose another place"
        ) from exc


def make_private(folder: Path) -> None:
    """Create the folder and missing parents so that only this user may enter; close an existing folder to others.

    Raises ConfigError if it cannot be created or belongs to another user.
    """
    try:
        _make_folders(folder)
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigError(
                f"the tier's folder {folder} is a link or belongs to user {status.st_uid}, who could read and change "
                "what is in it; remove it, or choose another place"
            )
        if status.st_mode & 0o077:
            logger.warning("others could enter %s (mode %o): closed to them", folder, stat.S_IMODE(status.st_mode))
            os.chmod(folder, 0o700)
    except OSError as exc:
        raise ConfigError(f"the tier's folder {folder} cannot be created: {exc.strerror}") from exc


def _make_folders(folder: Path) -> None:
    if folder.exists():
        return
    _make_folders(folder.parent)
    with contextlib.suppress(FileExistsError):  # another worker was faster
        os.mkdir(folder, 0o700)


def _shard_of(name: BlockName) -> str:
    return name.digest[:1].hex()


def _is_ours(status: os.stat_result) -> bool:
    """Whether it is a regular file of this user."""
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _read_file(folder: int, name: str, parts: Sequence[Part]) -> int:
    # NOTE: without O_NONBLOCK, opening a pipe would wait for its writer.
    descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _HERE, dir_fd=folder)
    try:
        return os.preadv(descriptor, parts, 0)
    finally:
        os.close(descriptor)


def _write_file(folder: int, name: str, parts: Sequence[Part]) -> int:
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _HERE, 0o600, dir_fd=folder)
    try:
        return os.writev(descriptor, parts)
    finally:
        os.close(descriptor)


def _unlink(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    except OSError as exc:
        logger.warning("%s cannot be deleted: %s", name, exc)
