"""The bridge between flags and config: a flag has its field's name and its field's default, written once, there."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar

import typer

__all__ = [
    "HTTP",
    "LIMITS",
    "AllowedHosts",
    "ApiKeyFile",
    "BodyTimeout",
    "CorsOrigins",
    "HeaderTimeout",
    "Host",
    "MaxBodyBytes",
    "MaxConnections",
    "MaxHeaderBytes",
    "Port",
    "TenantsFile",
    "default_of",
    "from_flags",
]

Config = TypeVar("Config")

# Panels of `--help`, and the flags that all routers have.
HTTP = "HTTP"
LIMITS = "Limits and timeouts"

Host = Annotated[
    str, typer.Option(help="Address to listen on; 0.0.0.0 = reachable from outside.", rich_help_panel=HTTP)
]
Port = Annotated[int, typer.Option(help="TCP port; 0 = any free one.", rich_help_panel=HTTP)]
CorsOrigins = Annotated[
    list[str],
    typer.Option(
        help="Web origin whose pages may call, such as http://localhost:3000; give it several times; * = all.",
        rich_help_panel=HTTP,
    ),
]
AllowedHosts = Annotated[
    list[str],
    typer.Option(
        help="Host name that requests may be sent to; give it several times; * = all. On loopback, localhost and "
        "the addresses by which a machine reaches itself are allowed without it; elsewhere nothing is checked.",
        rich_help_panel=HTTP,
    ),
]
ApiKeyFile = Annotated[
    str,
    typer.Option(
        help="File of API keys: one per line, behind it its tenant, or * for an operator; empty = none is asked for.",
        rich_help_panel=HTTP,
    ),
]
MaxBodyBytes = Annotated[int, typer.Option(help="Largest request body.", rich_help_panel=LIMITS)]
MaxHeaderBytes = Annotated[int, typer.Option(help="Largest request header, with the URL.", rich_help_panel=LIMITS)]
MaxConnections = Annotated[
    int, typer.Option(help="Connections open at once, of each router process.", rich_help_panel=LIMITS)
]
HeaderTimeout = Annotated[float, typer.Option(help="Seconds a client has to send a header.", rich_help_panel=LIMITS)]
BodyTimeout = Annotated[
    float,
    typer.Option(help="Seconds it has to send a body, and 1 s more for each 16 KB.", rich_help_panel=LIMITS),
]
TenantsFile = Annotated[
    str,
    typer.Option(
        help="TOML file with weight, ttft_slo_ms and max_queue_share of tenants: docs/admission.md; empty = all alike.",
        rich_help_panel=LIMITS,
    ),
]


def default_of(config: type[Any], name: str) -> Any:
    """Default of this config field. Raises `KeyError` for a field that does not exist or has none."""
    default = {field.name: field.default for field in fields(config)}[name]
    if default is MISSING:
        raise KeyError(f"{config.__name__}.{name} has no default")
    return default


def from_flags(config: type[Config], flags: dict[str, Any], **given: Any) -> Config:
    """A config whose fields come from `given`, then from the flags of the same name, then from its defaults."""
    taken = {}
    for field in fields(config):  # type: ignore[arg-type]  # a dataclass, which TypeVar cannot say
        if field.name in flags:
            value = flags[field.name]
            taken[field.name] = tuple(value) if isinstance(value, list) else value
    return config(**(taken | given))
