"""A remote backend is the backend, seen from another process: same answers, same errors, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.processes import deciding_process, wire
from tandem.frontend.processes.backend_service import BackendService
from tandem.frontend.processes.deciding_client import JoinSettings
from tandem.frontend.processes.deciding_process import DecidingProcess
from tandem.frontend.processes.methods import invocation
from tandem.frontend.processes.remote_backend import BackendState, RemoteBackend
from tandem.frontend.response_store import LocalResponses
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import EVERYONE, CacheScope
from tandem.protocol.errors import (
    NoWorker,
    Overloaded,
    PinNotFound,
    RequestError,
    ServingError,
    WorkerError,
)
from tandem.protocol.messages import Prefetch, Role, SequenceDelta
from tandem.protocol.sampling import SamplingParams
from tandem.router.backend import Backend, GenerateRequest, PinRequest
from tandem.router.engines.dispatcher import EngineReservation
from tandem.router.engines.errors import EngineFailed
from tandem.router.streams import Stream
from tandem.text.tokenizer import Tokenizer
from tests.support.apps import app_client
from tests.support.deciding_relay import DecidingRelay
from tests.support.fake_backend import FakeBackend, delta_of, events
from tests.support.raw_frontend import RawFrontend
from tests.support.streams import Pulled
from tests.support.waiting import eventually

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
REQUEST = GenerateRequest("r", [1, 2, 3], SamplingParams(max_tokens=8), EVERYONE)
decode = wire.decoder_of(results=SequenceDelta, states=BackendState)


def serve(number: int) -> wire.Call[Any]:
    return wire.Call(number, invocation(Backend.serve, REQUEST))


class Always:
    def __init__(self) -> None:
        self.reason: str | None = None


class Line:
    def __init__(self, backend: FakeBackend, endpoint: str, stack: AsyncExitStack, **options: Any) -> None:
        self.backend = backend
        self.readiness = Always()
        self.scrape = AsyncMock(return_value=b"tandem_worker_running 1.0\n")
        self.service = BackendService(backend, self.readiness, self.scrape)
        self.deciding = DecidingProcess(self.service, endpoint, ApiKeys(), **options)
        self.endpoint = endpoint
        self.lost: list[str] = []  # frontends whose connection ended
        self._stack = stack

    async def relay(self) -> DecidingRelay:
        return await self._stack.enter_async_context(DecidingRelay(self.endpoint, f"{self.endpoint}-relay"))

    async def frontend(
        self, name: str = "frontend", timeout_s: float = 20.0, relay: DecidingRelay | None = None, **options: Any
    ) -> RemoteBackend:
        self.deciding.expect(name)
        endpoint = self.endpoint if relay is None else relay.endpoint
        frontend = RemoteBackend(JoinSettings(endpoint, name, lambda: self.lost.append(name), timeout_s, **options))
        self._stack.push_async_callback(frontend.close)
        await frontend.start()
        return frontend

    async def client(self, frontend: RemoteBackend) -> httpx.AsyncClient:
        app = create_app(
            frontend,
            self.backend.tokenizer,
            RouterConfig(),
            CollectorRegistry(),
            readiness=frontend,
            responses=frontend.responses,
            api_keys=frontend.api_keys,
        )
        client = app_client(app)
        return await self._stack.enter_async_context(client)


@asynccontextmanager
async def line(tokenizer: Tokenizer, folder: Path, **options: Any) -> AsyncIterator[Line]:
    """Nothing may be open at its end. `options` are those of the deciding process."""
    backend = FakeBackend(tokenizer)
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        made = Line(backend, f"{folder}/hub", stack, **options)
        await made.deciding.start()
        try:
            yield made
        finally:
            await made.deciding.close()
    assert backend.num_open == 0


def subclasses(kind: type[ServingError]) -> Iterator[type[ServingError]]:
    for sub in kind.__subclasses__():
        if sub.__module__.startswith("tandem."):  # Ray makes some too, for errors of actors
            yield sub
            yield from subclasses(sub)


async def collect(stream: Stream[SequenceDelta]) -> list[SequenceDelta]:
    async with aclosing(Pulled(stream)) as deltas:
        return [delta async for delta in deltas]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_frontend_answers_as_one_process_would(tokenizer: Tokenizer, tmp_path: Path, is_stream: bool) -> None:
    body = BODY | {"stream": is_stream, "logprobs": True, "top_logprobs": 2, "n": 2, "seed": 3}
    async with line(tokenizer, tmp_path) as here:
        through = await here.client(await here.frontend())
        app = create_app(here.backend, tokenizer, RouterConfig(), CollectorRegistry(), api_keys=ApiKeys())
        async with app_client(app) as direct:
            answers = [await client.post(CHAT, json=body) for client in (direct, through)]
        assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
        bare = [_without_ids(events(a) if is_stream else [a.json()]) for a in answers]
        assert sorted(map(str, bare[0])) == sorted(map(str, bare[1]))  # siblings may interleave otherwise
        first, second = here.backend.requests[0], here.backend.requests[2]
        assert replace(second, request_id=first.request_id, fork_of=first.fork_of) == first


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_response_goes_on_in_another_process(tokenizer: Tokenizer, tmp_path: Path, is_stream: bool) -> None:
    path = "/v1/responses"
    async with line(tokenizer, tmp_path) as here:
        one, other = [await here.client(await here.frontend(f"frontend-{i}")) for i in range(2)]
        answer = await one.post(path, json={"input": "one", "stream": is_stream})
        first = json.loads(answer.text.split("data: ")[-1])["response"] if is_stream else answer.json()
        second = await other.post(path, json={"input": "two", "previous_response_id": first["id"]})
        assert (second.json()["status"], here.backend.requests[1].conversation_id) == ("completed", first["id"])
        assert (await other.get(f"{path}/{first['id']}")).json() == first
        assert (await other.delete(f"{path}/{first['id']}")).json()["deleted"]
        gone = await one.post(path, json={"input": "two", "previous_response_id": first["id"]})
        assert (gone.status_code, gone.json()["error"]["param"]) == (404, "previous_response_id")


async def test_an_answer_that_cannot_be_kept_is_an_answer(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with line(tokenizer, tmp_path) as here:
        client = await here.client(await here.frontend())

        async def fail(*_: object) -> None:
            raise WorkerError("gone")

        monkeypatch.setattr(LocalResponses, "put", fail)
        answer = await client.post("/v1/responses", json={"input": "one"})
        assert (answer.status_code, answer.json()["status"]) == (200, "completed")


def _without_ids(parts: list[object]) -> list[object]:
    return [
        {name: value for name, value in part.items() if name not in {"id", "created"}}
        if isinstance(part, dict)
        else part
        for part in parts
    ]


async def test_deltas_of_one_turn_travel_in_one_message(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Twenty sequences that step together, as a worker's batch does, cost few messages a step."""
    async with line(tokenizer, tmp_path) as here:
        steps = here.backend.reply_steps(REQUEST)
        step = asyncio.Event()
        here.backend.script = lambda _: [step, *steps]
        here.deciding.expect("frontend")
        with RawFrontend(here.endpoint, "frontend") as frontend:
            frontend.join()
            for call in range(20):
                frontend.send(serve(call))
            await eventually(lambda: here.backend.num_open == 20)
            step.set()
            messages: list[wire.Results[SequenceDelta]] = []

            def num_items() -> int:
                decoded = map(decode, frontend.take())
                messages.extend(message for message in decoded if isinstance(message, wire.Results))
                return sum(len(message.items) for message in messages)

            await eventually(lambda: num_items() == 20 * len(steps))
            assert len(messages) <= 2 * len(steps)


async def test_every_error_is_the_same_on_the_other_side() -> None:
    kinds = [ServingError, *subclasses(ServingError)]
    assert len(kinds) > 15
    assert EngineFailed in kinds  # made of other things than a message
    for kind in kinds:
        if issubclass(kind, Overloaded):
            error: ServingError = kind("too much", retry_after_s=2.5)
        elif kind.__init__ is ServingError.__init__:
            error = kind("wrong", param="messages", code="some_code")
        else:
            error = kind.__new__(kind)  # of other engines
            ServingError.__init__(error, "wrong")
        error.num_computed_tokens = 5
        seen = wire.error_of(wire.wire_error(error))
        assert type(seen) is type(error)
        assert seen.num_computed_tokens == 5
        assert (seen.message, seen.param, seen.code, seen.status, seen.error_type) == (
            error.message,
            error.param,
            error.code,
            error.status,
            error.error_type,
        )
        assert getattr(seen, "retry_after_s", None) == getattr(error, "retry_after_s", None)


async def test_a_dropped_frontend_loses_its_requests_and_no_other(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with line(tokenizer, tmp_path) as here:
        first, second = await here.frontend("first"), await here.frontend("second")
        go_on = asyncio.Event()
        here.backend.script = lambda request: [go_on, *here.backend.reply_steps(request)]
        waiting = [asyncio.create_task(collect(frontend.serve(REQUEST))) for frontend in (first, second)]
        await eventually(lambda: here.backend.num_open == 2)
        here.deciding.drop("first")
        await eventually(lambda: here.backend.num_open == 1)
        with pytest.raises(NoWorker, match="has closed the connection"):
            await waiting[0]
        assert here.lost == ["first"]
        go_on.set()
        assert await waiting[1] == here.backend.reply_steps(REQUEST)


async def test_what_a_dropped_frontend_sent_starts_nothing_when_it_is_read_late(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with line(tokenizer, tmp_path) as here:
        here.deciding.expect("frontend")
        with RawFrontend(here.endpoint, "frontend") as frontend:
            frontend.join()
            await eventually(lambda: bool(frontend.take()))
            frontend.send(serve(0))  # it has not been read yet
            here.deciding.drop("frontend")
            await eventually(lambda: not frontend.take() and frontend.is_closed)
            with RawFrontend(here.endpoint, "frontend") as again:  # an id is never used again
                again.join()
                again.send(serve(0))
                again.send_bytes(b"\x93nonsense")
                await eventually(lambda: "is not a message" in caplog.text)  # and what was sent before it has been read
            assert (here.backend.requests, here.deciding.num_running) == ([], 0)


@pytest.mark.parametrize(
    "message",
    [
        ["Call", 0, ["Backend.serve", ["no request"]]],
        ["Call", 0, ["OperatorApi.pools", [{"type": "nonsense"}]]],
        ["Call", 0, ["ManagedWorkers.drain", ["p", 1.0, "not a truth value"]]],
        ["Call", 0, ["Backend.__init__", []]],
        ["Call", 0, ["RequestFlow.shut_down", []]],
        ["Events", [[0, ["EngineReservation.answered", []]]]],
    ],
    ids=["serve", "pools", "drain", "init", "shut_down", "events"],
)
async def test_a_forbidden_call_fails_alone(tokenizer: Tokenizer, tmp_path: Path, message: list[object]) -> None:
    async with line(tokenizer, tmp_path) as here:
        here.deciding.expect("frontend")
        here.backend.script = lambda _: [asyncio.Event()]
        with RawFrontend(here.endpoint, "frontend") as frontend:
            frontend.join()
            await eventually(lambda: bool(frontend.take()))
            frontend.send(serve(1))
            if message[0] == "Events":
                frontend.send(serve(0))
            frontend.send(message)
            assert await _failed_call(frontend) == 0
            await eventually(lambda: here.deciding.num_running == here.backend.num_open == 1)  # call 1


async def _failed_call(frontend: RawFrontend) -> int:
    failed: list[int] = []

    def has_failed() -> bool:
        for data in frontend.take():
            message = decode(data)
            if isinstance(message, wire.Failed):
                assert message.error.code == "internal_error"
                failed.append(message.number)
        return bool(failed)

    await eventually(has_failed)
    (call,) = failed
    return call


@pytest.mark.parametrize("data", [b"\x93nonsense", b"", wire.encode(["Nobody", 3]), wire.encode(["Call", "x"])])
async def test_a_frontend_whose_message_names_no_call_is_disconnected(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    """It cannot be said who waits for an answer. The process sees the end of the connection, and is replaced."""
    async with line(tokenizer, tmp_path) as here:
        relay = await here.relay()
        frontend, other = await here.frontend(relay=relay), await here.frontend("other")
        here.backend.script = lambda _: [asyncio.Event()]
        waiting = asyncio.create_task(collect(frontend.serve(REQUEST)))
        await eventually(lambda: here.backend.num_open == 1)
        relay.say(data)
        with pytest.raises(NoWorker, match="has closed the connection"):
            await waiting
        assert here.lost == ["frontend"]
        await eventually(lambda: here.backend.num_open == 0)
        assert "is not a message" in caplog.text
        assert await other.pools() == {"workers": []}


async def test_a_request_that_cannot_be_opened_fails_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with line(tokenizer, tmp_path) as here:
        frontend = await here.frontend()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeBackend, "serve", lambda *_: 1 / 0)
            failing = await here.frontend("other")  # its methods are those of now
        with pytest.raises(ServingError, match="Internal server error"):
            await collect(failing.serve(REQUEST))
        assert await collect(frontend.serve(REQUEST)) == here.backend.reply_steps(REQUEST)


async def test_an_item_that_cannot_be_sent_fails_its_call_and_no_other(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with line(tokenizer, tmp_path) as here:
        frontend = await here.frontend()
        unsendable = delta_of([1 << 70])
        go_on = asyncio.Event()
        bad = replace(REQUEST, request_id="bad")
        here.backend.script = lambda request: [
            go_on,
            *([unsendable, asyncio.Event()] if request == bad else here.backend.reply_steps(request)),
        ]
        failing, *others = [asyncio.create_task(collect(frontend.serve(one))) for one in (bad, REQUEST, REQUEST)]
        await eventually(lambda: here.backend.num_open == 3)
        go_on.set()  # so the first item of all three is sent at once
        with pytest.raises(ServingError, match="Internal server error"):
            await failing
        assert await asyncio.gather(*others) == [here.backend.reply_steps(REQUEST)] * 2


async def test_an_event_that_cannot_be_sent_fails_its_call(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with line(tokenizer, tmp_path) as here:
        client = (await here.frontend())._client
        here.backend.script = lambda _: [asyncio.Event()]
        received: list[object] = []
        call = client.open(received.append, Backend.serve, REQUEST)
        await eventually(lambda: here.backend.num_open == 1)
        client.event(call, EngineReservation.ended, 1 << 70, 0)
        await eventually(lambda: received)
        [failure] = received
        assert isinstance(failure, WorkerError)
        assert "could not be sent" in str(failure)
        client.close_call(call)
        await eventually(lambda: here.backend.num_open == 0)
        assert here.lost == []


async def test_silence_fails_calls_until_the_deciding_process_speaks(tokenizer: Tokenizer, tmp_path: Path) -> None:
    now = [100.0]
    async with line(tokenizer, tmp_path, status_interval_s=0.01) as here:
        relay = await here.relay()
        frontend = await here.frontend(timeout_s=5.0, relay=relay, watch_interval_s=0.01, clock=lambda: now[0])
        here.backend.script = lambda _: [asyncio.Event()]
        waiting = asyncio.create_task(collect(frontend.serve(REQUEST)))
        await eventually(lambda: here.backend.num_open == 1)
        with relay.silence():
            await eventually(lambda: _advance(now) and frontend.reason is not None)
            with pytest.raises(NoWorker, match="silent for"):
                await waiting
            assert not frontend.ready
            with pytest.raises(NoWorker, match="does not answer"):
                await frontend.pools()
        await eventually(lambda: frontend.reason is None and frontend.ready)
        await eventually(lambda: here.backend.num_open == 0)


def _advance(now: list[float]) -> bool:
    now[0] += 0.2  # a jump would be a watch that was asleep
    return True


async def test_a_missing_deciding_process_is_reported_in_time(tmp_path: Path) -> None:
    frontend = RemoteBackend(JoinSettings(f"{tmp_path}/nobody", "frontend", lambda: None, 0.05))
    with pytest.raises(WorkerError, match="cannot be reached"):
        await frontend.start()
    await frontend.close()


async def test_questions_are_answered(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with line(tokenizer, tmp_path) as here:
        frontend = await here.frontend()
        here.backend.manager.held = {"d": "2 blocks in use"}
        assert (await frontend.explain(REQUEST))["tenant"] == "default"
        assert await frontend.decisions() == [{"request_id": "r", "tenant": "default"}]
        assert await frontend.pools() == {"workers": []}
        assert await frontend.manager.check_integrity() == here.backend.manager.held
        assert await frontend.manager.set_role("p", Role.DECODE) == {"worker": "p", "to": "decode"}
        with pytest.raises(RequestError, match="There is no worker 'x'"):
            await frontend.manager.set_role("x", Role.DECODE)
        assert await frontend.scrape() == b"tandem_worker_running 1.0\n"


async def test_metrics_are_built_once_for_all_frontends_that_ask(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with line(tokenizer, tmp_path) as here:
        frontends = [await here.frontend(name) for name in ("a", "b", "c")]
        texts = await asyncio.gather(*(frontend.scrape() for frontend in frontends * 20))
        assert set(texts) == {b"tandem_worker_running 1.0\n"}
        assert here.scrape.await_count <= 2


async def test_pins_are_made_followed_and_ended(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with line(tokenizer, tmp_path) as here:
        frontend = await here.frontend()
        scope = CacheScope("s")
        request = PinRequest(token_ids=[1, 2], cache_scope=scope, tenant="t", ttl_s=5.0, prefetch=Prefetch.POOL)
        state = await frontend.cache.pin(request)
        assert here.backend.cache.requests == [request]
        assert state == (await frontend.cache.pins("t", scope))[0]
        assert state == await frontend.cache.prefetch(state.pin_id, Prefetch.HOST, "t")
        assert await frontend.cache.pins("t", CacheScope("other")) == await frontend.cache.pins("other", None) == []
        with pytest.raises(PinNotFound):
            await frontend.cache.prefetch(state.pin_id, Prefetch.HOST, "other")
        with pytest.raises(PinNotFound):
            await frontend.cache.unpin(state.pin_id, "other")
        assert await frontend.cache.pins(None, None) == [state]
        await frontend.cache.unpin(state.pin_id, "t")
        with pytest.raises(PinNotFound) as caught:
            await frontend.cache.unpin(state.pin_id, None)
        assert caught.value.param == "id"


async def test_status_is_what_requests_need_to_know(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with line(tokenizer, tmp_path, status_interval_s=0.01) as here:
        frontend = await here.frontend()
        assert (frontend.model, frontend.max_model_len, frontend.ready, frontend.reason) == ("org/toy", 512, True, None)
        client = await here.client(frontend)
        assert (await client.get("/ready")).status_code == 200
        here.readiness.reason, here.backend.ready = "warming up", False
        await eventually(lambda: not frontend.ready)
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "warming up")


async def test_a_fault_of_ours_ends_neither_side(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with line(tokenizer, tmp_path, status_interval_s=0.01) as here:
        frontend = await here.frontend()
        faults = [ValueError("in the deciding process")]

        def status() -> BackendState:
            if faults:
                raise faults.pop()
            return known()

        known = here.service.status
        monkeypatch.setattr(here.service, "status", status)
        await eventually(lambda: not faults)
        here.readiness.reason = "warming up"
        await eventually(lambda: frontend.reason == "warming up")  # status is still told
        with monkeypatch.context() as patch:
            patch.setattr(wire, "error_of", lambda _: 1 / 0)
            here.backend.script = lambda _: [RequestError("no")]
            with pytest.raises(NoWorker, match="could not be handled"):
                await collect(frontend.serve(REQUEST))
        with monkeypatch.context() as patch:
            patch.setattr(deciding_process._Frontend, "handle", lambda *_: 1 / 0)
            here.deciding.expect("raw")
            with RawFrontend(here.endpoint, "raw") as raw:
                raw.join()
                raw.send(wire.Cancel(0))
                await eventually(lambda: "a message could not be handled" in caplog.text)
        assert await frontend.pools() == {"workers": []}


async def test_what_cannot_be_encoded_leaves_nothing_behind(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with line(tokenizer, tmp_path) as here:
        frontend = await here.frontend()
        with pytest.raises(TypeError):
            await collect(frontend.serve(replace(REQUEST, sampling=object())))  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await frontend.cache.unpin(object())  # type: ignore[arg-type]
        assert frontend.num_open == 0


async def test_nothing_is_kept_of_calls_that_ended(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with line(tokenizer, tmp_path) as here:
        frontend = await here.frontend()
        here.backend.script = lambda request: (
            [RequestError("no")] if request.request_id == "bad" else here.backend.reply_steps(request)
        )
        for round_number in range(50):
            name = "bad" if round_number % 2 else "good"
            await asyncio.gather(collect(frontend.serve(replace(REQUEST, request_id=name))), return_exceptions=True)
        gc.collect()
        await eventually(lambda: here.deciding.num_running == 0)
        assert frontend.num_open == 0
