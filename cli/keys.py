"""`tandem keys`: make, list and revoke the API keys of a server, which follows their file while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.cli.options import print_whole
from tandem.frontend.keys.api_key import MAX_NAME_CHARS, OPERATOR, ApiKey
from tandem.frontend.keys.audit_log import append_line, audit_line, check_audit_log
from tandem.frontend.keys.store import create_key, read_keys, revoke_key
from tandem.protocol.errors import ConfigError
from tandem.protocol.user_file import expanded
from tandem.scheduling.admission.key_limits import MAX_LIMIT, KeyLimits
from tandem.scheduling.admission.tenants import TENANT_NAME
from tandem.scheduling.request import DEFAULT_TENANT

app = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True, rich_markup_mode="rich")

KeyFileOption = Annotated[str, typer.Option("--file", help="File of the keys, as in --api-key-file.", metavar="FILE")]
AuditOption = Annotated[
    str,
    typer.Option("--audit-log", help="File to which a line of JSON is appended, as for the server.", metavar="FILE"),
]
_DURATION = re.compile(r"(\d{1,9})([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@app.callback()
def _keys() -> None:
    """Make, list and revoke the API keys of a server."""


@app.command()
def create(
    file: KeyFileOption,
    name: Annotated[str, typer.Option(help="What the key is for; shown in the list.")] = "",
    tenant: Annotated[str, typer.Option(help=f"Tenant of its requests; {DEFAULT_TENANT} if not given.")] = "",
    operator: Annotated[
        bool, typer.Option("--operator", help="A key that may name any tenant and sees what all tenants do.")
    ] = False,
    priority: Annotated[
        int,
        typer.Option(min=-(2**31), max=2**31 - 1, help="Priority of requests that name none; lower is more urgent."),
    ] = 0,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=1, max=MAX_LIMIT, help="Only POST requests count.", show_default=False)
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_LIMIT, help="Tokens of prompts and answers together.", show_default=False),
    ] = None,
    concurrent_requests: Annotated[
        int | None, typer.Option(min=1, max=MAX_LIMIT, help="At one time.", show_default=False)
    ] = None,
    pins: Annotated[
        int | None,
        typer.Option(
            min=0, max=MAX_LIMIT, help="Pins that live at one time; 0 = it may pin nothing.", show_default=False
        ),
    ] = None,
    expires: Annotated[
        str, typer.Option(help="When it ends: after a time such as 90d, 12h or 30m, or at a date such as 2030-01-31.")
    ] = "",
    audit_log: AuditOption = "",
) -> int:
    """Make a key, and the file if there is none. The key is printed once and stored nowhere.

    Limits hold for all router processes together: docs/api_keys.md.

    [bold]Examples[/bold]

    [cyan]tandem keys create --file keys.json --name laptop --tenant search --requests-per-minute 600[/cyan]

    [cyan]tandem keys create --file keys.json --name prometheus --operator --expires 365d[/cyan]
    """
    fields: dict[str, Any] = {
        "tenant": _tenant(tenant, is_operator=operator),
        "name": _name(name),
        "priority": priority,
        "limits": KeyLimits(
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            concurrent_requests=concurrent_requests,
            pins=pins,
        ),
        "expires": _expiry(expires, datetime.now(UTC)),
    }
    _make_and_show(file, audit_log, fields)
    return 0


def _make_and_show(file: str, audit_log: str, fields: dict[str, Any]) -> None:
    with _audited("key.create", expanded("audit_log", audit_log)) as targets:
        key, secret = create_key(expanded("file", file), **fields)
        targets.append(key.id)
        typer.echo(secret)  # even if the audit log cannot be written after all
    Console(stderr=True, highlight=False).print(
        f"This is the key {escape(_title(key))}. It is shown this once: only its hash is in {escape(file)}.",
        soft_wrap=True,
    )


@app.command("list")
def list_keys(
    file: KeyFileOption,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, without hashes.")] = False,
) -> int:
    """Show all keys: ids, names, tenants, limits and states, but nothing that could be used as a key."""
    keys, now_s = read_keys(expanded("file", file)).keys, time.time()
    shown = [_shown(key, now_s) for key in keys]
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
        return 0
    table = Table("id", "name", "tenant", "state", "priority", "limits", "created", "expires", "revoked")
    for one in shown:
        limits = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in one["limits"].items())
        columns = (one["id"], one["name"], one["tenant"], one["state"], str(one["priority"]), limits)
        table.add_row(*map(escape, columns), *(one[time] or "" for time in ("created", "expires", "revoked")))
    print_whole(table, Console(highlight=False))
    return 0


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key, as in the list.")],
    file: KeyFileOption,
    audit_log: AuditOption = "",
) -> int:
    """Revoke a key forever. A running server refuses it within about a second; answers that have begun go on."""
    with _audited("key.revoke", expanded("audit_log", audit_log)) as targets:
        targets.append(key_id)
        key = revoke_key(expanded("file", file), key_id)
    Console(stderr=True, highlight=False).print(f"The key {escape(_title(key))} is revoked.", soft_wrap=True)
    return 0


@contextlib.contextmanager
def _audited(action: str, audit_log: str) -> Iterator[list[str]]:
    """Write the outcome of the block to the audit log, with the keys that it adds to the list. Raises `ConfigError`."""
    check_audit_log(audit_log)
    targets: list[str] = []
    result = "failed"
    try:
        yield targets
        result = "ok"
    finally:
        if audit_log:
            client = f"uid {os.getuid()}"
            line = audit_line(action, target=" ".join(targets), result=result, client=client)
            try:
                append_line(audit_log, line)
            except OSError as exc:
                failure = f"audit_log={audit_log!r} cannot be written: {exc.strerror}"
                raise ConfigError(f"{failure}; the result of {action} was: {result}") from exc


def _shown(key: ApiKey, now_s: float) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(key)
    del fields["sha256"]
    optional = {"name": "", "priority": 0, "limits": {}, "expires": None, "revoked": None}
    return {"id": key.id, "state": key.state(now_s)} | optional | fields


def _title(key: ApiKey) -> str:
    whose = "an operator" if key.tenant == OPERATOR else f"the tenant {key.tenant}"
    return f"{key.id}{f' ({key.name})' if key.name else ''} of {whose}"


def _tenant(tenant: str, *, is_operator: bool) -> str:
    if is_operator:
        if tenant:
            raise ConfigError(f"tenant={tenant!r} cannot go with --operator, whose key may name any tenant")
        return OPERATOR
    if tenant and not TENANT_NAME.fullmatch(tenant):
        raise ConfigError(f"tenant={tenant!r} must be 1 to 64 letters, digits, '.', '_' or '-'")
    return tenant or DEFAULT_TENANT


def _name(name: str) -> str:
    if len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise ConfigError(f"name={name!r} must be at most {MAX_NAME_CHARS} printable characters")
    return name


def _expiry(text: str, now: datetime) -> datetime | None:
    """The time at which a key ends; None = never."""
    if not text:
        return None
    try:
        if match := _DURATION.fullmatch(text):
            expires = now.replace(microsecond=0) + timedelta(**{_UNITS[match[2]]: int(match[1])})
        else:
            expires = datetime.fromisoformat(text)
            expires = expires.astimezone(UTC) if expires.tzinfo else expires.replace(tzinfo=UTC)
    except (ValueError, OverflowError) as exc:
        raise ConfigError(
            f"expires={text!r} must be a time such as 90d, 12h or 30m, or a date such as 2030-01-31 (UTC)"
        ) from exc
    if expires <= now:
        raise ConfigError(f"expires={text!r} is in the past; give a later time, or leave it out for a permanent key")
    return expires
