"""A tiny OpenAI-compatible server on a free port of 127.0.0.1, as an engine for the router and clients under test.

It streams words; its tokenizer makes one token of each word. Tests set fields of `FakeServer` to make it misbehave.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from tests.support.waiting import eventually

MODEL = "fake-model"


@dataclass
class FakeServer:
    url: str = ""
    has_tokenize: bool = True
    has_running_usage: bool = True
    line_end: str = "\n"
    words_per_event: int = 1
    break_after: int | None = None  # end the stream after this many events, without [DONE]
    is_reset: bool = False  # reset the connection at that point
    comments_after: int | None = None  # send nothing but comments after this many events
    status: int = 200
    error: dict[str, Any] | str = field(default_factory=lambda: {"message": "not today", "type": "server_error"})
    headers: dict[str, str] = field(default_factory=dict)  # of error answers
    first_event_error: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # fields of every message or delta
    # Answers of routes, by path without the query: they get the method and the body. Other paths get 404.
    replies: dict[str, Callable[[str, dict[str, Any]], Response]] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)  # of each request for an answer, with its method and query
    whole: dict[str, Any] = field(default_factory=dict)  # fields of every plain answer and of a stream's last event
    model: str = MODEL
    key: str = ""  # requests without it get a 401
    adapters: list[str] = field(default_factory=list)  # as `/v1/models` lists them
    capabilities: dict[str, Any] = field(default_factory=dict)  # of its model; empty = it does not tell
    version: str = ""  # as vLLM tells it; "" = it does not
    unloaded: list[str] = field(default_factory=list)  # models that get a 404
    health: int = 200
    metrics: str = ""
    metrics_type: str = "text/plain"
    has_kv_params: bool = True
    num_cached: int = 3
    stop: Callable[[], None] = lambda: None  # stops the server
    authorization: list[str] = field(default_factory=list)  # of each request for an answer
    requests: list[dict[str, Any]] = field(default_factory=list)
    request_headers: list[dict[str, str]] = field(default_factory=list)
    num_probes: Counter[str] = field(default_factory=Counter)  # by path
    num_running: int = 0
    max_running: int = 0
    num_hung_up: int = 0
    num_left: int = 0  # requests whose client left before the answer began
    pause: threading.Event = field(default_factory=threading.Event)  # cleared: streams stop after their first event
    headers_pause: threading.Event = field(default_factory=threading.Event)  # cleared: answers do not begin
    health_pause: threading.Event = field(default_factory=threading.Event)  # cleared: health checks are not answered

    def __post_init__(self) -> None:
        self.resume()

    def resume(self) -> None:
        for event in (self.pause, self.headers_pause, self.health_pause):
            event.set()


class _Server(uvicorn.Server):
    """uvicorn without its pauses of a tenth of a second: it starts and ends hundreds of times in the tests."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.port = 0
        self.has_started = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        await super().startup(sockets)
        self.port = self.servers[0].sockets[0].getsockname()[1]
        self.has_started.set()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._is_over.wait()

    async def shutdown(self, sockets: Any = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await eventually(lambda: not (self.server_state.connections or self.server_state.tasks))

    def end(self) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop is closed: it has ended before
            self._loop.call_soon_threadsafe(self._is_over.set)


@contextmanager
def fake_openai(port: int = 0, **tls: Any) -> Iterator[FakeServer]:
    """`tls`: options of uvicorn, by which it speaks HTTPS."""
    fake = FakeServer()
    config = uvicorn.Config(_app(fake), host="127.0.0.1", port=port, log_level="critical", lifespan="off", **tls)
    server = _Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))

    def stop() -> None:
        fake.resume()
        server.end()
        thread.join(10)

    fake.stop = stop
    thread.start()
    try:
        assert server.has_started.wait(10), "the fake server did not start"
        fake.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.port}"
        yield fake
    finally:
        stop()


def _app(fake: FakeServer) -> FastAPI:
    app, answer = FastAPI(), _Answers(fake).answer

    @app.get("/v1/models")
    async def models() -> Any:
        base = {"id": fake.model, "object": "model", "max_model_len": 4096, "root": "/models/fake", "parent": None}
        base |= {"capabilities": fake.capabilities} if fake.capabilities else {}
        adapters = [
            {"id": name, "object": "model", "root": f"/adapters/{name}", "parent": fake.model} for name in fake.adapters
        ]
        return {"object": "list", "data": [base, *adapters]}

    @app.get("/health")
    async def health() -> Response:
        fake.num_probes["/health"] += 1
        if not fake.health_pause.is_set():
            await asyncio.to_thread(fake.health_pause.wait)
        return Response(status_code=fake.health)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": fake.version}, 200 if fake.version else 404)

    @app.get("/metrics")
    async def metrics() -> Response:
        fake.num_probes["/metrics"] += 1
        headers = {"content-type": fake.metrics_type}
        return Response(fake.metrics, status_code=200 if fake.metrics else 404, headers=headers)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Any:
        if "/tokenize" in fake.replies:
            return await answer(request, None, None, "")
        if not fake.has_tokenize:
            return JSONResponse({"error": {"message": "not found"}}, 404)
        words = (await request.json())["prompt"].split()
        return {"tokens": [len(word) for word in words], "count": len(words)}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, lambda text: {"text": text} | fake.extra, list, "text_completion")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        first = [{"delta": {"role": "assistant", "content": ""}}]
        return await answer(
            request, lambda text: {"delta": {"content": text} | fake.extra}, lambda: first, "chat.completion"
        )

    @app.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def other(request: Request) -> Response:
        return await answer(request, None, None, "")

    return app


class _Answers:
    """Answers of the generation routes, whole or streamed, with the faults that the fake is told to have."""

    def __init__(self, fake: FakeServer) -> None:
        self._fake = fake

    async def answer(self, request: Request, choice: Any, first: Any, kind: str) -> Response:
        """`choice` makes an item of text, `first` the items before it. Without `choice` the path has only replies."""
        content = await request.body()
        body = json.loads(content) if content else {}
        self._fake.requests.append(body)
        self._fake.paths.append(
            f"{request.method} {request.url.path}" + (f"?{request.url.query}" if request.url.query else "")
        )
        self._fake.request_headers.append(dict(request.headers))
        self._fake.authorization.append(request.headers.get("authorization", ""))
        if self._fake.key and request.headers.get("authorization") != f"Bearer {self._fake.key}":
            return JSONResponse({"error": {"message": "no key", "type": "auth"}}, 401)
        while not self._fake.headers_pause.is_set():
            await asyncio.to_thread(self._fake.headers_pause.wait, 0.01)
            if await request.is_disconnected():
                self._fake.num_left += 1
                return Response()
        if body.get("model") in self._fake.unloaded:
            message = f"The model `{body['model']}` does not exist."
            return JSONResponse({"error": {"message": message, "type": "NotFoundError", "code": 404}}, 404)
        if self._fake.status != 200:
            if isinstance(self._fake.error, str):
                return Response(self._fake.error, self._fake.status, self._fake.headers)
            return JSONResponse({"error": self._fake.error}, self._fake.status, self._fake.headers)
        if (reply := self._fake.replies.get(request.url.path)) is not None:
            return reply(request.method, body)
        if choice is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        if body.get("stream") is False:
            return JSONResponse(self._plain(body, choice, kind))
        return StreamingResponse(self._events(body, choice, first()), media_type="text/event-stream")

    def _plain(self, body: dict[str, Any], choice: Any, kind: str) -> dict[str, Any]:
        num_tokens = body["max_tokens"]
        item = choice("word " * num_tokens)
        if "delta" in item:
            item["message"] = {"role": "assistant"} | item.pop("delta")
        result = {"id": "fake-1", "object": kind, "model": self._fake.model}
        result["choices"] = [item | {"index": 0, "finish_reason": "length"}]
        result["usage"] = self._prompt_usage(body) | {"completion_tokens": num_tokens}
        wants_kv = (body.get("kv_transfer_params") or {}).get("do_remote_decode")
        if wants_kv and self._fake.has_kv_params:
            result["kv_transfer_params"] = {"do_remote_prefill": True, "remote_block_ids": [1], "remote_host": "h"}
        return result | self._fake.whole

    def _prompt_usage(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
        count = len(prompt if isinstance(prompt, list) else prompt.split())
        return {"prompt_tokens": count, "prompt_tokens_details": {"cached_tokens": self._fake.num_cached}}

    async def _events(self, body: dict[str, Any], choice: Any, first: list[Any]) -> AsyncIterator[str]:
        self._fake.num_running += 1
        self._fake.max_running = max(self._fake.max_running, self._fake.num_running)
        is_whole = False
        try:
            usage = self._prompt_usage(body)
            if self._fake.first_event_error is not None:
                yield event(self._fake, {"error": self._fake.first_event_error})
                return
            for item in first:
                yield event(self._fake, {"choices": [item | {"index": 0, "finish_reason": None}]})
            total, sent = body["max_tokens"], 0
            for index in range(0, total, self._fake.words_per_event):
                if index and not self._fake.pause.is_set():
                    await asyncio.to_thread(self._fake.pause.wait)
                while index == self._fake.comments_after:
                    yield f": still here{self._fake.line_end * 2}"
                    await asyncio.sleep(0.005)
                if self._fake.break_after is not None and index >= self._fake.break_after:
                    if self._fake.is_reset:
                        raise ConnectionResetError("the fake breaks the connection")
                    return
                count = min(self._fake.words_per_event, total - index)
                sent += count
                finish = "length" if sent == total else None
                running = usage | {"completion_tokens": sent} if self._fake.has_running_usage else None
                content = choice("word " * count) | {"index": 0, "finish_reason": finish}
                yield event(self._fake, {"choices": [content], "usage": running})
                await asyncio.sleep(0)
            yield event(self._fake, {"choices": [], "usage": usage | {"completion_tokens": sent}} | self._fake.whole)
            yield f"data: [DONE]{self._fake.line_end * 2}"
            is_whole = True
        finally:
            self._fake.num_running -= 1
            self._fake.num_hung_up += not is_whole


def event(fake: FakeServer, body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}{fake.line_end * 2}"
