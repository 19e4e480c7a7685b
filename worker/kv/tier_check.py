"""Checks the tiers' settings before anything is started: key, folders, object store. Needs no torch."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tandem.protocol.config import TierConfig, cache_folder
from tandem.protocol.errors import ConfigError
from tandem.protocol.user_file import expanded

logger = logging.getLogger(__name__)


def check_tiers(config: TierConfig, *, is_local: bool) -> None:
    """Raise `ConfigError` for settings with which no worker could open its tiers.

    `is_local` says that the workers run on this machine: then files and folders are checked too. None is left behind.
    """
    if is_local and config.kv_key_file:
        from tandem.kv_transfer.tiers.key import load_key

        load_key(store_key_path(config), may_make=False)
    if is_local and config.disk_cache_path:
        _check_folder("disk_cache_path", Path(expanded("disk_cache_path", config.disk_cache_path)))
    if config.object_cache_url.startswith("file:"):
        url = urlsplit(config.object_cache_url)
        if url.netloc not in ("", "localhost"):  # it would be taken for a host, and left out
            raise ConfigError(
                f"object_cache_url={config.object_cache_url!r} names the host {url.netloc!r}; a folder has three "
                f"slashes: file:///{url.netloc}{url.path}"
            )
        if is_local:
            _check_folder("object_cache_url", Path(unquote(url.path)))
    elif config.object_cache_url:
        from tandem.kv_transfer.tiers.object import check_url

        check_url(config.object_cache_url)


def store_key_path(config: TierConfig) -> Path:
    """File with the key of disk and object store."""
    return Path(expanded("kv_key_file", config.kv_key_file)) if config.kv_key_file else cache_folder() / "kv-key"


def _check_folder(name: str, folder: Path) -> None:
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
