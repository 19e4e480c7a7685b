"""CPU time of a request in the deciding process, from a frontend process's request to the last token.

    python -m benchmarks.deciding

Three parts, each one inside the next. `admission`: forecast, queue, decision, booking and release, with nothing else.
`flow`: all of `RequestFlow` in front of workers that compute nothing and speak the real protocol, in a process of their
own. `hub`: that in a `DecidingProcess`, asked by a frontend process without HTTP. The last two run closed loops of 64
requests, each prompt longer than a block and seen before, and count the CPU seconds of this process, all its threads
included.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.common import arguments, console, free_port, print_table, ratio, running, write_result
from benchmarks.native_edge import address_of, make_flow
from benchmarks.virtual_cluster import VirtualCluster
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.processes.backend_service import BackendService
from tandem.frontend.processes.deciding_client import JoinSettings
from tandem.frontend.processes.deciding_process import DecidingProcess
from tandem.frontend.processes.remote_backend import RemoteBackend
from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import EVERYONE
from tandem.protocol.sampling import SamplingParams
from tandem.router.backend import Backend, GenerateRequest
from tandem.router.workers.flow import RequestFlow
from tandem.scheduling.admission.admission import Dispatch
from tandem.scheduling.request import PlacementRequest, ServiceClass

_CONCURRENCY = 64
_EDGE_ID = "edge"
_NUM_WORKERS = 2
_NUM_PROMPTS = 256
_PROMPT_TOKENS = 500
_WARM_UP_S, _MEASURED_S = 1.0, 4.0
_START_TIMEOUT_S = 60.0
_NUM_DECISIONS = 2000
_NUM_ROUNDS = 5
_TENANTS = (1, 4, 1000)
_SHAPES = {"8 tokens at once": (8, 0), "64 tokens, one each 20 ms": (64, 20)}


def main() -> int:
    if sys.argv[1:2] == ["edge"]:
        uvloop.run(_edge(sys.argv[2], *map(int, sys.argv[3:])))
        return 0
    parser = arguments(__doc__)
    settings = parser.parse_args()
    seconds = 0.3 if settings.quick else _MEASURED_S
    num_decisions = 50 if settings.quick else _NUM_DECISIONS
    rows = [_admission(num_tenants, num_decisions, settings.seed) for num_tenants in _TENANTS]
    for shape, (num_tokens, step_ms) in _SHAPES.items():
        for name, part in (("flow", _flow), ("hub", _hub)):
            cost_us, rate = uvloop.run(part(num_tokens, step_ms, seconds, settings.seed))
            rows.append({"part": name, "case": shape, "us": cost_us, "requests_per_s": rate})
            console.print(f"[dim]measured {name}, {shape}[/]")
    print_table(
        "CPU time of a request in the deciding process",
        ["part", "case", "us", "requests/s meanwhile"],
        [[r["part"], r["case"], f"{r['us']:.0f}", f"{r['requests_per_s']:,.0f}"] for r in rows],
    )
    write_result("deciding", settings, {"deciding": rows})
    return 0


def _admission(num_tenants: int, num_decisions: int, seed: int) -> dict[str, Any]:
    """Admission of requests from several tenants, all recently active, with idle workers."""
    rng = random.Random(seed)
    tenants = [f"t{number}" for number in range(num_tenants)]
    cluster = VirtualCluster(num_prefill=_NUM_WORKERS, num_decode=_NUM_WORKERS)
    for tenant in tenants:
        _decide(cluster, tenant)
    times_s = []
    for _ in range(_NUM_ROUNDS):
        chosen = rng.choices(tenants, k=num_decisions)
        started_s = time.process_time()
        for tenant in chosen:
            _decide(cluster, tenant)
        times_s.append((time.process_time() - started_s) / num_decisions)
    cost_s = statistics.median(times_s)
    case = f"{num_tenants} tenant{'s' * (num_tenants > 1)}"
    return {"part": "admission", "case": case, "us": 1e6 * cost_s, "requests_per_s": 1 / cost_s}


def _decide(cluster: VirtualCluster, tenant: str) -> None:
    """The life of one request without its tokens, one millisecond after the previous one."""
    cluster.now += 1e-3
    admission, now = cluster.admission, cluster.now
    request = PlacementRequest(num_prompt_tokens=512, expected_output_tokens=32, service_class=ServiceClass(tenant))
    admission.enter(request, admission.forecast(request, now), now)
    decided = admission.next(now)
    assert isinstance(decided, Dispatch), f"{decided} on idle workers"
    assert admission.next(now) is None
    booking = cluster.book(decided)
    booking.prefill_done()
    booking.release()


async def _no_metrics() -> bytes:
    return b""


async def _flow(num_tokens: int, step_ms: int, seconds: float, seed: int) -> tuple[float, float]:
    """CPU microseconds per request and requests per second; the client loop runs in this process."""
    async with _served() as flow, _asked(flow, num_tokens, step_ms, seed):
        return await _measured(flow, seconds)


async def _hub(num_tokens: int, step_ms: int, seconds: float, seed: int) -> tuple[float, float]:
    """As `_flow`, with a frontend process as the client."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        endpoint = f"{folder}/hub"
        async with _served() as flow:
            hub = DecidingProcess(BackendService(flow, _Ready(), _no_metrics), endpoint, ApiKeys())
            hub.expect(_EDGE_ID)
            await hub.start()
            try:
                with running(
                    [
                        sys.executable,
                        "-m",
                        "benchmarks.deciding",
                        "edge",
                        endpoint,
                        str(num_tokens),
                        str(step_ms),
                        str(seed),
                    ]
                ):
                    return await _measured(flow, seconds)
            finally:
                await hub.close()


async def _edge(endpoint: str, num_tokens: int, step_ms: int, seed: int) -> None:
    """Send requests until the process is ended."""
    edge = RemoteBackend(JoinSettings(endpoint, _EDGE_ID, lambda: None, timeout_s=20.0))
    await edge.start()
    async with _asked(edge, num_tokens, step_ms, seed):
        await asyncio.Event().wait()


@asynccontextmanager
async def _served() -> AsyncIterator[RequestFlow]:
    """A request flow with its workers."""
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(_NUM_WORKERS)]
    flow, client = make_flow(CollectorRegistry(), RouterConfig(worker_timeout_s=_START_TIMEOUT_S))
    with running([sys.executable, "-m", "benchmarks.native_edge", "worker", *endpoints]):
        await client.start()
        try:
            for endpoint in endpoints:
                await client.add_worker(address_of(endpoint))
            yield flow
        finally:
            await client.close()


@asynccontextmanager
async def _asked(backend: Backend, num_tokens: int, step_ms: int, seed: int) -> AsyncIterator[None]:
    """A closed loop of requests for as long as the block runs."""
    requests = _requests(num_tokens, step_ms, seed)

    async def ask() -> None:
        for request in requests:
            async with aclosing(backend.serve(request)) as deltas:
                found = 0
                while batch := await deltas.take():
                    found += sum(len(delta.token_ids) for delta in batch)
            assert found == num_tokens, f"{found} tokens, not {num_tokens}"

    clients = [asyncio.create_task(ask()) for _ in range(_CONCURRENCY)]
    try:
        yield
    finally:
        for client in clients:
            client.cancel()
        for ended in await asyncio.gather(*clients, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise RuntimeError("the loop that asks has ended") from ended


async def _measured(flow: RequestFlow, seconds: float) -> tuple[float, float]:
    """CPU microseconds of this process per admitted request, and admitted requests per second."""
    async with asyncio.timeout(_START_TIMEOUT_S):
        while _num_admitted(flow) < _CONCURRENCY:  # noqa: ASYNC110 - the client may be another process
            await asyncio.sleep(0.05)
    await asyncio.sleep(_WARM_UP_S)
    started_s, before_s, num_before = time.perf_counter(), time.process_time(), _num_admitted(flow)
    await asyncio.sleep(seconds)
    num, cpu_s = _num_admitted(flow) - num_before, time.process_time() - before_s
    return 1e6 * ratio(cpu_s, num), num / (time.perf_counter() - started_s)


def _num_admitted(flow: RequestFlow) -> int:
    return sum(stats.num_admitted for stats in flow.admission.stats.values())


def _requests(num_tokens: int, step_ms: int, seed: int) -> Iterator[GenerateRequest]:
    """An endless sequence of requests whose prompts recur."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000, 50_000) for _ in range(_PROMPT_TOKENS)] for _ in range(_NUM_PROMPTS)]
    sampling = SamplingParams(max_tokens=num_tokens, seed=step_ms, temperature=0.0)
    for number in itertools.count():
        yield GenerateRequest(f"request-{number}", prompts[number % _NUM_PROMPTS], sampling, EVERYONE)


class _Ready:
    reason = None


if __name__ == "__main__":
    sys.exit(main())
