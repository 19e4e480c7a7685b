"""`tandem route`: the router alone, in front of engines that run elsewhere. Needs neither torch nor Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tandem.cli.config_flags import Values, fields_by_panel, with_settings
from tandem.frontend.http.listening import listening
from tandem.frontend.http.tls import check_server_tls
from tandem.frontend.keys.audit_log import check_audit_log
from tandem.frontend.keys.key_file import KeyFile
from tandem.protocol.config import ExternalEnginesConfig, RouterConfig, RouterFiles
from tandem.protocol.config.panels import ENGINES
from tandem.protocol.errors import ConfigError
from tandem.protocol.settings import Setting, check_settings, from_values
from tandem.protocol.user_file import read_text
from tandem.router.engines.config import FleetFile, load_fleet
from tandem.router.engines.tls import check_engine_tls
from tandem.scheduling.admission.tenants import load_tenants

ADMIN_TOKEN_ENV = "TANDEM_ADMIN_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFiles:
    """Files that `tandem route` reads at the start."""

    engines: Annotated[str, Setting("TOML file of the engines: docs/engines.md.", ENGINES, metavar="FILE")] = ""
    admin_token_file: Annotated[
        str,
        Setting(
            f"File with the token for /v1/engines. Without it, and without {ADMIN_TOKEN_ENV}, that API is off.",
            ENGINES,
            metavar="FILE",
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_settings(self)


ROUTE_FIELDS = fields_by_panel("route", EngineFiles, RouterConfig, RouterFiles, ExternalEnginesConfig)


@with_settings(ROUTE_FIELDS)
def route(values: Values) -> int:
    """Route requests to other OpenAI-compatible servers (vLLM, SGLang, llama.cpp) until Ctrl-C.

    Each request goes to the engine whose answer is predicted to come soonest, by what every engine has cached and how
    busy it is.

    [bold]Examples[/bold]

    [cyan]tandem route --engines engines.toml[/cyan]

    [cyan]tandem route --config router.toml --port 8080[/cyan]
    """
    router, engines = from_values(RouterConfig, values), from_values(ExternalEnginesConfig, values)
    files, engine_files = from_values(RouterFiles, values), from_values(EngineFiles, values)
    policies, key_file = load_tenants(files.tenants), KeyFile(files.api_key_file, router.audit_log)
    check_audit_log(router.audit_log)
    check_server_tls(router)
    token = admin_token(engine_files.admin_token_file)
    fleet = load_fleet(Path(engine_files.engines)) if engine_files.engines else FleetFile([], {})
    check_engine_tls(fleet.engines, engines)
    if not fleet.engines and not token:
        raise ConfigError(
            "there are no engines and no way to add any; give --engines FILE, or --admin-token-file to add them "
            "over POST /v1/engines"
        )
    with listening(router.host, router.port):
        pass  # a port in use is reported before anything is loaded
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would miss torch, which is not needed
    from tandem.cluster.engine_frontend import (
        RouterSetup,  # here: FastAPI takes half a second, and --help need not wait
    )
    from tandem.cluster.route import serve_engines

    return serve_engines(
        RouterSetup(fleet_file=fleet, router=router, engines=engines, admin_token=token, tenants=policies), key_file
    )


def admin_token(path: str) -> str:
    """The token in the file, else in the environment, else "". Raises `ConfigError` for a file without one."""
    token = (read_text("admin_token_file", path) if path else os.environ.get(ADMIN_TOKEN_ENV, "")).strip()
    where = f"admin_token_file={path!r}" if path else ADMIN_TOKEN_ENV
    if path and not token:
        raise ConfigError(f"{where} is empty; put a token into it: openssl rand -hex 32")
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            f"{where} must be one line of visible ASCII, to go into a header; make it with: openssl rand -hex 32"
        )
    return token
