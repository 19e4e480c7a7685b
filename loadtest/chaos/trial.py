"""One trial: learn the answer of each request, send all while things happen to the server, and say what was lost."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tandem.loadtest.chaos.faults import ChaosFaults
from tandem.loadtest.chaos.operations import OperationFailed, OperationRefused, Operations
from tandem.loadtest.chaos.plan import OPERATIONS, ChaosEvent
from tandem.loadtest.chaos.requests import Answer, ChaosRequest, ask
from tandem.loadtest.chaos.server import TrialServer
from tandem.loadtest.stats import minutes_of
from tandem.protocol.errors import ServingError

Json = dict[str, Any]
Begin = Callable[[str, Callable[[], str]], None]  # a phase by its name, and how far it has come
Expected = tuple[ChaosRequest, object]  # with the content of its answer

_SETTLE_S = 240.0
_RETRY_S = 0.2
_LEAVING_SHARE = 0.08  # of requests whose client leaves before the end
_LEAVES_WITHIN_S = 3.0


class TrialError(ServingError):
    """The server fails without faults too."""


@dataclass(slots=True)
class ChaosRun:
    """What was done and seen. `lost` says in words what must not be; empty = nothing was lost."""

    num_requests: Counter[str] = field(default_factory=Counter)  # by kind
    num_left: int = 0  # by their clients, before their end
    num_sent_again: int = 0  # because a router process died with their connections
    failed: list[str] = field(default_factory=list)
    codes: Counter[str] = field(default_factory=Counter)  # of the errors of those that failed
    wrong: list[str] = field(default_factory=list)
    silences_s: list[float] = field(default_factory=list)  # the longest of each request
    events: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)  # operations that a rule was against, by kind
    broken: list[str] = field(default_factory=list)  # events that could not be done or did not end as they should
    held: Json = field(default_factory=dict)  # by workers that should be idle
    unrest: str = ""  # what the server lacks long after the last event
    num_tracebacks: int = 0  # in the server's log
    moves: dict[str, float] = field(default_factory=dict)  # of requests, by cause

    @property
    def lost(self) -> list[str]:
        """What must not be."""
        told = {"requests failed": self.failed, "answers differ": self.wrong, "events went wrong": self.broken}
        lost = [f"{len(what)} {words}, the first: {what[0]}" for words, what in told.items() if what]
        lost += [f"{worker} holds what nobody uses: {what}" for worker, what in self.held.items() if what]
        lost += [f"{self.num_tracebacks} tracebacks are in the server's log"] if self.num_tracebacks else []
        return lost + ([self.unrest] if self.unrest else [])


async def run_chaos(
    client: httpx.AsyncClient,
    process: psutil.Process,
    requests: Sequence[ChaosRequest],
    events: Sequence[ChaosEvent],
    *,
    duration_s: float,
    num_streams: int,
    seed: int,
    disk_folder: Path | None,
    say: Callable[[str], None],
    begin: Begin = lambda _name, _status: None,
) -> ChaosRun:
    """Learn what each request's answer is, then send them while the events happen, then let the server come to rest.

    `process` is that of `tandem serve` on this machine. Raises `TrialError`.
    """
    expected = await _undisturbed(client, requests, say, begin)
    say(f"{len(expected)} requests were answered undisturbed; now {num_streams} clients send them at once")
    trial = _Trial(client, process, disk_folder, say)
    begin("trial", lambda: trial.progress(duration_s))
    await trial.play(events, expected, duration_s, random.Random(seed), num_streams)
    begin("coming to rest", trial.unrest)
    await trial.come_to_rest()
    return trial.run


async def _undisturbed(
    client: httpx.AsyncClient, requests: Sequence[ChaosRequest], say: Callable[[str], None], begin: Begin
) -> list[Expected]:
    """Requests with their answers. What this model cannot be asked for is left out. Raises `TrialError`."""
    expected: list[Expected] = []
    num_answered, began_s = 0, time.monotonic()

    def how_far() -> str:
        left_s = (time.monotonic() - began_s) / max(num_answered, 1) * (len(requests) - num_answered)
        return f"{num_answered} of {len(requests)}" + (f", about {minutes_of(left_s)} left" if num_answered else "")

    begin("undisturbed answers", how_far)
    for request in requests:
        answer = await ask(client, request)
        if answer.error.startswith("HTTP 400"):
            say(f"left out: {request.kind}: {answer.error}")
        elif answer.error:
            raise TrialError(f"before anything was done a request ({request.kind}) failed: {answer.error}")
        else:
            expected.append((request, answer.content))
        num_answered += 1
    return expected


class _Trial:
    """One run of clients, faults and operations at once."""

    def __init__(
        self, client: httpx.AsyncClient, process: psutil.Process, disk_folder: Path | None, say: Callable[[str], None]
    ) -> None:
        self.run = ChaosRun()
        self._client = client
        self._server = TrialServer(client, process)
        self._faults = ChaosFaults(self._server, disk_folder)
        self._operations = Operations(self._server)
        self._say = say
        self._began_s = time.monotonic()
        self._num_workers = 0  # before anything was done to them

    async def play(
        self,
        events: Sequence[ChaosEvent],
        expected: Sequence[Expected],
        duration_s: float,
        source: random.Random,
        num_streams: int,
    ) -> None:
        """Send requests for this long, while all events happen at their times."""
        self._num_workers = len(await self._server.workers())
        self._began_s = time.monotonic()
        clients = [self._send(expected, random.Random(source.random()), duration_s) for _ in range(num_streams)]
        tasks = [asyncio.create_task(work) for work in [*clients, *map(self._happen, events)]]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await self._faults.repair()

    def progress(self, duration_s: float) -> str:
        """How far the trial has come, in words. Events may end after the load."""
        run, left_s = self.run, duration_s - self._now_s
        left = f"{minutes_of(left_s)} left" if left_s > 0 else "the last answers and events end"
        lost = len(run.failed) + len(run.wrong) + len(run.broken)
        return f"{left}, {run.events.total()} events, {run.num_requests.total()} answers, {lost} lost"

    def unrest(self) -> str:
        """What is waited for at the end, in words."""
        holding = [worker for worker, what in self.run.held.items() if what]
        return self.run.unrest or (f"{', '.join(holding)} still hold something" if holding else "")

    async def come_to_rest(self) -> None:
        """Wait until all workers are back and nothing is held; what still is goes into the run."""
        deadline_s = time.monotonic() + _SETTLE_S
        while True:
            if not await self._is_restless() or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(1.0)
        self.run.moves = _moves((await self._client.get("/metrics")).text)

    async def _is_restless(self) -> bool:
        """Look whether workers are missing or hold something, and note it."""
        check = (await self._client.post("/v1/pools/check", json={})).json()
        self.run.held = {} if check["idle"] else check["workers"]
        is_ready = (await self._client.get("/ready")).status_code == 200
        num_ready = sum(worker.is_ready for worker in await self._server.workers())
        is_whole = is_ready and num_ready >= self._num_workers
        self.run.unrest = "" if is_whole else f"{num_ready} workers serve, and there were {self._num_workers}"
        return not is_whole or not check["idle"]

    async def _send(self, expected: Sequence[Expected], source: random.Random, duration_s: float) -> None:
        """One client, that sends one request after the other."""
        while self._now_s < duration_s:
            request, content = source.choice(expected)
            if source.random() < _LEAVING_SHARE:
                await self._leave_early(request, source.uniform(0, _LEAVES_WITHIN_S))
            else:
                self._note(request, content, await self._answer(request))

    async def _answer(self, request: ChaosRequest) -> Answer:
        answer = await ask(self._client, request)
        while answer.is_cut_off and self._server.has_broken_connections:
            self.run.num_sent_again += 1
            await asyncio.sleep(_RETRY_S)
            answer = await ask(self._client, request)
        return answer

    async def _leave_early(self, request: ChaosRequest, after_s: float) -> None:
        """What a client that leaves has read does not count; what it leaves behind does."""
        try:
            await asyncio.wait_for(ask(self._client, request), after_s)
        except TimeoutError:
            self.run.num_left += 1

    def _note(self, request: ChaosRequest, content: object, answer: Answer) -> None:
        self.run.num_requests[request.kind] += 1
        self.run.silences_s.append(answer.longest_silence_s)
        if answer.error:
            self.run.codes[answer.code] += 1
            self.run.failed.append(f"{request.kind}: {answer.error}")
            self._tell(f"FAILED {self.run.failed[-1]}")
        elif answer.content != content:
            self.run.wrong.append(f"{request.kind}: {answer.content} and not {content}")
            self._tell(f"WRONG {self.run.wrong[-1]}")

    async def _happen(self, event: ChaosEvent) -> None:
        """Do one event at its time, and note how it ended."""
        await asyncio.sleep(max(event.at_s - self._now_s, 0.0))
        try:
            done = await (self._operations if event.kind in OPERATIONS else self._faults).do(event)
        except OperationRefused as exc:
            self.run.refused[event.kind] += 1
            self._tell(f"{event.kind} was left out: {exc}")
        except (OperationFailed, httpx.TransportError) as exc:  # or nothing answers at the server's address
            self.run.broken.append(f"{event.kind}: {exc}")
            self._tell(f"FAILED {self.run.broken[-1]}")
        else:
            if done:
                self.run.events[event.kind] += 1
                self._tell(done)

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _tell(self, what: str) -> None:
        self._say(f"{self._now_s:7.1f} s  {what}")


def _moves(metrics: str) -> dict[str, float]:
    """Of requests, by cause."""
    moves: dict[str, float] = {}
    for line in metrics.splitlines():
        if line.startswith("tandem_request_moves_total{"):
            cause, _, value = line.partition('cause="')[2].partition('"} ')
            moves[cause] = moves.get(cause, 0.0) + float(value)
    return moves
