"""What a trial does to a server, and what it calls lost. The server is a fake; a real one is in tests/e2e."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tandem.loadtest import chaos
from tandem.loadtest.chaos import ChaosEvent, ChaosRun, ask, plan, run_chaos, sample_requests
from tests.support.waiting import eventually

Json = dict[str, Any]


class FakeServer:
    """Answers are a function of the request, but for those that are spoiled."""

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids
        self.spoil: Json = {}  # how many answers of each kind of fault are still to come
        self.num_undisturbed = len(sample_requests(0, "m", 4))
        self.num_answers = 0
        self.held = {"d": ""}

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/pools":
            workers = [{"worker_id": f"w{i}", "pid": pid} for i, pid in enumerate(self.pids)]
            return httpx.Response(200, json={"roles": {"decode": workers}})
        if path == "/v1/pools/check":
            return httpx.Response(200, json={"idle": not any(self.held.values()), "workers": self.held})
        if path == "/metrics":
            return httpx.Response(200, text='tandem_request_moves_total{cause="worker_lost"} 3.0\n')
        if path == "/ready":
            return httpx.Response(200)
        return self._stream(json.loads(request.content))

    def _stream(self, body: Json) -> httpx.Response:
        self.num_answers += 1
        if self.num_answers > self.num_undisturbed:
            for fault in self.spoil:
                if self.spoil[fault]:
                    self.spoil[fault] -= 1
                    if fault == "status":
                        return httpx.Response(503, json={"error": {"message": "no worker"}})
                    return httpx.Response(200, text=_events(body, fault))
        return httpx.Response(200, text=_events(body))

    @property
    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self.answer), base_url="http://x")


def _events(body: Json, fault: str = "") -> str:
    word = random.Random(f"{body['prompt']}{body['seed']}").choice(["a", "b", "c"])
    events: list[Json] = []
    for index in range(body.get("n", 1)):
        for number in range(3):
            text = "?" if fault == "wrong text" and number == 1 else word
            score = -2.0 if fault == "wrong score" and number == 1 else -1.0
            logprobs = {"tokens": [text], "token_logprobs": [score]} if "logprobs" in body else None
            reason = "length" if number == 2 and fault != "no end" else None
            events.append({"choices": [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}]})
    if fault == "error event":
        events.append({"error": {"message": "it died"}})
    events.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3 * body.get("n", 1)}})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(3)]
    yield children
    for child in children:
        child.kill()
        child.wait()


async def run(
    server: FakeServer, events: list[ChaosEvent], *, folder: Path | None = None, duration_s: float = 0.3
) -> ChaosRun:
    async with server.client as client:
        return await run_chaos(
            client,
            psutil.Process(os.getpid()),
            sample_requests(0, "m", 4),
            events,
            duration_s=duration_s,
            num_streams=3,
            seed=0,
            disk_folder=folder,
            say=lambda _: None,
        )


def test_a_seed_plans_the_same_faults() -> None:
    events = plan(3, 600, has_edges=True, has_disk=True)
    assert events == plan(3, 600, has_edges=True, has_disk=True) != plan(4, 600, has_edges=True, has_disk=True)
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert {event.kind for event in events} == set(chaos._KINDS)
    assert 30 < len(events) < 120
    few = {event.kind for event in plan(3, 600, has_edges=False, has_disk=False)}
    assert few == {"kill", "stop 3 s", "stop 20 s"}
    assert sample_requests(3, "m", 9) == sample_requests(3, "m", 9)


async def test_what_happens_to_workers_is_done_and_undone(
    processes: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "_DISK_LOST_S", 0.05)
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / "block").write_text("x")
    server = FakeServer([child.pid for child in processes])
    events = [
        ChaosEvent(0.0, "lose disk cache", 0.0),
        ChaosEvent(0.01, "stop 0.2 s", 0.9),
        ChaosEvent(0.02, "kill", 0.1),
        ChaosEvent(0.03, "kill router process", 0.5),  # there is none
    ]
    result = await run(server, events, folder=folder)
    assert result.events == {"lose disk cache": 1, "stop 0.2 s": 1, "kill": 1}
    assert processes[0].wait(10) == -signal.SIGKILL
    await eventually(lambda: psutil.Process(processes[2].pid).status() != psutil.STATUS_STOPPED)
    assert (folder / "block").read_text() == "x"
    assert result.lost == []
    assert result.moves == {"worker_lost": 3.0}
    assert result.num_requests.total() == len(result.silences_s) > 3


async def test_the_last_worker_that_runs_is_left_alone(processes: list[subprocess.Popen[bytes]]) -> None:
    server = FakeServer([child.pid for child in processes])
    events = [
        ChaosEvent(0.0, "kill", 0.1),
        ChaosEvent(0.0, "stop 0.2 s", 0.9),
        ChaosEvent(0.0, "kill", 0.5),
        ChaosEvent(0.0, "kill", 0.9),
    ]
    result = await run(server, events, duration_s=0.0)
    assert result.events == {"kill": 2, "stop 0.2 s": 1}
    assert [child.poll() for child in processes] == [-signal.SIGKILL, None, -signal.SIGKILL]


async def test_a_disk_cache_that_workers_have_made_anew_can_be_lost_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos, "_DISK_LOST_S", 0.05)
    folder = tmp_path / "kv"

    class Storing(FakeServer):
        def answer(self, request: httpx.Request) -> httpx.Response:
            folder.mkdir(exist_ok=True)
            (folder / "block").write_text("x")
            return super().answer(request)

    # To kill a worker, of which there is none, the workers are asked for.
    kinds = ("lose disk cache", "kill", "lose disk cache")
    result = await run(Storing([]), [ChaosEvent(0.0, kind, 0.0) for kind in kinds], folder=folder, duration_s=0.0)
    assert result.events == {"lose disk cache": 2}
    assert os.listdir(tmp_path) == ["kv"]
    assert result.lost == []


@pytest.mark.parametrize(
    ("fault", "lost"),
    [
        ("status", "1 requests failed, the first: .*HTTP 503"),
        ("error event", "1 requests failed, the first: .*it died"),
        ("no end", "1 requests failed, the first: .*ended without an end"),
        ("wrong text", "1 answers differ"),
    ],
)
async def test_what_clients_lose_is_told(fault: str, lost: str) -> None:
    server = FakeServer([])
    server.spoil = {fault: 1}
    (line,) = (await run(server, [])).lost
    assert re.search(lost, line), line


async def test_a_wrong_score_is_a_wrong_answer() -> None:
    body = next(body for kind, body in sample_requests(0, "m", 4) if kind == "log probabilities")
    server = FakeServer([])
    server.num_undisturbed, server.spoil = 1, {"wrong score": 1}
    async with server.client as client:
        first, second, third = [await ask(client, body) for _ in range(3)]
    assert first.content == third.content != second.content


async def test_memory_that_nobody_uses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "_SETTLE_S", 0.0)
    server = FakeServer([])
    server.held = {"p": "", "d": "one lease is open"}
    assert (await run(server, [])).lost == ["d holds what nobody uses: one lease is open"]
