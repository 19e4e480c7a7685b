"""`tandem top`: pools, queues and hits of a running server in the terminal, live."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import httpx
import typer
from rich.console import Console, RenderableType
from rich.live import Live

from tandem.cli.http_client import error_message, server_client
from tandem.cli.options import ApiKey, ServerUrl
from tandem.cli.top_view import render
from tandem.protocol.errors import ServingError

Json = dict[str, Any]
Sort = Annotated[Literal["queue", "running", "pool", "errors"], typer.Option(help="Which workers are shown first.")]
Once = Annotated[
    bool,
    typer.Option("--once", help="Print one screen and leave; this is the default if the output is not a terminal."),
]

_PATH = "/v1/dashboard"
_SILENT_S = 15.0  # the server says something every five seconds
_RETRY_S = (0.5, 1.0, 2.0, 5.0)  # the last one repeats
_ALL_LINES = 1000
_ONCE_WIDTH = 160


class TopError(ServingError):
    """The server does not show itself."""


def top(
    url: ServerUrl = "http://127.0.0.1:8000", sort: Sort = "queue", once: Once = False, api_key: ApiKey = ""
) -> int:
    """Watch a server: pools, queues, hits, workers and decisions, once a second. Ctrl-C leaves.

    It shows the same as the page /dashboard, for tandem serve and tandem route. If the server has API keys, it needs
    an operator's.

    [bold]Examples[/bold]

    [cyan]tandem top[/cyan]

    [cyan]tandem top --url http://router:8000 --sort pool[/cyan]
    """
    console = Console(highlight=False)
    with server_client(url, api_key, read_timeout_s=_SILENT_S, lost_error=TopError) as client:
        if once or not console.is_terminal:
            console.width = console.width if console.is_terminal else _ONCE_WIDTH
            console.print(_screen(_with_rates(client), _url(client), sort, console.width, _ALL_LINES))
        else:
            with contextlib.suppress(KeyboardInterrupt), _leaving_on_sigterm():  # Ctrl-C is the way to leave
                _watch(client, console, sort)
    return 0


@contextlib.contextmanager
def _leaving_on_sigterm() -> Iterator[None]:
    """SIGTERM acts like Ctrl-C: the terminal must not be left with another screen and no cursor."""

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _screen(snapshot: Json, url: str, sort: str, width: int, height: int, notice: str = "") -> RenderableType:
    """As `render`. Raises `TopError` for a snapshot in a form that this version does not make."""
    try:
        return render(snapshot, url=url, sort=sort, width=width, height=height, notice=notice)
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        raise TopError(
            f"the server's snapshots are not of this version of Tandem ({type(exc).__name__}: {exc})"
        ) from exc


def _url(client: httpx.Client) -> str:
    return str(client.base_url).rstrip("/")


def _with_rates(client: httpx.Client) -> Json:
    """A snapshot with rates. If nobody watched the server before, the first has none yet."""
    snapshots = _snapshots(client)
    first = next(snapshots)
    return first if first.get("traffic", {}).get("window_s", 1) else next(snapshots)


def _watch(client: httpx.Client, console: Console, sort: str) -> None:
    """Draw each snapshot until Ctrl-C. If the server is lost, reconnect; its last snapshot stays, marked as old."""
    url = _url(client)
    snapshots = _snapshots(client)
    latest = next(snapshots)  # an error of the first one ends the command
    pauses_s: Iterator[float] = iter(_RETRY_S)
    notice = ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_screen(latest, url, sort, *console.size, notice), refresh=True)
            if notice:
                time.sleep(next(pauses_s))
                snapshots = _snapshots(client)
            try:
                latest, notice = next(snapshots), ""
                pauses_s = itertools.chain(_RETRY_S, itertools.repeat(_RETRY_S[-1]))
            except (httpx.HTTPError, TopError) as exc:
                notice = f"not live since {time.strftime('%H:%M:%S', time.localtime(latest['time']))}: {exc}"


def _snapshots(client: httpx.Client) -> Iterator[Json]:
    """The snapshots of a server as they come, forever. Raises `TopError`, `httpx.HTTPError`."""
    with client.stream("GET", _PATH) as response:
        if response.status_code != 200:
            raise TopError(_refusal(response.status_code, response.read()))
        kind = ""
        for line in response.iter_lines():
            if line.startswith("event:"):
                kind = line.removeprefix("event:").strip()
            elif line.startswith("data:"):
                content = _object(line.removeprefix("data:"))
                if kind != "snapshot":
                    raise TopError(str(content.get("message", "the server could not make a snapshot")))
                yield content
    raise TopError("the server ended the connection")


def _object(text: str) -> Json:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise TopError("the server sent an event that is not a JSON object, so it is not Tandem's")
    return content


def _refusal(status: int, body: bytes) -> str:
    if status == 404:
        return f"the server has no {_PATH}: it is not Tandem's, or an older version"
    return error_message(status, body)
