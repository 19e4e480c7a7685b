"""What each tenant may have: weight, default TTFT SLO, largest share of the queue, workers, cache; from a TOML file.

[default]                # for each tenant that is not named below
weight = 1.0
[tenants.search]
weight = 4.0             # four times the worker seconds of a tenant of weight 1, while both have requests waiting
ttft_slo_ms = 800
itl_slo_ms = 50          # mean gap between tokens; the autoscaler aims at it
max_queue_share = 0.5    # of max_queued_prompt_tokens
workers = ["prefill-0", "decode-*"]  # glob patterns of the worker ids it may use; default: all workers
shared_cache = true      # it shares cached prefixes with all other tenants that set this
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta

from tandem.protocol.digest import CacheScope, cache_scope
from tandem.protocol.errors import ConfigError
from tandem.protocol.toml_file import checked_as, read_toml
from tandem.scheduling.request import DEFAULT_TENANT

__all__ = ["OTHER_TENANTS", "TENANT_NAME", "CacheScopes", "TenantPolicy", "Tenants", "load_tenants"]

OTHER_TENANTS = "other"  # the label in metrics of all tenants that the file does not name: their number is unbounded
TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SHARED_CACHE = ""  # stands for all tenants that share their caches; no tenant has this name


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPolicy:
    """The limits of one tenant."""

    weight: float = 1.0
    ttft_slo_s: float | None = None  # SLO of requests that set none
    itl_slo_s: float | None = None  # mean gap between tokens, at which the autoscaler aims
    max_queue_share: float = 1.0  # share of max_queued_prompt_tokens that its requests may have in the router's queue
    workers: tuple[str, ...] = ()  # glob patterns of the worker ids it may use; () = all workers
    shared_cache: bool = False  # whether it shares cached prefixes with the other tenants that set this


@dataclass(frozen=True, slots=True)
class Tenants:
    """The policies of all tenants."""

    default: TenantPolicy = TenantPolicy()
    named: Mapping[str, TenantPolicy] = field(default_factory=dict)

    def policy(self, tenant: str) -> TenantPolicy:
        """The policy of this tenant."""
        return self.named.get(tenant, self.default)

    def label(self, tenant: str) -> str:
        """The tenant's name in metrics."""
        return tenant if tenant == DEFAULT_TENANT or tenant in self.named else OTHER_TENANTS


@dataclass(frozen=True, slots=True)
class CacheScopes:
    """Decides whose cached blocks a request may use."""

    tenants: Tenants
    has_keys: bool  # API keys tell tenants apart; without keys all clients share one scope

    def of(self, tenant: str, cache_salt: str) -> CacheScope:
        """The scope of a tenant's requests with this salt; "" = no salt."""
        if not self.has_keys:
            return cache_scope(cache_salt)
        return cache_scope(cache_salt, _SHARED_CACHE if self.tenants.policy(tenant).shared_cache else tenant)


def load_tenants(path: str) -> Tenants:
    """The policies in a TOML file; without a path all tenants are alike.

    Raises `ConfigError` with file, key, value and remedy.
    """
    if not path:
        return Tenants()
    content = read_toml("tenants", path)
    if not content:  # a pipe that was read before is empty too
        raise ConfigError(f"tenants={path!r} is empty; write [default] or [tenants.NAME], or leave the file out")
    for key in content.keys() - {"default", "tenants"}:
        raise ConfigError(f"{path}: {key} is unknown; use [default] and [tenants.NAME]")
    default = _policy(path, "default", content.get("default", {}), TenantPolicy())
    tables = content.get("tenants", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: tenants = {tables!r} must be tables; write [tenants.NAME]")
    for name in tables:
        if not TENANT_NAME.fullmatch(name):
            raise ConfigError(f"{path}: tenants.{name!r} must be 1 to 64 letters, digits, '.', '_' or '-'; rename it")
    named = {name: _policy(path, f"tenants.{name}", table, default) for name, table in tables.items()}
    return Tenants(default, named)


def _policy(path: str, where: str, table: Any, default: TenantPolicy) -> TenantPolicy:
    """The policy of one table; what the table leaves out is as in `default`."""
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {where} = {table!r} must be a table; write [{where}]")
    changes: dict[str, Any] = {}
    for key, value in table.items():
        if key not in _KEYS:
            raise ConfigError(f"{path}: {where}.{key} is unknown; use {', '.join(_KEYS)}")
        changes[key] = checked_as(_KEYS[key], value, f"{path}: {where}.{key} = {value!r}")
    for name in ("ttft", "itl"):
        if f"{name}_slo_ms" in changes:
            changes[f"{name}_slo_s"] = changes.pop(f"{name}_slo_ms") / 1e3
    return replace(default, **changes)


# Types of the keys in a table; the description is what an error says that a value must be.
_KEYS: dict[str, Any] = {
    "weight": Annotated[float, Meta(gt=0, le=1e6, description="a number above 0, at most 1000000, such as 1.0")],
    "ttft_slo_ms": Annotated[
        float, Meta(gt=0, le=1e9, description="milliseconds above 0, such as 2000; leave it out for none")
    ],
    "itl_slo_ms": Annotated[
        float, Meta(gt=0, le=1e9, description="milliseconds above 0, such as 50; leave it out for none")
    ],
    "max_queue_share": Annotated[float, Meta(gt=0, le=1, description="above 0, at most 1, such as 0.5")],
    "workers": Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(
            min_length=1,
            description='a list of worker ids or patterns, such as ["prefill-0", "decode-*"]; leave it out for all '
            "workers",
        ),
    ],
    "shared_cache": Annotated[bool, Meta(description="true or false")],
}
