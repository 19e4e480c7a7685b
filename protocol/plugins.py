"""Parts that other packages may add, by name: kinds of KV stores, KV transports and eviction policies.

A package names its part in its metadata, and the name is then valid wherever ours are:

    [project.entry-points."tandem.kv_stores"]
    acme = "acme_kv:AcmeStore"

Ours are in the same tables. A part is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from tandem.protocol.errors import ConfigError
from tandem.protocol.fault_boundary import outcome_of

T = TypeVar("T")


class Plugins:
    """The parts of one entry-point group. A package cannot take a name of ours.

    In every method `setting` is what an error names: the setting and its value.
    """

    def __init__(self, group: str, ours: Mapping[str, str]) -> None:
        self._group = group
        self._ours = {name: EntryPoint(name, value, group) for name, value in ours.items()}

    @property
    def ours(self) -> list[str]:
        """The names of our own parts."""
        return list(self._ours)

    def check(self, name: str, setting: str) -> None:
        """Raise `ConfigError` unless there is one part of this name. Imports nothing."""
        self._find(name, setting)

    def load(self, name: str, setting: str) -> Any:
        """The part of this name. Raises `ConfigError` if there is none, several, or one that cannot be imported."""
        return self.construct(name, setting, self._find(name, setting).load)

    def construct(self, name: str, setting: str, make: Callable[[], T]) -> T:
        """What `make` makes of a part. Whatever another package raises there becomes a `ConfigError` that names it."""
        if name in self._ours:
            return make()
        made = foreign_outcome(make)
        if not isinstance(made, Exception):
            return made
        if isinstance(made, ConfigError):
            raise made
        package = _package(self._find(name, setting))
        raise ConfigError(
            f"{setting}: {name!r} of the package {package} cannot be used: {made!r}; repair it, or leave it out"
        ) from made

    def _find(self, name: str, setting: str) -> EntryPoint:
        if name in self._ours:
            return self._ours[name]
        installed = entry_points(group=self._group)
        found = list(installed.select(name=name))
        if not found:
            known = ", ".join(sorted({*self._ours, *installed.names}))
            raise ConfigError(
                f"{setting}: {name!r} is unknown; choose one of {known}, or install a package that has it"
            )
        if len(found) > 1:
            packages = " and ".join(sorted(map(_package, found)))
            raise ConfigError(f"{setting}: the packages {packages} both have a {name!r}; uninstall one of them")
        return found[0]


def foreign_outcome(function: Callable[..., T], *arguments: object) -> T | Exception:
    """What code of another package returns, or the exception that it raises."""
    return outcome_of(function, *arguments)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module


OBJECT_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "file")
KV_STORES = Plugins(
    "tandem.kv_stores",  # scheme of a tier -> a `BlockStore` class, or what makes one of `StoreSettings`
    {
        "host": "tandem.kv_transfer.tiers.memory:MemoryStore",
        "numa": "tandem.kv_transfer.tiers.numa:NumaStore",
        "dax": "tandem.kv_transfer.tiers.dax:DaxStore",
        "disk": "tandem.kv_transfer.tiers.disk:DiskStore",
        **dict.fromkeys(OBJECT_SCHEMES, "tandem.kv_transfer.tiers.object:ObjectStore"),
    },
)
KV_TRANSPORTS = Plugins(
    "tandem.kv_transports",  # name -> what makes a `Transport`: see `create_transport`
    {
        "nccl": "tandem.kv_transfer.transport.collective:CollectiveTransport",
        "nixl": "tandem.kv_transfer.transport.nixl:NixlTransport",
    },
)
EVICTION_POLICIES = Plugins(
    "tandem.eviction_policies",  # name -> makes the `EvictionPolicy` of a tier with room for this number of keys
    {
        "hit-density": "tandem.kv_transfer.eviction.hit_density:HitDensity",
        "lru": "tandem.kv_transfer.eviction.lru:LRU",
    },
)
