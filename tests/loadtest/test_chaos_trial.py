"""What a trial does to a server, and what it calls lost. The server is a fake; a real one is in tests/e2e."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tandem.loadtest.chaos import faults, operations, trial
from tandem.loadtest.chaos.plan import FAULTS, OPERATIONS, ChaosEvent, kinds_of, plan
from tandem.loadtest.chaos.requests import NUM_REQUESTS, ChaosRequest, ask, sample_requests
from tandem.loadtest.chaos.server import TrialServer
from tandem.loadtest.chaos.trial import ChaosRun, TrialError, run_chaos
from tandem.protocol.errors import ConfigError
from tests.support.processes import sleeping_child
from tests.support.waiting import eventually

Json = dict[str, Any]


class FakeServer:
    """Answers are a function of the request, but for those that are spoiled. Workers are processes that only sleep."""

    def __init__(self, pids: list[int]) -> None:
        self.workers = [
            {"worker_id": f"w{i}", "pid": pid, "state": "ready", "role": "decode"} for i, pid in enumerate(pids)
        ]
        self.spoil: Json = {}  # how many answers of each kind of fault are still to come
        self.num_undisturbed = len(sample_requests(0, "m", 4))
        self.num_answers = 0
        self.held = {"d": ""}
        self.asked: list[tuple[str, Json]] = []  # of operations
        self.status = 200  # of operations
        self.moves: Json = {"departures": [], "arrivals": []}

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/pools":
            roles: Json = {"decode": [], "prefill": []}
            for worker in self.workers:
                roles[worker["role"]].append(worker)
            return httpx.Response(200, json={"roles": roles, "autoscaler": self.moves})
        if path == "/v1/pools/check":
            return httpx.Response(200, json={"idle": not any(self.held.values()), "workers": self.held})
        if path == "/metrics":
            return httpx.Response(200, text='tandem_request_moves_total{cause="worker_lost"} 3.0\n')
        if path == "/ready":
            return httpx.Response(200)
        body = json.loads(request.content)
        return self._operate(path, body) if path.startswith("/v1/pools/") else self._stream(body)

    def _operate(self, path: str, body: Json) -> httpx.Response:
        operation = path.rpartition("/")[2]
        self.asked.append((operation, body))
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": "not now"}})
        number = len(self.asked)
        if operation == "drain":
            self.moves["departures"].append({"id": number, "left_after_s": 1.0, "back_after_s": 2.0})
        if operation == "add":
            self.moves["arrivals"].append({"worker": "new", "serving_after_s": 1.0})
        return httpx.Response(200, json={"id": number, "worker": "new", "moving": ["a", "b"], "staying": []})

    def _stream(self, body: Json) -> httpx.Response:
        self.num_answers += 1
        if self.num_answers > self.num_undisturbed:
            for fault in self.spoil:
                if self.spoil[fault]:
                    self.spoil[fault] -= 1
                    if fault == "status":
                        return httpx.Response(503, json={"error": {"message": "no worker", "code": "no_worker"}})
                    return httpx.Response(200, text=_events(body, fault))
        return httpx.Response(200, text=_events(body))

    @property
    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self.answer), base_url="http://x")


def _events(body: Json, fault: str = "") -> str:
    word = random.Random(json.dumps(body)).choice(["a", "b", "c"])
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
    with sleeping_child() as one, sleeping_child() as two, sleeping_child() as three:
        yield [one, two, three]


async def run(
    server: FakeServer, events: list[ChaosEvent], *, folder: Path | None = None, duration_s: float = 0.3, **told: Any
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
            **({"say": lambda _: None} | told),
        )


def test_a_seed_plans_the_same_events() -> None:
    kinds = kinds_of("faults,operations")
    events = plan(3, 600, kinds)
    assert events == plan(3, 600, kinds) != plan(4, 600, kinds)
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    assert {event.kind for event in events} == {*FAULTS, *OPERATIONS}
    assert 60 < len(events) < 240
    assert sample_requests(3, "m", 9) == sample_requests(3, "m", 9)


def test_the_faults_of_a_seed_are_those_of_it_without_operations() -> None:
    faults = plan(3, 600, kinds_of("faults"))
    assert faults == [event for event in plan(3, 600, kinds_of("operations,faults")) if event.kind in FAULTS]
    assert {event.kind for event in plan(3, 600, ["kill", "flip"])} == {"kill", "flip"}
    assert plan(3, 600, []) == []


def test_kinds_are_named_by_themselves_and_by_their_group() -> None:
    assert kinds_of(" kill, operations,kill") == ["kill", *OPERATIONS]
    with pytest.raises(ConfigError, match="unknown events 'explode'; choose from: faults, operations, kill"):
        kinds_of("kill,explode")


def test_a_long_prompt_fits_into_the_models_context() -> None:
    for max_model_len in (110, 2048, 100_000):
        (long,) = [one for one in sample_requests(0, "m", 100, max_model_len) if one.kind == "long prompt"]
        assert len(long.body["prompt"]) <= max(max_model_len - 100, 8)


async def test_what_happens_to_workers_is_done_and_undone(
    processes: list[subprocess.Popen[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "_DISK_LOST_S", 0.05)
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / "block").write_text("x")
    server = FakeServer([child.pid for child in processes])
    events = [
        ChaosEvent(0.0, "lose-disk", 0.0),
        ChaosEvent(0.01, "stop-0.2", 0.9),
        ChaosEvent(0.02, "kill", 0.1),
        ChaosEvent(0.03, "kill-router", 0.5),  # there is none
    ]
    result = await run(server, events, folder=folder)
    assert result.events == {"lose-disk": 1, "stop-0.2": 1, "kill": 1}
    assert processes[0].wait(10) == -signal.SIGKILL
    await eventually(lambda: psutil.Process(processes[2].pid).status() != psutil.STATUS_STOPPED)
    assert (folder / "block").read_text() == "x"
    assert result.lost == []
    assert result.moves == {"worker_lost": 3.0}
    assert result.num_requests.total() == len(result.silences_s) > 3


async def test_a_server_that_takes_no_connection_is_lost_and_the_trial_goes_on() -> None:
    class Away(FakeServer):
        def answer(self, request: httpx.Request) -> httpx.Response:
            num_asked = self.moves["num_asked"] = self.moves.get("num_asked", 0) + (request.url.path == "/v1/pools")
            if request.url.path == "/v1/pools" and num_asked == 2:  # after the first look at the workers
                raise httpx.ConnectError("All connection attempts failed")
            return super().answer(request)

    result = await run(Away([]), [ChaosEvent(0.0, kind, 0.0) for kind in ("kill", "kill")], duration_s=0.0)
    assert result.broken == ["kill: All connection attempts failed"]
    assert len(result.lost) == 1


async def test_the_last_worker_that_runs_is_left_alone(processes: list[subprocess.Popen[bytes]]) -> None:
    server = FakeServer([child.pid for child in processes])
    planned = [("kill", 0.1), ("stop-0.2", 0.9), ("kill", 0.5), ("kill", 0.9)]
    events = [ChaosEvent(0.0, kind, drawn) for kind, drawn in planned]
    result = await run(server, events, duration_s=0.0)
    assert result.events == {"kill": 2, "stop-0.2": 1}
    assert [child.poll() for child in processes] == [-signal.SIGKILL, None, -signal.SIGKILL]


async def test_a_disk_cache_that_was_created_again_can_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_DISK_LOST_S", 0.05)
    folder = tmp_path / "kv"

    class Storing(FakeServer):
        def answer(self, request: httpx.Request) -> httpx.Response:
            folder.mkdir(exist_ok=True)
            (folder / "block").write_text("x")
            return super().answer(request)

    # To kill a worker, of which there is none, the workers are asked for.
    kinds = ("lose-disk", "kill", "lose-disk")
    result = await run(Storing([]), [ChaosEvent(0.0, kind, 0.0) for kind in kinds], folder=folder, duration_s=0.0)
    assert result.events == {"lose-disk": 2}
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
async def test_what_clients_lose_is_reported(fault: str, lost: str) -> None:
    server = FakeServer([])
    server.spoil = {fault: 1}
    (line,) = (await run(server, [])).lost
    assert re.search(lost, line), line


async def test_a_wrong_score_is_a_wrong_answer() -> None:
    request = next(one for one in sample_requests(0, "m", 4) if one.kind == "log probabilities")
    server = FakeServer([])
    server.num_undisturbed, server.spoil = 1, {"wrong score": 1}
    async with server.client as client:
        first, second, third = [await ask(client, request) for _ in range(3)]
    assert first.content == third.content != second.content


async def test_answers_are_the_same_however_they_are_divided_into_events() -> None:
    """Text with characters that Unicode calls an end of a line, scores of a chat, and a call of a tool."""

    def event(delta: Json, reason: str | None = None, scores: list[Json] | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": {"content": scores or []}}
        return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n"

    def call(**function: str) -> Json:
        return {"tool_calls": [{"index": 0, "function": function}]}

    scores = [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}]
    end = event({}, "tool_calls") + "data: [DONE]\n\n"
    name = event(call(name="find", arguments=""))
    one = event({"role": "assistant", "content": ""}) + event({"content": "a\u2028b\x85"}, scores=scores) + name
    one += event(call(arguments='{"x": 1}')) + end
    many = event({"content": "a\u2028"}, scores=scores[:1]) + event({"content": "b\x85"}, scores=scores[1:]) + name
    many += event(call(arguments='{"x"')) + event(call(arguments=": 1}")) + end
    other = one.replace(": 1}", ": 2}")
    texts = iter([one, many, other])
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=next(texts)))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        first, second, third = [await ask(client, ChaosRequest("chat", "/v1", {})) for _ in range(3)]
    assert first.error == second.error == third.error == ""
    assert first.content == second.content != third.content


async def test_what_the_model_cannot_be_asked_for_is_left_out() -> None:
    class WithoutChat(FakeServer):
        def answer(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/chat/completions":
                return httpx.Response(400, json={"error": {"message": "no template", "code": "no_chat"}})
            return super().answer(request)

    said: list[str] = []
    result = await run(WithoutChat([]), [], duration_s=0.2, say=said.append)
    assert [line.split(":")[1] for line in said if "no template" in line] == [" chat", " JSON schema", " tool call"]
    assert result.lost == []


@pytest.mark.parametrize(("fault", "is_lost"), [("cut off", False), ("status", True)])
async def test_a_client_resends_what_was_cut_off(fault: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that a server tells are lost at that time too."""

    class Cutting(FakeServer):
        def _stream(self, body: Json) -> httpx.Response:
            if self.num_answers == self.num_undisturbed and self.spoil.pop("cut off", 0):
                raise httpx.ReadError("the connection broke")
            return super()._stream(body)

    monkeypatch.setattr(TrialServer, "has_broken_connections", True)
    server = Cutting([])
    server.spoil = {fault: 1}
    result = await run(server, [])
    assert bool(result.lost) == is_lost
    assert result.num_sent_again == (not is_lost)


async def test_a_server_that_fails_before_anything_is_done_fails_the_trial() -> None:
    server = FakeServer([])
    server.num_undisturbed, server.spoil = 3, {"status": 1}
    with pytest.raises(TrialError, match=r"before anything was done a request .* failed: HTTP 503"):
        await run(server, [])


async def test_operations_are_asked_for(processes: list[subprocess.Popen[bytes]]) -> None:
    server = FakeServer([child.pid for child in processes])
    server.workers[0]["role"] = "prefill"
    kinds = ["flip", "migrate", "terminate", "replace"]
    result = await run(server, [ChaosEvent(0.05 * i, kind, 0.5) for i, kind in enumerate(kinds)], duration_s=0.0)
    assert result.events == dict.fromkeys(kinds, 1)
    assert result.lost == []
    assert processes[1].poll() == -signal.SIGTERM
    flip, migrate, add, drain = server.asked
    assert flip == ("roles", {"worker": "w1", "role": "prefill"})
    assert migrate == ("migrate", {"worker": "w2"})
    assert (add[0], drain[0]) == ("add", "drain")
    assert not drain[1]["restart"]


async def test_a_rolling_restart_takes_one_worker_after_the_other(processes: list[subprocess.Popen[bytes]]) -> None:
    class Coming(FakeServer):
        """Each worker that was restarted comes back with another process, and a while later."""

        def answer(self, request: httpx.Request) -> httpx.Response:
            shown = super().answer(request)
            if request.method == "GET":
                for record in self.moves["departures"]:
                    record["back_after_s"] = 2.0
            return shown

        def _operate(self, path: str, body: Json) -> httpx.Response:
            worker = next(one for one in self.workers if one["worker_id"] == body["worker"])
            worker["pid"] = os.getpid()
            answer = super()._operate(path, body)
            self.moves["departures"][-1].pop("back_after_s")
            return answer

    server = Coming([child.pid for child in processes])
    events = [ChaosEvent(0.0, "rolling-restart", 0.0), ChaosEvent(0.0, "rolling-restart", 0.0)]
    result = await run(server, events, duration_s=0.0)
    assert result.events == result.refused == {"rolling-restart": 1}, "a second one at the same time is left out"
    assert server.asked == [("drain", {"worker": f"w{i}", "restart": True}) for i in range(3)]


@pytest.mark.parametrize("kind", ["flip", "migrate", "restart", "replace"])
@pytest.mark.parametrize(("status", "is_lost"), [(409, False), (404, False), (500, True)])
async def test_an_operation_against_a_rule_is_left_out_and_a_failure_a_loss(
    kind: str, status: int, is_lost: bool, processes: list[subprocess.Popen[bytes]]
) -> None:
    server = FakeServer([child.pid for child in processes])
    server.status = status
    result = await run(server, [ChaosEvent(0.0, kind, 0.0)], duration_s=0.0)
    assert not result.events
    assert result.refused == ({} if is_lost else {kind: 1})
    assert bool(result.lost) == is_lost
    assert not is_lost or re.search(f"1 events went wrong, the first: {kind}: .*HTTP 500", result.lost[0])


async def test_an_endless_departure_is_a_loss(
    processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(FakeServer):
        def _operate(self, path: str, body: Json) -> httpx.Response:
            answer = super()._operate(path, body)
            del self.moves["departures"][0]["back_after_s"]
            return answer

    monkeypatch.setattr(operations, "_END_S", 0.3)
    result = await run(Stuck([child.pid for child in processes]), [ChaosEvent(0.0, "restart", 0.0)], duration_s=0.0)
    assert re.search("1 events went wrong, the first: restart: nothing of back_after_s", result.lost[0])


@pytest.mark.parametrize("kind", ["kill", "restart", "terminate"])
async def test_no_worker_goes_while_no_other_one_serves(
    kind: str, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "_SETTLE_S", 0.0)
    server = FakeServer([child.pid for child in processes])
    for worker in server.workers[1:]:
        worker["state"] = "draining"
    result = await run(server, [ChaosEvent(0.0, kind, 0.0)], duration_s=0.0)
    assert not result.events
    assert not server.asked
    assert result.lost == ["1 workers serve, and there were 3"]
    assert [child.poll() for child in processes] == [None, None, None]


def test_a_traceback_in_the_log_is_a_loss() -> None:
    assert ChaosRun().lost == []
    assert ChaosRun(num_tracebacks=2).lost == ["2 tracebacks are in the server's log"]


async def test_unused_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_SETTLE_S", 0.0)
    server = FakeServer([])
    server.held = {"p": "", "d": "one lease is open"}
    assert (await run(server, [])).lost == ["d holds what nobody uses: one lease is open"]


async def test_its_phases_say_how_far_they_have_come(processes: list[subprocess.Popen[bytes]]) -> None:
    told: list[str] = []
    status: list[tuple[str, Callable[[], str]]] = []

    class Watched(FakeServer):
        def answer(self, request: httpx.Request) -> httpx.Response:
            if status:
                name, how_far = status[-1]
                told.append(f"{name}: {how_far()}")
            return super().answer(request)

    server = Watched([process.pid for process in processes])
    server.spoil = {"no end": 1}
    events = [ChaosEvent(0.1, "flip", 0.0)]
    await run(server, events, duration_s=0.5, begin=lambda name, how_far: status.append((name, how_far)))
    assert [name for name, _ in status] == ["undisturbed answers", "trial", "coming to rest"]
    assert told[0] == "undisturbed answers: 0 of 24"
    assert [line.partition(", ")[0] for line in told[1:24]] == [f"undisturbed answers: {n} of 24" for n in range(1, 24)]
    assert re.search(r", about [0-9]+:[0-9]{2} left$", told[1])
    trial = [line for line in told if line.startswith("trial")]
    assert re.search(r"0 events, 0 answers, 0 lost$", trial[0])
    assert any(re.search(r", 1 events, [0-9]+ answers, 1 lost$", line) for line in trial)
    assert told[-1].startswith("coming to rest: ")
    assert len(sample_requests(0, "m", 4)) == NUM_REQUESTS
