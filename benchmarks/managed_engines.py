"""vLLM servers that `tandem serve --engine vllm` runs: right answers, flips and kills under load, and other routers.

    python -m benchmarks.managed_engines --vllm-python PATH [--vllm-router PATH]

One prefill and one decode server with half of the cores each. In `routers` the same two servers are asked through
Tandem, through the smallest P/D proxy (`benchmarks/vllm_proxy.py`) and through vllm-router, in turn, with other prompts
each time: chats that grow by their answers, then steady streams beside long prompts. Hits are counted by the servers:
prompt tokens that neither of them computed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import psutil

from benchmarks import engines, interference
from benchmarks.common import (
    Server,
    arguments,
    console,
    free_port,
    launched,
    ms,
    print_table,
    ratio,
    write_result,
)
from benchmarks.engines import Fleet, Load
from tandem.cluster.model_store import served_name
from tandem.loadtest.client import run_measured
from tandem.loadtest.closed_loop import ChatLoad, run_chats
from tandem.loadtest.stats import Distribution

PARTS = ("answers", "turns", "routers", "flip", "kill")
_ACT_S, _BETWEEN_S = 4.0, 8.0
_BACK_TIMEOUT_S = 400.0
_COMPUTED = re.compile(r'^vllm:prompt_tokens_by_source_total\{.*source="local_compute".*\} (\S+)', re.M)


def main() -> int:
    parser = arguments(__doc__)
    engines.add_engine_arguments(parser)
    parser.add_argument("--vllm-router", metavar="PATH", help="the program vllm-router, to compare with")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=15.0, help="no round of routers that would end later is begun")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    settings = parser.parse_args()
    parts = settings.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts={settings.parts}: there is no {sorted(unknown)[0]!r}; there are {', '.join(PARTS)}")
    if settings.quick:
        settings.rounds, settings.sessions, settings.turns = 1, 3, 2
    with managed(settings) as fleet:
        results = {part: _measured(part, fleet, settings) for part in PARTS if part in parts}
    write_result("managed_engines", settings, results)
    return 0


def _measured(part: str, fleet: Fleet, settings: argparse.Namespace) -> Any:
    """Measure one part and say how long it took."""
    began_s = time.monotonic()
    match part:
        case "answers":
            found: Any = engines.measure_answers(fleet)
            engines.print_answers("managed pair", found)
        case "turns":
            found = engines.measure_turns(fleet, num_chats=2, num_turns=3)
            engines.print_turns("managed pair", found)
        case "flip":
            found = measure_flip(fleet)
        case "kill":
            found = measure_kills(fleet)
        case _:
            found = compare_routers(fleet, settings)
    console.print(f"[dim]{part}: {time.monotonic() - began_s:.0f} s[/]")
    return found


@contextlib.contextmanager
def managed(settings: argparse.Namespace) -> Iterator[Fleet]:
    """`tandem serve --engine vllm` with a pair of servers, ready."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    engine_args = "--max-model-len 8192 --dtype bfloat16" + (" --enforce-eager" if settings.vllm_eager else "")
    command = [sys.executable, "-m", "tandem", "serve", f"--model={settings.model}", f"--port={port}"]
    command += ["--engine=vllm", f"--engine-python={settings.vllm_python}", f"--engine-args={engine_args}"]
    with launched([*command, "--prefill=1", "--decode=1"], ready=f"{url}/ready") as running:
        names = {name: engine["url"] for name, engine in pools(url).items()}
        pids = {name: _listener_at(running.process.pid, at) for name, at in names.items()}
        key = psutil.Process(next(iter(pids.values()))).environ()["VLLM_API_KEY"]
        # The decode server comes last: it is the one that answers are compared with.
        urls = {name: names[name] for name in ("prefill-0", "decode-0")}
        console.print(f"[dim]ready after {running.start_s:.0f} s[/]")
        yield Fleet(served_name(settings.model), url, running.process.pid, urls, pids, key)


def pools(url: str) -> dict[str, dict[str, Any]]:
    """The router's engines by name."""
    answer = httpx.get(f"{url}/v1/pools", trust_env=False, timeout=10.0).raise_for_status().json()
    return {engine["name"]: engine for engine in answer["engines"]}


def _listener_at(root: int, url: str) -> int:
    """The process below `root` that was told to listen at this URL's port."""
    port = url.rpartition(":")[2]
    for process in psutil.Process(root).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if port in process.cmdline():
                return process.pid
    raise RuntimeError(f"no process below {root} listens at {url}")


# -- flips and kills ------------------------------------------------------------------------------------------------


def measure_flip(fleet: Fleet) -> dict[str, Any]:
    """The prefill server becomes a decode server and goes back, under load."""
    records: list[dict[str, Any]] = []

    def flip(role: str) -> None:
        change = {"worker": "prefill-0", "role": role}
        answer = httpx.post(f"{fleet.router_url}/v1/pools/roles", json=change, trust_env=False, timeout=60.0)
        records.append(answer.raise_for_status().json())

    actions = [(_ACT_S, partial(flip, "decode")), (_ACT_S + _BETWEEN_S, partial(flip, "prefill"))]
    load = asyncio.run(engines.under_load(fleet, actions))
    latest = httpx.get(f"{fleet.router_url}/v1/pools", trust_env=False, timeout=10.0).json()["autoscaler"]["flips"]
    _print_load("prefill-0 flips and back", load)
    for record in latest[-2:]:
        console.print(f"  {record}", soft_wrap=True)
    return {"load": vars(load), "flips": latest[-2:]}


def measure_kills(fleet: Fleet) -> dict[str, Any]:
    """A server and an actor are killed under load; how long until the server is back, and what is left of it."""
    results = {}
    for name, kills_actor in (("decode-0", False), ("prefill-0", True)):
        process = psutil.Process(_listener_at(fleet.router_pid, pools(fleet.router_url)[name]["url"]))
        tree = [process, *process.children(recursive=True)]
        victim = process.parent() if kills_actor else process
        assert victim is not None, "a server is the child of its actor"
        old_url, began_s = pools(fleet.router_url)[name]["url"], time.monotonic() + _ACT_S
        load = asyncio.run(engines.under_load(fleet, [(_ACT_S, partial(victim.send_signal, signal.SIGKILL))]))
        _, left = psutil.wait_procs(tree, timeout=0.0)
        _wait(lambda name=name, old=old_url: pools(fleet.router_url).get(name, {}).get("url", old) != old)  # type: ignore[misc]
        back_s = time.monotonic() - began_s
        what = f"{'actor' if kills_actor else 'server'} of {name} killed"
        _print_load(what, load)
        console.print(f"  serving again after {back_s:.0f} s; processes left of the old one: {len(left)}")
        results[what] = {"load": vars(load), "back_s": back_s, "num_left": len(left)}
    return results


def _print_load(name: str, load: Load) -> None:
    print_table("streams in a closed loop", engines.LOAD_COLUMNS, [engines.load_row(name, load)])
    for error in sorted(set(load.errors)):
        console.print(f"  {error}", soft_wrap=True)


def _wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _BACK_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the server was not back within {_BACK_TIMEOUT_S:g} s")
        time.sleep(0.2)


# -- other routers --------------------------------------------------------------------------------------------------


def compare_routers(fleet: Fleet, settings: argparse.Namespace) -> dict[str, Any]:
    """The same loads through each router in turn; medians of the rounds."""
    short = argparse.Namespace(**vars(settings) | {"sessions": 2, "turns": 1, "quick": True})
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        routers = [Server("tandem", fleet.router_url, fleet.model, 0.0)]
        routers += [stack.enter_context(starting) for starting in _others(fleet, settings)]
        found = [_round(fleet, routers, short, number=0)]  # warms up: kernels, and the router's costs
        longest_s = 0.0
        for number in range(1, settings.rounds + 1):
            round_began_s = time.monotonic()
            if number > 1 and round_began_s + longest_s - began_s > 60 * settings.minutes:
                console.print(f"[red]only {number - 1} of {settings.rounds} rounds[/] within --minutes")
                break
            found.append(_round(fleet, routers, settings, number=number))
            longest_s = max(longest_s, time.monotonic() - round_began_s)
    rounds = {router.name: [one[router.name] for one in found[1:]] for router in routers}
    medians = {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]} for name, found in rounds.items()
    }
    _show_routers(medians)
    return {"rounds": rounds, "medians": medians}


def _round(
    fleet: Fleet, routers: list[Server], settings: argparse.Namespace, *, number: int
) -> dict[str, dict[str, float]]:
    """What each router did, another one first in each round. One that fails is left out from now on."""
    first = number % len(routers)
    found = {}
    for place, router in enumerate([*routers[first:], *routers[:first]]):
        began_s = time.monotonic()
        try:
            found[router.name] = _measure_router(fleet, router, settings, seed=100 * number + place)
        except RuntimeError as exc:
            if router.name == "tandem":
                raise
            console.print(f"[red]left out:[/] {exc}", soft_wrap=True)
            routers.remove(router)
            continue
        took = f"round {number} of {router.name}, {time.monotonic() - began_s:.0f} s"
        console.print(f"[dim]{took}: {found[router.name]}[/]", soft_wrap=True)
    return found


def _others(fleet: Fleet, settings: argparse.Namespace) -> Iterator[contextlib.AbstractContextManager[Server]]:
    prefill, decode = fleet.urls.values()
    yield _proxy("vLLM's proxy", [sys.executable, "-m", "benchmarks.vllm_proxy", prefill, decode], fleet, "/health", "")
    if settings.vllm_router:
        command = [settings.vllm_router, "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]
        command += ["--kv-connector=nixl", "--prefill-policy=cache_aware", f"--api-key={fleet.api_key}"]
        command += [f"--prometheus-port={free_port()}", "--host=127.0.0.1"]
        yield _proxy("vllm-router", [*command, "--port"], fleet, "/health", fleet.api_key)


@contextlib.contextmanager
def _proxy(name: str, command: list[str], fleet: Fleet, health: str, api_key: str) -> Iterator[Server]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    # vllm-router sends the key in OPENAI_API_KEY to both servers of a pair, and none that its client or a flag gives.
    env = {**os.environ, "VLLM_API_KEY": fleet.api_key, "OPENAI_API_KEY": fleet.api_key}
    with launched([*command, str(port)], ready=f"{url}{health}", env=env) as running:
        yield Server(name, url, fleet.model, running.start_s, api_key)


def _measure_router(fleet: Fleet, router: Server, settings: argparse.Namespace, *, seed: int) -> dict[str, float]:
    computed = _computed(fleet)
    load = ChatLoad(num_sessions=settings.sessions, num_turns=settings.turns, seed=seed)
    run = run_measured(run_chats(router.client, load, model=router.model, concurrency=settings.sessions))
    if errors := [timing.error for timing in run.timings if timing.error]:
        raise RuntimeError(f"{router.name}: {len(errors)} errors, the first: {errors[0]}")
    num_prompt_tokens = sum(timing.num_prompt_tokens for timing in run.timings)
    num_output_tokens = settings.sessions * settings.turns * load.output_tokens
    ttft = Distribution.of([timing.ttft_s for timing in run.timings])
    itl = Distribution.of(list(itertools.chain.from_iterable(timing.itl_s for timing in run.timings)))
    found = {
        "chat_ttft_p50_s": ttft.p50,
        "chat_ttft_p99_s": ttft.p99,
        "chat_itl_p50_s": itl.p50,
        "chat_tokens_per_s": num_output_tokens / run.duration_s,
        "chat_hit_ratio": 1 - ratio(_computed(fleet) - computed, num_prompt_tokens),
    }
    steady = argparse.Namespace(
        streams=4,
        stream_tokens=128,
        long_tokens=2048,
        long_output_tokens=8,
        every_s=3.0,
        control_s=3.0 if settings.quick else 6.0,
        loaded_s=9.0 if settings.quick else 24.0,
        seed=seed,
    )
    both = run_measured(interference.measure(router, steady))
    return found | {
        "steady_itl_p50_s": both["itl_loaded_s"]["p50"],
        "steady_itl_p99_s": both["itl_loaded_s"]["p99"],
        "long_ttft_p50_s": both["long_ttft_s"]["p50"],
    }


def _computed(fleet: Fleet) -> float:
    """Prompt tokens that the servers have computed."""
    texts = (httpx.get(f"{url}/metrics", trust_env=False, timeout=10.0).text for url in fleet.urls.values())
    return sum(float(value) for text in texts for value in _COMPUTED.findall(text))


def _show_routers(medians: dict[str, dict[str, float]]) -> None:
    columns = [
        "router",
        "chat: TTFT p50",
        "p99",
        "ITL p50",
        "tokens/s",
        "hits",
        "steady: ITL p50",
        "p99",
        "long: TTFT p50",
    ]
    rows = []
    for name, found in medians.items():
        times = [ms(found[key]) for key in ("chat_ttft_p50_s", "chat_ttft_p99_s", "chat_itl_p50_s")]
        steady = [ms(found[key]) for key in ("steady_itl_p50_s", "steady_itl_p99_s", "long_ttft_p50_s")]
        rows.append([name, *times, f"{found['chat_tokens_per_s']:.0f}", f"{found['chat_hit_ratio']:.1%}", *steady])
    print_table("the same two servers behind each router", columns, rows, caption="times in ms")
    ours = medians["tandem"]
    for name, theirs in list(medians.items())[1:]:
        ratios = ", ".join(f"{key} {ratio(ours[key], theirs[key]):.2f}" for key in ours)
        console.print(f"tandem / {name}: {ratios}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
