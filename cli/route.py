"""`tandem route`: the router alone, in front of engines that run elsewhere. Needs neither torch nor Ray."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.cli.config_flags import (
    HTTP,
    LIMITS,
    AllowedHosts,
    ApiKeyFile,
    BodyTimeout,
    CorsOrigins,
    HeaderTimeout,
    Host,
    MaxBodyBytes,
    MaxConnections,
    MaxHeaderBytes,
    Port,
    TenantsFile,
    default_of,
    from_flags,
)
from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import ConfigError
from tandem.router.engines.config import EnginesConfig, FleetFile, load_fleet
from tandem.router.http.api_keys import load_api_keys
from tandem.router.http.listening import listening
from tandem.scheduling.tenants import load_tenants

__all__ = ["ADMIN_TOKEN_ENV", "route"]

ADMIN_TOKEN_ENV = "TANDEM_ADMIN_TOKEN"

_ENGINES = "Engines"


def route(
    ctx: typer.Context,
    engines: Annotated[
        Path | None,
        typer.Option(help="TOML file of the engines; see docs/engines.md.", rich_help_panel=_ENGINES),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the token of /v1/engines; without it, and without {ADMIN_TOKEN_ENV}, that API is off.",
            rich_help_panel=_ENGINES,
        ),
    ] = None,
    allow_local_engines: Annotated[
        bool,
        typer.Option(
            help="Let engines added over /v1/engines be on this machine too, or at link-local addresses.",
            rich_help_panel=_ENGINES,
        ),
    ] = default_of(EnginesConfig, "allow_local_engines"),
    local_prefill: Annotated[
        bool,
        typer.Option(
            help="Let a decode engine compute a prompt itself where that is cheaper than a handoff.",
            rich_help_panel=_ENGINES,
        ),
    ] = default_of(RouterConfig, "local_prefill"),
    host: Host = default_of(RouterConfig, "host"),
    port: Port = default_of(RouterConfig, "port"),
    cors_allow_origins: CorsOrigins = list(default_of(RouterConfig, "cors_allow_origins")),  # noqa: B006  # typer copies
    allowed_hosts: AllowedHosts = list(default_of(RouterConfig, "allowed_hosts")),  # noqa: B006
    router_processes: Annotated[
        int, typer.Option(help="Processes that serve the port together, about one per core.", rich_help_panel=HTTP)
    ] = default_of(RouterConfig, "router_processes"),
    api_key_file: ApiKeyFile = "",
    max_body_bytes: MaxBodyBytes = default_of(RouterConfig, "max_body_bytes"),
    max_header_bytes: MaxHeaderBytes = default_of(RouterConfig, "max_header_bytes"),
    max_connections: MaxConnections = default_of(RouterConfig, "max_connections"),
    header_timeout_s: HeaderTimeout = default_of(RouterConfig, "header_timeout_s"),
    body_timeout_s: BodyTimeout = default_of(RouterConfig, "body_timeout_s"),
    max_queued_prompt_tokens: Annotated[
        int,
        typer.Option(help="Prompt tokens waiting for one model; above it requests get 429.", rich_help_panel=LIMITS),
    ] = default_of(RouterConfig, "max_queued_prompt_tokens"),
    max_worker_queue_s: Annotated[
        float,
        typer.Option(
            help="Predicted seconds of prompts at an engine above which others wait in the router, where the order "
            "can change; 0 = by its steps. Very large = engines queue for themselves.",
            rich_help_panel=LIMITS,
        ),
    ] = default_of(RouterConfig, "max_worker_queue_s"),
    tenants: TenantsFile = "",
    max_attempts: Annotated[
        int, typer.Option(help="Engines one request is tried on.", rich_help_panel=LIMITS)
    ] = default_of(EnginesConfig, "max_attempts"),
    connect_timeout_s: Annotated[
        float, typer.Option(help="Seconds to connect to an engine.", rich_help_panel=LIMITS)
    ] = default_of(EnginesConfig, "connect_timeout_s"),
    probe_interval_s: Annotated[
        float, typer.Option(help="Seconds between two looks at an engine.", rich_help_panel=LIMITS)
    ] = default_of(EnginesConfig, "probe_interval_s"),
    probe_timeout_s: Annotated[
        float, typer.Option(help="Seconds an engine has to answer one.", rich_help_panel=LIMITS)
    ] = default_of(EnginesConfig, "probe_timeout_s"),
    max_failed_probes: Annotated[
        int, typer.Option(help="Looks in a row that fail before it counts as gone.", rich_help_panel=LIMITS)
    ] = default_of(EnginesConfig, "max_failed_probes"),
    breaker_failures: Annotated[
        int, typer.Option(help="Failed requests in a row that open an engine's circuit.", rich_help_panel=LIMITS)
    ] = default_of(EnginesConfig, "breaker_failures"),
    breaker_open_s: Annotated[
        float, typer.Option(help="Seconds it stays open at first.", rich_help_panel=LIMITS)
    ] = default_of(EnginesConfig, "breaker_open_s"),
    breaker_max_open_s: Annotated[
        float, typer.Option(help="Seconds it stays open at most.", rich_help_panel=LIMITS)
    ] = default_of(EnginesConfig, "breaker_max_open_s"),
    worker_timeout_s: Annotated[
        float,
        typer.Option(
            help="Seconds without a health check before running answers are given up.", rich_help_panel=LIMITS
        ),
    ] = default_of(RouterConfig, "worker_timeout_s"),
    request_timeout_s: Annotated[
        float, typer.Option(help="Longest silence of an engine within a request, in seconds.", rich_help_panel=LIMITS)
    ] = default_of(RouterConfig, "request_timeout_s"),
    drain_timeout_s: Annotated[
        float, typer.Option(help="Seconds running answers get to finish.", rich_help_panel=LIMITS)
    ] = default_of(RouterConfig, "drain_timeout_s"),
) -> int:
    """Route requests to other OpenAI-compatible servers (vLLM, SGLang, llama.cpp) until Ctrl-C.

    Each request goes where its answer is predicted soonest: by what every engine has cached and how busy it is.

    [bold]Example[/bold]

    [cyan]tandem route --engines engines.toml[/cyan]
    """
    flags: dict[str, Any] = dict(ctx.params)
    router, config = from_flags(RouterConfig, flags), from_flags(EnginesConfig, flags)
    policies, api_keys = load_tenants(tenants), load_api_keys(api_key_file)
    token = admin_token(admin_token_file)
    fleet = load_fleet(engines) if engines is not None else FleetFile([], {})
    if not fleet.engines and not token:
        raise ConfigError(
            "there are no engines and no way to add any; give --engines FILE, or --admin-token-file to add them "
            "over POST /v1/engines"
        )
    with listening(host, port):
        pass  # asked before anything is loaded
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would miss torch, which is not needed
    from tandem.cluster.route import (  # here: FastAPI takes half a second; --help need not wait
        RouterSetup,
        serve_engines,
    )

    return serve_engines(
        RouterSetup(
            fleet_file=fleet, router=router, engines=config, admin_token=token, api_keys=api_keys, tenants=policies
        )
    )


def admin_token(path: Path | None) -> str:
    """The token in the file, else in the environment, else "". Raises `ConfigError` for a file without one."""
    if path is None:
        return os.environ.get(ADMIN_TOKEN_ENV, "").strip()
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"admin_token_file={path} cannot be read: {exc}") from exc
    if not token:
        raise ConfigError(f"admin_token_file={path} is empty; put a token into it: openssl rand -hex 32")
    return token
