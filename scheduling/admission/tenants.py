"""What each tenant may have: weight, default TTFT SLO, share of the queue, workers, cache, pins; from a TOML file.

[default]                # for each tenant that is not named below
weight = 1.0
[tenants.search]
weight = 4.0             # four times the worker seconds of a tenant of weight 1, while both have requests waiting
ttft_slo_ms = 800
itl_slo_ms = 50          # mean gap between tokens; the autoscaler aims at it
max_queue_share = 0.5    # of max_queued_prompt_tokens
workers = ["prefill-0", "decode-*"]  # glob patterns of the worker ids it may use; default: all workers
shared_cache = true      # it shares cached prefixes with all other tenants that set this
[pins]                   # of all tenants: the values here are the defaults
max_pins = 1024          # at one time; 0 = no pins
max_pins_per_tenant = 128
pin_tenant_share = 0.5   # of --pin-share: what the pins of one tenant may occupy
max_pin_ttl_s = 3600
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PinQuotas:
    """Bounds of pinned prefixes, beside the share of the pool and the tiers that they may occupy (`--pin-share`)."""

    max_pins: int = 1024  # at one time
    max_pins_per_tenant: int = 128
    pin_tenant_share: float = 0.5  # of what all pins may occupy, for those of one tenant
    max_pin_ttl_s: float = 3600.0  # longest time that a pin may last


@dataclass(frozen=True, slots=True)
class Tenants:
    """The policies of all tenants."""

    default: TenantPolicy = TenantPolicy()
    named: Mapping[str, TenantPolicy] = field(default_factory=dict)
    pins: PinQuotas = PinQuotas()

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
        raise ConfigError(
            f"tenants={path!r} is empty; write [default], [tenants.NAME] or [pins], or leave the file out"
        )
    for key in content.keys() - {"default", "tenants", "pins"}:
        raise ConfigError(f"{path}: {key} is unknown; use [default], [tenants.NAME] and [pins]")
    default = _policy(path, "default", content.get("default", {}), TenantPolicy())
    tables = content.get("tenants", {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: tenants = {tables!r} must be tables; write [tenants.NAME]")
    for name in tables:
        if not TENANT_NAME.fullmatch(name):
            raise ConfigError(f"{path}: tenants.{name!r} must be 1 to 64 letters, digits, '.', '_' or '-'; rename it")
    named = {name: _policy(path, f"tenants.{name}", table, default) for name, table in tables.items()}
    return Tenants(default, named, PinQuotas(**_checked(path, "pins", content.get("pins", {}), _PIN_KEYS)))


def _checked(path: str, where: str, table: Any, types: Mapping[str, Any]) -> dict[str, Any]:
    """The values of one table, in the types of its keys."""
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {where} = {table!r} must be a table; write [{where}]")
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in types:
            raise ConfigError(f"{path}: {where}.{key} is unknown; use {', '.join(types)}")
        values[key] = checked_as(types[key], value, f"{path}: {where}.{key} = {value!r}")
    return values


def _policy(path: str, where: str, table: Any, default: TenantPolicy) -> TenantPolicy:
    """The policy of one table; what the table leaves out is as in `default`."""
    changes = _checked(path, where, table, _KEYS)
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
_NUM_PINS = Annotated[int, Meta(ge=0, le=2**24, description="a whole number from 0 to 16777216; 0 = no pins")]
_PIN_KEYS: dict[str, Any] = {
    "max_pins": _NUM_PINS,
    "max_pins_per_tenant": _NUM_PINS,
    "pin_tenant_share": Annotated[float, Meta(gt=0, le=1, description="above 0, at most 1, such as 0.5")],
    "max_pin_ttl_s": Annotated[
        float, Meta(gt=0, le=366 * 86_400, description="seconds above 0, at most 31622400, such as 3600")
    ],
}
