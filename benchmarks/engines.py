"""vLLM servers behind `tandem route`: equal answers, second turns, an engine stopped and killed under load, a P/D pair.

    python -m benchmarks.engines --vllm-python PATH [--vllm-eager] [--parts answers,turns,stop,kill,overhead,pair]

Two vLLM servers with half of the cores each, KV events on; for `pair` two others, joined by its NixlConnector.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil

from benchmarks.common import arguments, console, free_port, launched, ms, print_table, write_result
from benchmarks.vllm import CONNECTOR, pin, vllm_command, vllm_environment
from tandem.cluster.model_store import resolve_model, served_name
from tandem.runtime.ports import free_ports

__all__ = [
    "LOAD_COLUMNS",
    "Fleet",
    "Load",
    "add_engine_arguments",
    "load_row",
    "main",
    "measure_answers",
    "measure_turns",
    "print_answers",
    "print_turns",
    "routed",
    "under_load",
]

LOAD_COLUMNS = (
    *("engine", "answers", "refused", "broken", "retries", "TTFT max s", "silence max s"),
    *("gap of first bytes s", "by engine"),
)
PARTS = ("answers", "turns", "stop", "kill", "overhead", "pair")
_HOST = "127.0.0.1"
_NUM_STREAMS = 6
_STOP_AFTER_S, _STOPPED_S, _AFTER_S = 4.0, 12.0, 8.0
_REQUESTS, _TOKENS = 16, 24  # of the comparison with and without the router
_KV_BYTES_PER_TOKEN = 23_040  # of SmolLM2-135M in bfloat16
_STORY = "Here is what happened on day {}: the boat went out, the wind turned, and nobody on the pier saw it. "


@dataclass(frozen=True)
class Fleet:
    """vLLM servers and the router in front of them."""

    model: str
    router_url: str
    router_pid: int
    urls: dict[str, str]
    pids: dict[str, int]
    api_key: str = ""  # of the servers, not of the router

    @property
    def headers(self) -> dict[str, str]:
        """Of requests to the servers themselves."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass
class Load:
    """Results of closed-loop streams."""

    num_done: int = 0
    num_broken: int = 0  # ended by an error after the first byte
    num_refused: int = 0  # before it
    num_retries: int = 0  # by the router, invisible to clients
    ttft_s: list[float] = field(default_factory=list)
    first_bytes_s: list[float] = field(default_factory=list)  # since the load began
    longest_silence_s: float = 0.0  # within one stream
    by_engine: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that locate vLLM."""
    parser.add_argument("--vllm-python", metavar="PATH", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without torch.compile")


@contextlib.contextmanager
def routed(
    settings: argparse.Namespace,
    names: tuple[str, ...],
    *,
    is_pair: bool = False,
    flags: Sequence[str] = (),
    num_ranks: int = 1,
    more_env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Fleet]:
    """vLLM servers of these names on equal parts of the cores, and a ready `tandem route` in front of them.

    Each server has `num_ranks` data-parallel ranks, and gets `flags` and the environment `more_env` too.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // len(names))
    model = served_name(settings.model)
    urls, pids, tables = {}, {}, []
    with contextlib.ExitStack() as stack:
        for i, name in enumerate(names):
            part = cores[i * share : (i + 1) * share] or cores[-1:]
            port = free_port()
            events, replay = free_ports(_HOST, num_ranks), free_ports(_HOST, num_ranks)
            urls[name] = f"http://127.0.0.1:{port}"
            publisher = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{events}",
                "replay_endpoint": f"tcp://*:{replay}",
            }
            command = [*vllm_command(settings, port), "--enable-prompt-tokens-details", *flags]
            command += ["--data-parallel-size", str(num_ranks)] if num_ranks > 1 else []
            command += ["--kv-events-config", json.dumps(publisher)]
            command += ["--kv-transfer-config", json.dumps(CONNECTOR)] if is_pair else []
            env = vllm_environment(part) | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(_HOST, num_ranks))}
            if num_ranks > 1:
                env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(part[rank % len(part)]) for rank in range(num_ranks))
            running = stack.enter_context(launched(command, ready=f"{urls[name]}/health", env={**env, **more_env}))
            pids[name] = running.process.pid
            pin(running.process.pid, part)
            role = ("prefill", "decode")[i] if is_pair else "both"
            tables.append(_table(name, urls[name], model, role, events, replay, num_ranks))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        path = Path(folder, "engines.toml")
        path.write_text(f'[tokenizers]\n"{model}" = "{resolve_model(settings.model)}"\n' + "".join(tables))
        port = free_port()
        command = [sys.executable, "-m", "tandem", "route", f"--engines={path}", f"--port={port}"]
        command += ["--no-local-prefill"] if is_pair else []
        url = f"http://127.0.0.1:{port}"
        router = stack.enter_context(launched(command, ready=f"{url}/ready"))
        _wait_for_all(url, len(names) * num_ranks)
        yield Fleet(model, url, router.process.pid, urls, pids)


def _table(name: str, url: str, model: str, role: str, events: int, replay: int, num_ranks: int) -> str:
    values = {
        "name": name,
        "url": url,
        "model": model,
        "kind": "vllm",
        "role": role,
        "hardware": "cpu",
        "kv_bytes_per_token": _KV_BYTES_PER_TOKEN,
        "kv_events": f"tcp://127.0.0.1:{events}",
        "kv_replay": f"tcp://127.0.0.1:{replay}",
        "data_parallel_size": num_ranks,
    }
    return "[[engines]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


def _wait_for_all(url: str, count: int) -> None:
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        engines = httpx.get(f"{url}/v1/pools", trust_env=False, timeout=5.0).json()["engines"]
        if sum(engine["state"] == "ready" for engine in engines) == count:
            return
        time.sleep(0.1)
    raise RuntimeError(f"not all engines became ready: {engines}")


def measure_answers(fleet: Fleet) -> dict[str, Any]:
    """Compare greedy answers through the router, plain and streamed, with those of a vLLM server asked directly."""
    direct = next(reversed(fleet.urls.values()))  # in a pair this is the decode engine, which can answer alone
    num_equal, different = 0, []
    with httpx.Client(timeout=120.0, trust_env=False) as client:
        for path, body in _requests(fleet.model):
            expected = _text(client.post(direct + path, json=body, headers=fleet.headers).raise_for_status().json())
            plain = _text(client.post(fleet.router_url + path, json=body).raise_for_status().json())
            streamed = client.post(fleet.router_url + path, json=body | {"stream": True}).raise_for_status().text
            for way, text in (("plain", plain), ("streamed", _streamed_text(streamed))):
                num_equal += text == expected
                if text != expected:
                    different.append({"path": path, "way": way, "expected": expected, "got": text})
    return {"num_equal": num_equal, "num_compared": num_equal + len(different), "different": different}


def _requests(model: str) -> list[tuple[str, dict[str, Any]]]:
    common = {"model": model, "max_tokens": 32, "temperature": 0}
    texts = ["The capital of France is", "Once upon a time", "".join(_STORY.format(i) for i in range(12))]
    found: list[tuple[str, dict[str, Any]]] = [("/v1/completions", common | {"prompt": text}) for text in texts]
    found.append(("/v1/completions", common | {"prompt": list(range(1000, 1300))}))
    for text in texts:
        found.append(("/v1/chat/completions", common | {"messages": [{"role": "user", "content": text}]}))
    return found


def measure_turns(fleet: Fleet, *, num_chats: int, num_turns: int) -> list[dict[str, Any]]:
    """Chats that grow by their answers: tokens found cached in each turn, and those the router's index expected."""
    turns = []
    with httpx.Client(timeout=120.0, trust_env=False) as client:
        messages: list[list[dict[str, str]]] = [[] for _ in range(num_chats)]
        for turn, chat in itertools.product(range(num_turns), range(num_chats)):
            question = "".join(_STORY.format(f"{chat}-{turn}-{i}") for i in range(8)) + "What came next?"
            messages[chat].append({"role": "user", "content": question})
            body = {"model": fleet.model, "messages": messages[chat], "max_tokens": 48, "temperature": 0}
            response = client.post(f"{fleet.router_url}/v1/chat/completions", json=body).raise_for_status()
            answer = response.json()
            messages[chat].append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            usage = answer["usage"]
            turns.append(
                {
                    "turn": turn + 1,
                    "chat": chat,
                    "engine": response.headers["x-tandem-engine"],
                    "prompt_tokens": usage["prompt_tokens"],
                    "cached_tokens": (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
                    "expected_tokens": int(response.headers["x-tandem-expected-cached-tokens"]),
                }
            )
    return turns


async def under_load(
    fleet: Fleet, actions: Sequence[tuple[float, Callable[[], object]]], *, after_s: float = _AFTER_S
) -> Load:
    """Closed-loop streams while something is done at these seconds, and for `after_s` after the last of them."""
    load, started = Load(num_retries=-_num_retries(fleet.router_url)), time.monotonic()
    end_s = actions[-1][0] + after_s

    async def stream(number: int) -> None:
        async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
            for i in itertools.count():
                if time.monotonic() - started > end_s:
                    return
                await _one_stream(client, fleet, f"{number}.{i}", load, started)

    async def act() -> None:
        for at_s, action in actions:
            await asyncio.sleep(max(0.0, at_s - (time.monotonic() - started)))
            await asyncio.to_thread(action)

    await asyncio.gather(act(), *(stream(number) for number in range(_NUM_STREAMS)))
    load.num_retries += _num_retries(fleet.router_url)
    return load


async def _one_stream(client: httpx.AsyncClient, fleet: Fleet, name: str, load: Load, started: float) -> None:
    prompt = _STORY.format(name) + "".join(_STORY.format(i) for i in range(4))
    body = {"model": fleet.model, "prompt": prompt, "max_tokens": 32, "ignore_eos": True, "stream": True}
    sent = last = time.monotonic()
    async with client.stream("POST", f"{fleet.router_url}/v1/completions", json=body) as response:
        if response.status_code != 200:
            load.num_refused += 1
            load.errors.append((await response.aread()).decode()[:200])
            await asyncio.sleep(0.1)
            return
        engine = response.headers["x-tandem-engine"]
        load.by_engine[engine] = load.by_engine.get(engine, 0) + 1
        text, is_first = "", True
        async for piece in response.aiter_text():
            now = time.monotonic()
            if is_first:
                load.ttft_s.append(now - sent)
                load.first_bytes_s.append(now - started)
            else:
                load.longest_silence_s = max(load.longest_silence_s, now - last)
            is_first, last = False, now
            text += piece
    if text.endswith("data: [DONE]\n\n"):
        load.num_done += 1
    else:
        load.num_broken += 1
        load.errors.append(text.rpartition("data: ")[2].strip()[:200])


def _signal_all(pid: int, number: signal.Signals) -> None:
    """Send a signal to the server and its engine process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(number)


def _num_retries(router_url: str) -> int:
    counters = httpx.get(f"{router_url}/metrics", trust_env=False, timeout=5.0).text
    line = next(line for line in counters.splitlines() if line.startswith("tandem_engine_retries_total"))
    return round(float(line.split()[1]))


def load_row(name: str, load: Load) -> list[str]:
    """A row of a table with `LOAD_COLUMNS`."""
    gaps = [b - a for a, b in itertools.pairwise(sorted(load.first_bytes_s))]
    return [
        name,
        str(load.num_done),
        str(load.num_refused),
        str(load.num_broken),
        str(load.num_retries),
        f"{max(load.ttft_s, default=0.0):.1f}",
        f"{load.longest_silence_s:.1f}",
        f"{max(gaps, default=0.0):.1f}",
        " ".join(f"{engine}:{count}" for engine, count in sorted(load.by_engine.items())),
    ]


async def _streams(url: str, model: str, count: int) -> dict[str, float]:
    """Medians of TTFT and ITL of one stream at a time, in seconds."""
    ttft: list[float] = []
    gaps: list[float] = []
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        for i in range(count):
            body = {"model": model, "prompt": f"{i} " * 64, "max_tokens": _TOKENS, "ignore_eos": True, "stream": True}
            last, is_first = time.perf_counter(), True
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                async for _ in response.aiter_text():
                    now = time.perf_counter()
                    (ttft if is_first else gaps).append(now - last)
                    last, is_first = now, False
    return {"ttft_s": statistics.median(ttft), "itl_s": statistics.median(gaps)}


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _measure_two(settings: argparse.Namespace, parts: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with routed(settings, ("a", "b")) as fleet:
        if "answers" in parts:
            results["answers"] = measure_answers(fleet)
            print_answers("two engines", results["answers"])
        if "turns" in parts:
            results["turns"] = measure_turns(fleet, num_chats=4, num_turns=3)
            print_turns("two engines", results["turns"])
        if "overhead" in parts:
            results["overhead"] = asyncio.run(_compare_overhead(fleet))
        rows = []
        if "stop" in parts:
            send = partial(_signal_all, fleet.pids["a"])
            actions = (
                (_STOP_AFTER_S, partial(send, signal.SIGSTOP)),
                (_STOP_AFTER_S + _STOPPED_S, partial(send, signal.SIGCONT)),
            )
            load = asyncio.run(under_load(fleet, actions))
            rows.append(load_row(f"a stopped for {_STOPPED_S:.0f} s", load))
            results["stop"] = vars(load)
        if "kill" in parts:
            kill = partial(_signal_all, fleet.pids["a"], signal.SIGKILL)
            load = asyncio.run(under_load(fleet, [(_STOP_AFTER_S, kill)]))
            rows.append(load_row("a killed", load))
            results["kill"] = vars(load)
        if rows:
            print_table(f"{_NUM_STREAMS} streams", LOAD_COLUMNS, rows)
            for name in ("stop", "kill"):
                for error in sorted(set(results.get(name, {}).get("errors", ()))):
                    console.print(f"  {name}: {error}", soft_wrap=True)
    return results


async def _compare_overhead(fleet: Fleet) -> dict[str, Any]:
    """TTFT and ITL with and without the router, and the router's CPU time per request."""
    found: dict[str, Any] = {}
    for name, url in {"vLLM itself": fleet.urls["a"], "through the router": fleet.router_url}.items():
        await _streams(url, fleet.model, 2)
        before_s, started = _cpu_s(fleet.router_pid), time.perf_counter()
        found[name] = await _streams(url, fleet.model, _REQUESTS)
        elapsed_s = time.perf_counter() - started
        found[name] |= {"cpu_share": (_cpu_s(fleet.router_pid) - before_s) / elapsed_s, "elapsed_s": elapsed_s}
    # Probes and events cost the router CPU time while vLLM is asked directly, too.
    routed, idle = found["through the router"], found["vLLM itself"]
    found["cpu_per_request_s"] = (routed["cpu_share"] - idle["cpu_share"]) * routed["elapsed_s"] / _REQUESTS
    rows = [
        [name, ms(found[name]["ttft_s"]), ms(found[name]["itl_s"])] for name in ("vLLM itself", "through the router")
    ]
    print_table("one stream at a time, ms", ["asked", "TTFT p50", "ITL p50"], rows)
    console.print(
        f"router: {found['cpu_per_request_s'] * 1e3:.1f} ms of CPU for a request of {_TOKENS} tokens, "
        f"{idle['cpu_share']:.1%} of a core for probes and events"
    )
    return found


def _measure_pair(settings: argparse.Namespace) -> dict[str, Any]:
    with routed(settings, ("p", "d"), is_pair=True) as fleet:
        answers = measure_answers(fleet)
        print_answers("pair", answers)
        turns = measure_turns(fleet, num_chats=2, num_turns=3)
        print_turns("pair", turns)
        pools = httpx.get(f"{fleet.router_url}/v1/pools", trust_env=False, timeout=5.0).json()
        requests = {engine["name"]: engine["num_requests"] for engine in pools["engines"]}
        console.print(f"requests sent: {requests}; learned: {pools['costs']['transfers']}")
    return {"pair_answers": answers, "pair_turns": turns, "pair_requests": requests}


def print_answers(name: str, result: dict[str, Any]) -> None:
    """Show what `measure_answers` found."""
    console.print(f"{name}: {result['num_equal']} of {result['num_compared']} answers equal vLLM's own")
    for difference in result["different"]:
        console.print(f"  {difference}", soft_wrap=True)


def print_turns(name: str, turns: list[dict[str, Any]]) -> None:
    """Show what `measure_turns` found."""
    rows = []
    for number in sorted({turn["turn"] for turn in turns}):
        same = [turn for turn in turns if turn["turn"] == number]
        sums = [str(sum(turn[key] for turn in same)) for key in ("prompt_tokens", "cached_tokens", "expected_tokens")]
        rows.append([str(number), *sums, " ".join(turn["engine"] for turn in same)])
    print_table(f"chats, {name}", ["turn", "prompt tokens", "cached there", "expected by the index", "engines"], rows)


def _text(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def _streamed_text(stream: str) -> str:
    parts = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    choices = [part["choices"][0] for part in parts if part["choices"]]
    return "".join((c["delta"].get("content") or "") if "delta" in c else c["text"] for c in choices)


def main() -> None:
    parser = arguments(__doc__)
    add_engine_arguments(parser)
    parser.add_argument("--parts", default=",".join(PARTS), help="which, separated by commas (default: %(default)s)")
    settings = parser.parse_args()
    parts = settings.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts={settings.parts}: there is no {sorted(unknown)[0]!r}; there are {', '.join(PARTS)}")
    results: dict[str, Any] = {}
    if set(parts) - {"pair"}:
        results |= _measure_two(settings, parts)
    if "pair" in parts:
        results |= _measure_pair(settings)
    write_result("engines", settings, results)


if __name__ == "__main__":
    main()
