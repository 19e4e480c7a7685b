"""`tandem drain`, `tandem restart`, `tandem add`: workers leave and join a running server, under load."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from tandem.cli.http_client import error_message, server_client
from tandem.cli.options import ApiKey, ServerUrl
from tandem.protocol.errors import ConfigError, ServingError

Json = dict[str, Any]
Grace = Annotated[
    float,
    typer.Option(min=0, max=3600, help="Seconds that a worker's work may take to end or to move.", metavar="SECONDS"),
]
Timeout = Annotated[
    float,
    typer.Option(min=1, max=86400, help="Seconds to wait for a worker beyond its grace.", metavar="SECONDS"),
]

_READ_TIMEOUT_S = 30.0
_POLL_S = 0.2
_REFUSED_S = 60.0  # how long to keep asking while a worker flips or another one is coming


class WorkerChangeError(ServingError):
    """A worker did not leave, did not come back, or was not added."""


def drain(
    worker: Annotated[str, typer.Argument(help="Its id, as in tandem top.")],
    url: ServerUrl = "http://127.0.0.1:8000",
    grace: Grace = 30.0,
    timeout: Timeout = 120.0,
    api_key: ApiKey = "",
) -> int:
    """Let a worker of a running server leave for good; no request fails.

    It gets nothing new. Its answers move to other workers and go on there, what it computes for others ends, and then
    its process ends. If the server has API keys, this needs an operator's.

    [bold]Example[/bold]

    [cyan]tandem drain decode-1[/cyan]
    """
    console = Console(stderr=True, highlight=False)
    with server_client(url, api_key, read_timeout_s=_READ_TIMEOUT_S, lost_error=WorkerChangeError) as client:
        _depart(client, console, worker, grace, timeout, restart=False)
    return 0


def restart(
    workers: Annotated[list[str] | None, typer.Argument(help="Ids, as in tandem top.", show_default=False)] = None,
    rolling: Annotated[bool, typer.Option("--rolling", help="Restart all workers, one after the other.")] = False,
    url: ServerUrl = "http://127.0.0.1:8000",
    grace: Grace = 30.0,
    timeout: Timeout = 600.0,
    api_key: ApiKey = "",
) -> int:
    """Start workers of a running server again, one after the other; no request fails.

    Each worker leaves as with tandem drain; the next one follows once it serves again. If one does not come back, the
    others are left as they are. If the server has API keys, this needs an operator's.

    [bold]Examples[/bold]

    [cyan]tandem restart --rolling[/cyan]

    [cyan]tandem restart decode-0 --grace 120[/cyan]
    """
    if bool(workers) == rolling:
        raise ConfigError("name the workers to restart, or give --rolling for all of them, one after the other")
    console = Console(stderr=True, highlight=False)
    with server_client(url, api_key, read_timeout_s=_READ_TIMEOUT_S, lost_error=WorkerChangeError) as client:
        for worker in workers or _all_workers(client):
            _depart(client, console, worker, grace, timeout, restart=True)
    return 0


def add(
    role: Annotated[Literal["prefill", "decode"], typer.Argument(help="The role in which it begins.")],
    url: ServerUrl = "http://127.0.0.1:8000",
    timeout: Timeout = 900.0,
    api_key: ApiKey = "",
) -> int:
    """Let one more worker join a running server, and wait until it serves.

    It is like the existing workers. If a Ray cluster has no room for it, Ray is asked for a node. If the server
    has API keys, this needs an operator's.

    [bold]Example[/bold]

    [cyan]tandem add decode[/cyan]
    """
    console = Console(stderr=True, highlight=False)
    with server_client(url, api_key, read_timeout_s=_READ_TIMEOUT_S, lost_error=WorkerChangeError) as client:
        response = client.post("/v1/pools/add", json={"role": role})
        if response.status_code != 200:
            raise WorkerChangeError(error_message(response.status_code, response.content))
        worker = str(response.json()["worker"])
        deadline_s = time.monotonic() + timeout
        with console.status(f"{worker} is being started"):
            while "serving_after_s" not in (record := _record(client, "arrivals", "worker", worker)):
                if "withdrawn" in record:
                    raise WorkerChangeError(f"{worker} was not added: {record['withdrawn']}")
                if time.monotonic() > deadline_s:
                    raise WorkerChangeError(
                        f"{worker} is not serving after --timeout {timeout:g} s; it may still start"
                    )
                time.sleep(_POLL_S)
        console.print(f"{escape(worker)}: serves after {record['serving_after_s']:.1f} s", soft_wrap=True)
    return 0


def _depart(
    client: httpx.Client, console: Console, worker: str, grace_s: float, timeout_s: float, *, restart: bool
) -> None:
    """Let one worker leave, and wait for its departure or its return. Raises `WorkerChangeError`."""
    number = _begin(client, {"worker": worker, "grace_s": grace_s, "restart": restart})
    end = "back_after_s" if restart else "left_after_s"
    deadline_s = time.monotonic() + grace_s + timeout_s
    with console.status(f"{worker} is leaving"):
        while end not in (record := _record(client, "departures", "id", number)):
            if time.monotonic() > deadline_s:
                what = "come back" if "left_after_s" in record else "leave"
                raise WorkerChangeError(
                    f"{worker} did not {what} within --grace {grace_s:g} and --timeout {timeout_s:g} s; the server's "
                    "log says why"
                )
            time.sleep(_POLL_S)
    forced = "" if record.get("finished") else "; what was left of its work went on elsewhere or ended"
    back = f", back after {record['back_after_s']:.1f} s" if restart else ""
    console.print(f"{escape(worker)}: left after {record['left_after_s']:.1f} s{back}{forced}", soft_wrap=True)


def _begin(client: httpx.Client, body: Json) -> int:
    """Ask for a departure. Returns its number. Asks again for a while if the worker is not ready for it."""
    deadline_s = time.monotonic() + _REFUSED_S
    while True:
        response = client.post("/v1/pools/drain", json=body)
        if response.status_code == 200:
            return int(response.json()["id"])
        is_worth_a_wait = body["restart"] and response.status_code == 409 and b'"drain_refused"' in response.content
        if not is_worth_a_wait or time.monotonic() > deadline_s:
            raise WorkerChangeError(error_message(response.status_code, response.content))
        time.sleep(_POLL_S)


def _record(client: httpx.Client, kind: str, field: str, value: object) -> Json:
    """The server's present record of one departure or arrival. Raises `WorkerChangeError`."""
    for record in _pools(client)["autoscaler"][kind]:
        if record[field] == value:
            return dict(record)
    raise WorkerChangeError("the server no longer has a record of it: it was restarted, or many newer records followed")


def _all_workers(client: httpx.Client) -> list[str]:
    """All workers that the server runs, those that prefill first. Data-parallel ranks of one server count as one."""
    pools = _pools(client)
    if "engines" in pools:
        names = [engine["name"].rpartition(".dp")[0] or engine["name"] for engine in pools["engines"]]
    else:
        names = [worker["worker_id"] for workers in pools["roles"].values() for worker in workers]
    return list(dict.fromkeys(names))


def _pools(client: httpx.Client) -> Json:
    response = client.get("/v1/pools")
    if response.status_code != 200:
        raise WorkerChangeError(error_message(response.status_code, response.content))
    pools: Json = response.json()
    if "autoscaler" not in pools:
        raise WorkerChangeError("this key may not see the workers: give an operator's key with --api-key")
    return pools
