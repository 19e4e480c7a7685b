"""The file of API keys: read whole, and changed by `tandem keys` under a lock, so that readers never see half of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from tandem.frontend.keys.api_key import ApiKey, key_digest, new_secret
from tandem.protocol.errors import ConfigError
from tandem.runtime.file_signature import Signature, open_at_once, signature_of_status
from tandem.scheduling.admission.key_limits import NO_LIMITS, KeyLimits

MAX_FILE_BYTES = 16 << 20  # 40,000 keys
_LOCK_TIMEOUT_S = 10.0
_LOCK_POLL_S = 0.02
_FORBIDDEN_MODE = stat.S_IWGRP | stat.S_IRWXO  # writers of the file could let anybody in; readers learn the tenants
_CREATE = "make it with: tandem keys create --file"


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Literal[1] = 1
    keys: list[ApiKey]


class StoredKeys(NamedTuple):
    """The content of a key file, and the signature that the file had then."""

    keys: list[ApiKey]
    signature: Signature


def read_keys(path: str) -> StoredKeys:
    """All keys of a file, including revoked ones. Raises `ConfigError`, which shows no hash."""
    try:
        with open(path, "rb", opener=open_at_once) as file:
            status = os.fstat(file.fileno())
            _check_file(path, status)
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        remedy = f"{_CREATE} {path}" if exc.errno == errno.ENOENT else "give a file that this user can read"
        raise ConfigError(f"api_key_file={path!r} cannot be read: {exc.strerror}; {remedy}") from exc
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"api_key_file={path!r} has more than {MAX_FILE_BYTES} bytes; give a smaller file")
    return StoredKeys(_parsed(path, content), signature_of_status(status))


def create_key(
    path: str,
    *,
    tenant: str,
    name: str = "",
    priority: int = 0,
    limits: KeyLimits = NO_LIMITS,
    expires: datetime | None = None,
) -> tuple[ApiKey, str]:
    """Add a key, and make the file if there is none. Returns it with the key itself, which is stored nowhere.

    The fields are as in `ApiKey`, and have been checked. Raises `ConfigError`.
    """
    with _locked(path) as real_path:
        keys = read_keys(real_path).keys if os.path.lexists(real_path) else []
        used = {key.id for key in keys}
        while (key_id := f"k-{secrets.token_hex(4)}") in used:
            pass
        secret = new_secret()
        key = ApiKey(
            id=key_id,
            sha256=key_digest(secret),
            tenant=tenant,
            created=_now(),
            name=name,
            priority=priority,
            limits=limits,
            expires=expires,
        )
        write_keys(real_path, [*keys, key])
    return key, secret


def revoke_key(path: str, key_id: str) -> ApiKey:
    """Revoke a key forever, and return it; one that is already revoked stays as it is. Raises `ConfigError`."""
    with _locked(path) as real_path:
        keys = read_keys(real_path).keys
        index = next((index for index, key in enumerate(keys) if key.id == key_id), None)
        if index is None:
            raise ConfigError(f"{path} has no key with the id {key_id!r}; see: tandem keys list --file {path}")
        if keys[index].revoked is None:
            keys[index] = msgspec.structs.replace(keys[index], revoked=_now())
            write_keys(real_path, keys)
        return keys[index]


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _check_file(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"api_key_file={path!r} is not a regular file; {_CREATE} FILE")
    if (mode := stat.S_IMODE(status.st_mode)) & _FORBIDDEN_MODE:
        raise ConfigError(
            f"api_key_file={path!r} has mode {mode:04o}, by which others can read or change it; run: chmod 600 {path}"
        )


def _parsed(path: str, content: bytes) -> list[ApiKey]:
    try:
        keys = msgspec.json.decode(content, type=_File).keys
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"api_key_file={path!r} is not an API key file: {exc}; {_CREATE} FILE") from exc
    ids: set[str] = set()
    digests: set[str] = set()
    for key in keys:
        if key.id in ids or key.sha256 in digests:
            raise ConfigError(f"api_key_file={path!r} has the key {key.id} twice; remove one of them")
        if not key.name.isprintable():
            raise ConfigError(
                f"api_key_file={path!r}: the name of the key {key.id} has control characters; remove them"
            )
        ids.add(key.id)
        digests.add(key.sha256)
    return keys


@contextlib.contextmanager
def _locked(path: str) -> Iterator[str]:
    """Be the only writer while the block runs. Yields the path of the file itself, with links resolved.

    The lock is a file of its own, because the file of keys is replaced by each change.
    """
    real_path = os.path.realpath(path)
    lock_path = f"{real_path}.lock"
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigError(
            f"{lock_path} cannot be created: {exc.strerror}; give a folder that you can write to"
        ) from exc
    try:
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        while not _try_lock(lock):
            if time.monotonic() > deadline_s:
                raise ConfigError(
                    f"{lock_path} has been held by another `tandem keys` for {_LOCK_TIMEOUT_S:g} s; try again"
                )
            time.sleep(_LOCK_POLL_S)
        yield real_path
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_keys(path: str, keys: Sequence[ApiKey]) -> None:
    """Replace the file in one step. Its owner may read it, and its group if that could before.

    The caller is the only writer. Raises `ConfigError`.
    """
    content = msgspec.json.format(msgspec.json.encode(_File(keys=list(keys))), indent=1)
    new_path = Path(f"{path}.new")
    try:
        new_path.unlink(missing_ok=True)  # left by a writer that was killed
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(new_path, flags, 0o600), "wb") as file:
            if os.path.exists(path):
                status = os.stat(path)
                os.fchown(file.fileno(), status.st_uid, status.st_gid)
                os.fchmod(file.fileno(), 0o600 | status.st_mode & stat.S_IRGRP)
            file.write(content + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new_path.replace(path)
    except OSError as exc:
        new_path.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {exc.strerror}; nothing was changed") from exc
    _sync_folder(path)


def _sync_folder(path: str) -> None:
    """Make a change outlive a loss of power, where the file system can do that."""
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.fsync(folder)
    finally:
        os.close(folder)
