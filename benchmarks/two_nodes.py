"""Handoffs between two nodes of a Ray cluster beside those of one node, and what clients see when a node dies.

The nodes are raylets of this machine, each at a loopback address of its own (`tests/support/ray_nodes.py`). Workers of
two nodes may only use TCP, as between machines, though no network card is in the way. Workers of one node copy from
process to process; they are measured with TCP too. Then a node dies under load: all its processes are killed. It comes
back after the survivor has served alone for a while.

    python -m benchmarks.two_nodes
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import HERE, Server, arguments, console, free_port, launched, ms, print_table, write_result
from benchmarks.exposure import measure as measure_exposure
from tandem.cluster.model_store import resolve_model, served_name
from tandem.loadtest.client import run_measured
from tandem.loadtest.prompts import random_prompts
from tandem.protocol.config import cache_folder
from tests.support.ray_nodes import JOIN, RayNode, ray_cluster

_HEAD, _FIRST, _SECOND = "127.0.0.2", "127.0.0.3", "127.0.0.4"
_TCP = {"UCX_TLS": "tcp"}
_PAIR = ("--prefill=1", "--decode=1", "--pool-gb=1")
_POLL_S = 0.1
_TIMEOUT_S = 120.0


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[512, 2000])
    parser.add_argument("--requests", type=int, default=8, help="of each length")
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--clients", type=int, default=4, help="that send while a node dies")
    parser.add_argument("--alone-s", type=float, default=20.0, help="time for which the survivor serves alone")
    settings = parser.parse_args()
    if settings.quick:
        settings.prompt_tokens, settings.requests, settings.alone_s = [512], 3, 5.0
    folder = str(resolve_model(settings.model))
    environment = {"TANDEM_CACHE": str(cache_folder())} | _TCP
    handoffs = {}
    for name, env in (("one node", {}), ("one node, TCP", _TCP)):
        with _server(name, settings, "--no-local-prefill", env=env) as server:
            handoffs[name] = _measure_handoffs(server, settings)
    with ray_cluster(_HEAD, num_cpus=0, env=environment) as nodes:
        head = nodes[0].address
        nodes += [RayNode(ip, head=head, env=environment) for ip in (_FIRST, _SECOND)]
        for node in nodes[1:]:
            node.wait_started()
        joined = (f"--ray-address={head}", "--num-cpus-per-worker=1")
        settings.model = folder  # each node of this machine has it there
        with _server("two nodes", settings, *joined, "--no-local-prefill", env=JOIN | environment) as server:
            handoffs["two nodes"] = _measure_handoffs(server, settings)
        deaths = {}
        for role in ("decode", "prefill"):
            with _server("two nodes", settings, *joined, env=JOIN | environment) as server:
                deaths[role] = run_measured(_lose_node(server, role, nodes, environment, settings))
    _print(handoffs, deaths, settings)
    write_result("two_nodes", settings, {"handoffs": handoffs, "deaths": deaths})
    return 0


@contextlib.contextmanager
def _server(name: str, settings: argparse.Namespace, *flags: str, env: Mapping[str, str]) -> Iterator[Server]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", HERE.module, "serve", f"--model={settings.model}", f"--port={port}"]
    with launched([*command, *_PAIR, *flags], ready=f"{url}/ready", env=env) as process:
        yield Server(name, url, served_name(settings.model), process.start_s)


def _measure_handoffs(server: Server, settings: argparse.Namespace) -> dict[str, Any]:
    """What `benchmarks.exposure` measures, and what the prefill worker counted on its link."""

    async def measure() -> dict[str, Any]:
        result = await measure_exposure(server, settings)
        [prefill] = await _workers(server, "prefill")
        [link] = [link for link in prefill["links"] if link["num_bytes"]]
        return result | {"link": link}

    result = run_measured(measure())
    console.print(f"[dim]measured {server.name}[/]")
    return result


async def _workers(server: Server, role: str) -> list[dict[str, Any]]:
    pools = await server.client.request_json("GET", "/v1/pools")
    workers: list[dict[str, Any]] = pools["roles"][role]
    return workers


@dataclass(frozen=True, slots=True)
class _Sent:
    """One request of a client, in seconds after the death of the node."""

    begin_s: float
    end_s: float
    error: str


async def _lose_node(
    server: Server, role: str, nodes: list[RayNode], environment: dict[str, str], settings: argparse.Namespace
) -> dict[str, Any]:
    """Kill the node of the worker with this role under load, start it again; what the clients saw."""
    [victim] = await _workers(server, role)
    [number] = [number for number, node in enumerate(nodes) if node.ip == victim["host"]]
    prompts = await random_prompts(
        server.client, model=server.model, num_prompts=64, num_tokens=256, seed=settings.seed
    )
    sent: list[tuple[float, float, str]] = []
    is_over = asyncio.Event()

    async def client(first: int) -> None:
        index = first
        while not is_over.is_set():
            began = time.monotonic()
            timing = await server.client.stream_completion(
                prompts[index % len(prompts)], model=server.model, max_tokens=32, ignore_eos=True, temperature=0.0
            )
            sent.append((began, time.monotonic(), timing.error))
            index += settings.clients
            await asyncio.sleep(_POLL_S if timing.error else 0.0)

    clients = [asyncio.create_task(client(first)) for first in range(settings.clients)]
    await _until(lambda: len(sent) >= 4 * settings.clients)
    died = time.monotonic()
    await asyncio.to_thread(nodes[number].kill)
    await _until(lambda: any(began > died and not error for began, _, error in sent))
    await asyncio.sleep(settings.alone_s)
    back = time.monotonic()
    nodes[number] = RayNode(nodes[number].ip, head=nodes[0].address, env=environment)
    await asyncio.to_thread(nodes[number].wait_started)
    node_up_s = time.monotonic() - back
    deadline = time.monotonic() + _TIMEOUT_S
    while not all([await _workers(server, role) for role in ("prefill", "decode")]):
        if time.monotonic() > deadline:
            raise RuntimeError("the node's worker did not come back")
        await asyncio.sleep(_POLL_S)
    whole_s = time.monotonic() - back
    is_over.set()
    await asyncio.gather(*clients)
    requests = [_Sent(began - died, ended - died, error) for began, ended, error in sent if ended > died]
    return _seen(requests) | {"node_up_s": node_up_s, "whole_again_s": whole_s}


def _seen(requests: list[_Sent]) -> dict[str, Any]:
    """What clients saw after the death of a node."""
    errors = [request for request in requests if request.error]
    return {
        "num_requests": len(requests),
        "num_lost": sum(request.begin_s < 0 for request in errors),  # they ran when the node died
        "num_refused": sum(request.begin_s >= 0 for request in errors),
        "last_error_s": max((request.end_s for request in errors), default=0.0),
        "served_again_s": min(request.end_s for request in requests if not request.error and request.begin_s >= 0),
        "errors": sorted({request.error for request in errors}),
        "requests": [asdict(request) for request in requests],
    }


async def _until(condition: Any) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - it looks at what clients wrote
            await asyncio.sleep(_POLL_S)


def _print(handoffs: dict[str, Any], deaths: dict[str, Any], settings: argparse.Namespace) -> None:
    rows = []
    for name, result in handoffs.items():
        rate = result["link"]["num_bytes"] / max(result["link"]["seconds"], 1e-9)
        for length, one in result["lengths"].items():
            times = (ms(one[key]) for key in ("ttft_s", "second_token_s", "step_s"))
            rows.append([name, length, *times, ms(one["exposed_s"]["p50"]), ms(one["exposed_s"]["max"]), rate * 1e-9])
    print_table(
        f"Handoffs, {settings.requests} requests of each length, one at a time",
        ["workers on", "prompt tokens", "TTFT ms", "second token ms", "step ms", "exposed ms p50", "max", "link GB/s"],
        rows,
        caption="medians; the link's rate is of all its writes, by the time in which it was busy",
    )
    print_table(
        f"A node dies under {settings.clients} clients and comes back",
        ["worker of the node", "lost", "refused", "first answer after s", "last error after s", "node up s", "whole s"],
        [
            [
                role,
                *(seen[key] for key in ("num_lost", "num_refused", "served_again_s", "last_error_s")),
                seen["node_up_s"],
                seen["whole_again_s"],
            ]
            for role, seen in deaths.items()
        ],
        caption="lost: ran when the node died; refused: sent after that; the last two from the start of the new node",
    )
    for role, seen in deaths.items():
        for error in seen["errors"]:
            console.print(f"  {role}: {error}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
