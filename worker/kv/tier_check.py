"""Checks the tiers' settings before anything is started: their kinds, key, folders, stores. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from tandem.protocol.config import TierConfig, cache_folder
from tandem.protocol.user_file import expanded


def check_tiers(config: TierConfig, *, is_local: bool) -> None:
    """Raise `ConfigError` for settings with which no worker could open its tiers.

    `is_local` says that the workers run on this machine: then files and folders are checked too. None is left behind.
    """
    from tandem.kv_transfer.tiers.key import load_key  # late: `--help` need not wait for what these import
    from tandem.kv_transfer.tiers.kinds import check_spec

    if is_local and config.kv_key_file:
        load_key(store_key_path(config), may_make=False)
    for spec in config.specs:
        check_spec(spec, is_local=is_local)


def store_key_path(config: TierConfig) -> Path:
    """File with the key of all stores beyond the worker's memory."""
    return Path(expanded("kv_key_file", config.kv_key_file)) if config.kv_key_file else cache_folder() / "kv-key"
