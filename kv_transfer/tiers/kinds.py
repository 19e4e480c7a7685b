"""Checks and opens the store of a tier, of whatever kind: ours, or that of another package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.kv_transfer.tiers.base import BlockStore, StoreSettings
from tandem.kv_transfer.tiers.foreign import ForeignStore
from tandem.kv_transfer.tiers.seal import FOOTER_BYTES
from tandem.protocol.config import COMMON_OPTIONS, TierSpec
from tandem.protocol.errors import ConfigError
from tandem.protocol.plugins import EVICTION_POLICIES, KV_STORES


def check_spec(spec: TierSpec, *, is_local: bool) -> None:
    """Raise `ConfigError` for a tier that cannot be opened; with `is_local`, on this machine. Makes nothing."""
    kind: Any = KV_STORES.load(spec.scheme, spec.setting)
    known = (*COMMON_OPTIONS, *getattr(kind, "options", ()))
    for option, value in spec.options.items():
        if option not in known:
            raise ConfigError(
                f"{spec.setting}: {option}={value!r} is no option of {spec.scheme}; it takes {', '.join(known)}"
            )
    EVICTION_POLICIES.check(spec.eviction, spec.setting)
    check = getattr(kind, "check", None)
    if check is not None:
        KV_STORES.construct(spec.scheme, spec.setting, lambda: check(spec, is_local=is_local))


def open_store(settings: StoreSettings) -> BlockStore:
    """The store. Raises `ConfigError` if it cannot be used."""
    spec = settings.spec
    kind: Any = KV_STORES.load(spec.scheme, spec.setting)
    make = getattr(kind, "open", kind)
    if spec.scheme in KV_STORES.ours:
        store: BlockStore = make(settings)
        return store

    inner = replace(settings, block_bytes=settings.block_bytes + FOOTER_BYTES)
    return KV_STORES.construct(spec.scheme, spec.setting, lambda: ForeignStore(make(inner), settings))


def is_shared_by_all(spec: TierSpec) -> bool:
    """Whether workers of all hosts are meant to find each other's blocks there."""
    kind: Any = KV_STORES.load(spec.scheme, spec.setting)
    return getattr(kind, "shared_by", "") == "all" and spec.scheme != "file"
