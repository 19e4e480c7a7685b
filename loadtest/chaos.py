"""Faults and load for a running server: what is done to it, what its clients see, and what they should see.

Faults and requests follow from one seed. Each request has been answered once before the first fault, and every later
answer to it is compared with that one: text, end, log probabilities and usage of each choice.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

__all__ = ["Answer", "ChaosEvent", "ChaosRun", "chaos_client", "plan", "run_chaos", "sample_requests"]

Json = dict[str, Any]

_MEAN_GAP_S = 10.0  # mean time between two faults
_KINDS = {"kill": 5, "stop 3 s": 2, "stop 20 s": 2, "kill router process": 1, "lose disk cache": 1}
_DISK_LOST_S = 5.0
HUNG_S = 120.0  # a stream without an event for this long
_SETTLE_S = 240.0
_RETRY_S = 0.2
_LOST_WITH_ROUTER_S = 5.0
_SAMPLING: tuple[tuple[str, Json], ...] = (
    ("greedy", {"temperature": 0}),
    ("seeded", {"temperature": 0.9, "top_p": 0.95}),
    ("penalised", {"temperature": 0.8, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "min_tokens": 20}),
    ("stop strings", {"temperature": 1.0, "stop": ["the", "\n\n", " of "], "ignore_eos": False}),
    ("log probabilities", {"temperature": 0.7, "logprobs": 2}),
    ("two choices", {"temperature": 0.9, "n": 2}),
)
_WORDS = (
    "river stone cloud lamp garden winter engine paper signal market window forest silver north copy".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class ChaosEvent:
    """A fault to be made. `drawn`, in [0, 1), chooses its victim among the processes that are there then."""

    at_s: float
    kind: str
    drawn: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got, or the error that it saw."""

    content: object = None  # compared as a whole
    error: str = ""
    longest_silence_s: float = 0.0


@dataclass(slots=True)
class ChaosRun:
    """What was done and seen. `lost` says in words what went wrong; empty = nothing was lost."""

    num_requests: Counter[str] = field(default_factory=Counter)  # by kind of sampling
    num_sent_again: int = 0  # requests whose connection broke because a router process died
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    silences_s: list[float] = field(default_factory=list)  # the longest silence of each request
    events: Counter[str] = field(default_factory=Counter)
    held: Json = field(default_factory=dict)  # what workers hold that should be idle
    moves: dict[str, float] = field(default_factory=dict)  # moves of requests, by cause

    @property
    def lost(self) -> list[str]:
        """What went wrong, in words."""
        failed = [f"{len(self.failed)} requests failed, the first: {self.failed[0]}"] if self.failed else []
        wrong = [f"{len(self.wrong)} answers differ, the first: {self.wrong[0]}"] if self.wrong else []
        held = [f"{worker} holds what nobody uses: {what}" for worker, what in self.held.items() if what]
        return failed + wrong + held


def plan(seed: int, duration_s: float, *, has_edges: bool, has_disk: bool) -> list[ChaosEvent]:
    """The faults of a run, in order."""
    source = random.Random(seed)
    unfit = ([] if has_edges else ["kill router process"]) + ([] if has_disk else ["lose disk cache"])
    kinds = {kind: weight for kind, weight in _KINDS.items() if kind not in unfit}
    events, at_s = [], source.expovariate(1 / _MEAN_GAP_S)
    while at_s < duration_s:
        (kind,) = source.choices(list(kinds), list(kinds.values()))
        events.append(ChaosEvent(at_s, kind, source.random()))
        at_s += source.expovariate(1 / _MEAN_GAP_S)
    return events


def sample_requests(seed: int, model: str, max_tokens: int) -> list[tuple[str, Json]]:
    """Pairs of kind and body of text completions: all kinds of sampling, short and long prompts."""
    source = random.Random(seed)
    requests = []
    for number, num_words in enumerate((8, 60, 250)):
        for kind, sampling in _SAMPLING:
            body: Json = {
                "model": model,
                "prompt": " ".join(source.choices(_WORDS, k=num_words)),
                "max_tokens": max_tokens,
                "seed": number,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            requests.append((kind, body | sampling))
    return requests


async def ask(client: httpx.AsyncClient, body: Json) -> Answer:
    """Send one request and read its stream to the end."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    logprobs: list[tuple[list[object], list[object]]] = []
    usage: Json = {}
    longest_s, heard_s = 0.0, time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return Answer(
                    error=f"HTTP {response.status_code}: {(await response.aread())[:300].decode(errors='replace')}"
                )
            async for line in response.aiter_lines():
                longest_s, heard_s = max(longest_s, time.monotonic() - heard_s), time.monotonic()
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    return Answer(error=str(event["error"]), longest_silence_s=longest_s)
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    index = choice["index"]
                    texts[index] = texts.get(index, "") + choice["text"]
                    reasons[index] = choice.get("finish_reason") or reasons.get(index, "")
                    if choice.get("logprobs"):
                        logprobs.append((choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]))
    except (httpx.HTTPError, ValueError) as exc:
        return Answer(error=f"{type(exc).__name__}: {exc}", longest_silence_s=longest_s)
    if len(reasons) != body.get("n", 1) or not all(reasons.values()):
        return Answer(error=f"the stream ended without an end of its choices: {reasons}", longest_silence_s=longest_s)
    counts = [usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
    content = [sorted(texts.items()), sorted(reasons.items()), _joined(logprobs), counts]
    return Answer(json.dumps(content), longest_silence_s=longest_s)


def _joined(parts: Sequence[tuple[list[object], list[object]]]) -> list[list[object]]:
    """Log probabilities of all events as one list of tokens and one of numbers."""
    tokens: list[object] = []
    numbers: list[object] = []
    for part_tokens, part_numbers in parts:
        tokens += part_tokens
        numbers += part_numbers
    return [tokens, numbers]


def chaos_client(url: str) -> httpx.AsyncClient:
    """A client whose streams may be silent for a while, but not for ever. No connection outlives its request."""
    timeout = httpx.Timeout(HUNG_S, connect=10.0)
    limits = httpx.Limits(max_keepalive_connections=0)  # the next request may meet another router process
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, trust_env=False)


async def run_chaos(
    client: httpx.AsyncClient,
    server: psutil.Process,
    requests: Sequence[tuple[str, Json]],
    events: Sequence[ChaosEvent],
    *,
    duration_s: float,
    num_streams: int,
    seed: int,
    disk_folder: Path | None,
    say: Callable[[str], None],
) -> ChaosRun:
    """Learn each request's answer, then send the requests while faults happen, then let the server come to rest.

    `server` is the process of `tandem serve` on this machine.
    """
    run = ChaosRun()
    expected = await _undisturbed(client, requests)
    say(f"{len(expected)} requests were answered undisturbed; now {num_streams} clients send them at once")
    breaker = _Breaker(client, server, disk_folder, run, say)
    until_s = time.monotonic() + duration_s
    source = random.Random(seed)
    load = [
        asyncio.create_task(_load(client, expected, random.Random(source.random()), until_s, breaker, run))
        for _ in range(num_streams)
    ]
    try:
        await breaker.play(events)
        await asyncio.gather(*load)
    finally:
        for one in load:
            one.cancel()
        await breaker.repair()
    await _come_to_rest(client, run)
    return run


async def _undisturbed(
    client: httpx.AsyncClient, requests: Sequence[tuple[str, Json]]
) -> list[tuple[str, Json, object]]:
    expected = []
    for kind, body in requests:
        answer = await ask(client, body)
        if answer.error:
            raise ValueError(f"before any fault a request ({kind}) failed: {answer.error}")
        expected.append((kind, body, answer.content))
    return expected


async def _load(
    client: httpx.AsyncClient,
    expected: Sequence[tuple[str, Json, object]],
    source: random.Random,
    until_s: float,
    breaker: _Breaker,
    run: ChaosRun,
) -> None:
    """One client, which sends one request after the other."""
    while time.monotonic() < until_s:
        kind, body, content = source.choice(expected)
        answer = await ask(client, body)
        while answer.error and breaker.has_broken_connections:
            run.num_sent_again += 1
            await asyncio.sleep(_RETRY_S)
            answer = await ask(client, body)
        run.num_requests[kind] += 1
        run.silences_s.append(answer.longest_silence_s)
        if answer.error:
            run.failed.append(f"{kind}: {answer.error}")
        elif answer.content != content:
            run.wrong.append(f"{kind}: {answer.content} and not {content}")


class _Breaker:
    """Makes the faults."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        server: psutil.Process,
        disk_folder: Path | None,
        run: ChaosRun,
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._server = server
        self._disk_folder = disk_folder
        self._run = run
        self._say = say
        self._router_killed_s = -1e9
        self._down: set[psutil.Process] = set()  # workers that were killed, and those that are stopped
        self._repairs: set[asyncio.Task[None]] = set()

    @property
    def has_broken_connections(self) -> bool:
        """Whether a router process died just now: a client whose connection broke sends its request again."""
        return time.monotonic() - self._router_killed_s < _LOST_WITH_ROUTER_S

    async def play(self, events: Sequence[ChaosEvent]) -> None:
        """Make all of them at their times."""
        began_s = time.monotonic()
        for event in events:
            await asyncio.sleep(max(began_s + event.at_s - time.monotonic(), 0.0))
            done = await self._do(event)
            if done:
                self._run.events[event.kind] += 1
                self._say(f"{event.at_s:7.1f} s  {done}")

    async def repair(self) -> None:
        """Undo the faults that last only for a while."""
        await asyncio.gather(*self._repairs)

    async def _do(self, event: ChaosEvent) -> str:
        """Make one fault. Returns what was done, or "" if there was no victim."""
        match event.kind:
            case "lose disk cache":
                return self._lose_disk()
            case "kill router process":
                edges = [one for one in self._server.children() if _is_edge(one)]
                self._router_killed_s = time.monotonic()
                return self._signal(_chosen(edges, event.drawn), "a router process", signal.SIGKILL)
        workers = await self._workers()
        worker = _chosen(workers, event.drawn)
        if worker is None or not any(one != worker and one[1] not in self._down for one in workers):
            return ""  # without any worker, requests are refused: that would test nothing
        name, process = worker
        self._down.add(process)
        if event.kind == "kill":
            return self._signal(process, name, signal.SIGKILL)
        stopped_s = float(event.kind.split()[1])

        def go_on() -> None:
            self._down.discard(process)
            self._signal(process, name, signal.SIGCONT)

        self._later(stopped_s, go_on)
        return self._signal(process, f"{name} for {stopped_s:g} s", signal.SIGSTOP)

    async def _workers(self) -> list[tuple[str, psutil.Process]]:
        pools = (await self._client.get("/v1/pools")).json()["roles"]
        found = []
        for worker in sorted(
            (one for workers in pools.values() for one in workers), key=lambda one: str(one["worker_id"])
        ):
            if psutil.pid_exists(worker["pid"]):
                found.append((worker["worker_id"], psutil.Process(worker["pid"])))
        return found

    def _signal(self, process: psutil.Process | None, name: str, number: signal.Signals) -> str:
        if process is None or not process.is_running():
            return ""
        process.send_signal(number)
        return f"{number.name} to {name} (pid {process.pid})"

    def _lose_disk(self) -> str:
        folder = self._disk_folder
        if folder is None or not folder.exists():
            return ""
        # An earlier one may still be away if a worker has made the folder again.
        away = Path(tempfile.mkdtemp(prefix=f"{folder.name}.away-", dir=folder.parent))
        os.rename(folder, away)

        def bring_back() -> None:
            if folder.exists():  # a worker has made it again: the content of the old one is lost
                shutil.rmtree(away)
            else:
                os.rename(away, folder)

        self._later(_DISK_LOST_S, bring_back)
        return f"the folder of the disk cache is gone for {_DISK_LOST_S:g} s"

    def _later(self, delay_s: float, undo: Callable[[], object]) -> None:
        async def wait_and_undo() -> None:
            await asyncio.sleep(delay_s)
            undo()

        task = asyncio.create_task(wait_and_undo())
        self._repairs.add(task)
        task.add_done_callback(self._repairs.discard)


def _is_edge(process: psutil.Process) -> bool:
    try:
        return "tandem.cluster.edge_process" in process.cmdline()
    except psutil.Error:
        return False


def _chosen(among: Sequence[Any], drawn: float) -> Any:
    return among[int(drawn * len(among))] if among else None


async def _come_to_rest(client: httpx.AsyncClient, run: ChaosRun) -> None:
    """Wait until all workers are back and hold nothing; the run records what is still held."""
    deadline_s = time.monotonic() + _SETTLE_S
    while True:
        check = (await client.post("/v1/pools/check", json={})).json()
        ready = (await client.get("/ready")).status_code == 200
        if ready and check["idle"]:
            run.held = {}
            break
        run.held = check["workers"] if ready else {"the server": "not ready"}
        if time.monotonic() > deadline_s:
            break
        await asyncio.sleep(1.0)
    metrics = (await client.get("/metrics")).text
    for line in metrics.splitlines():
        if line.startswith("tandem_request_moves_total{"):
            cause, _, value = line.partition('cause="')[2].partition('"} ')
            run.moves[cause] = run.moves.get(cause, 0.0) + float(value)
