"""The key of the persistent tiers. Only its holders can add blocks to them.

It is in a file that only its user can read. All workers that share a store have the same key, and it outlives them as
the blocks do. Each key has its own folders in a store, so no worker deletes blocks that only others can check.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from tandem.protocol.errors import ConfigError

_MIN_BYTES = 32
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class StoreKey:
    """A secret of 32 bytes or more, from which keys and folder names are derived."""

    secret: bytes = field(repr=False)
    encrypts: bool = False  # whether blocks are encrypted with it, or only authenticated

    def folder_name(self, namespace: bytes) -> str:
        """The folder of a store that holds the blocks of this namespace and key, encrypted or not."""
        purpose = b"tandem.kv.nameE" if self.encrypts else b"tandem.kv.name"
        return hashlib.blake2b(namespace, key=self.derive(purpose), digest_size=16).hexdigest()

    def derive(self, purpose: bytes) -> bytes:
        """A key of 32 bytes for one purpose, which has at most 16 bytes."""
        return hashlib.blake2b(self.secret, digest_size=32, person=purpose).digest()


def load_key(path: Path, *, may_make: bool, encrypts: bool = False) -> StoreKey:
    """The key in this file. A missing file is created if `may_make`. Raises `ConfigError`."""
    try:
        if may_make and not path.exists():
            _make(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            secret = os.read(descriptor, _MAX_BYTES)
        finally:
            os.close(descriptor)
    except FileNotFoundError as exc:
        raise ConfigError(f"kv_key_file={path} does not exist; {_how_to_make(path)}") from exc
    except OSError as exc:
        raise ConfigError(
            f"kv_key_file={path} cannot be read or created: {exc.strerror}; give a file that this user can read"
        ) from exc
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"kv_key_file={path} is not a regular file; {_how_to_make(path)}")
    if len(secret) < _MIN_BYTES:
        raise ConfigError(
            f"kv_key_file={path} has {len(secret)} bytes, and needs {_MIN_BYTES} or more; {_how_to_make(path)}"
        )
    # A file of root may be readable by our group: that is how Kubernetes mounts a Secret.
    forbidden = 0o077 if status.st_uid == os.geteuid() else 0o027
    if status.st_mode & forbidden or status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"kv_key_file={path} (mode {stat.S_IMODE(status.st_mode):o}, owner {status.st_uid}) is open to others, who "
            f"could use it to put their own KV into the tiers; make it private: chown it, and chmod 600 {path}"
        )
    return StoreKey(secret, encrypts)


def _how_to_make(path: Path) -> str:
    return f"make it with: (umask 077; head -c {_MIN_BYTES} /dev/urandom >{path})"


def _make(path: Path) -> None:
    """Create the file whole, or leave the one that another process has created meanwhile."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(_MIN_BYTES))
    finally:
        os.close(descriptor)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        os.unlink(unfinished)
