"""A tiny OpenAI-compatible server on a free port of 127.0.0.1: the far side of the clients under test.

It streams words. Its tokenizer makes one token of each word. `handle` is what a test turns to make it misbehave.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

MODEL = "fake-model"


@dataclass
class FakeServer:
    url: str = ""
    has_tokenize: bool = True
    has_running_usage: bool = True
    line_end: str = "\n"
    words_per_event: int = 1
    break_after: int | None = None  # end the stream after this many events, without [DONE]
    status: int = 200
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_running: int = 0
    max_running: int = 0
    num_hung_up: int = 0
    pause: threading.Event = field(default_factory=threading.Event)  # cleared: streams stop after their first event

    def __post_init__(self) -> None:
        self.pause.set()


@contextmanager
def fake_openai() -> Iterator[FakeServer]:
    fake = FakeServer()
    server = uvicorn.Server(uvicorn.Config(_app(fake), host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    started = threading.Event()
    ports: list[int] = []

    async def run() -> None:
        startup = server.startup

        async def startup_and_tell(sockets: Any = None) -> None:
            await startup(sockets)
            ports.append(server.servers[0].sockets[0].getsockname()[1])
            started.set()

        server.startup = startup_and_tell
        await server.serve()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert started.wait(10), "the fake server did not start"
        fake.url = f"http://127.0.0.1:{ports[0]}"
        yield fake
    finally:
        fake.pause.set()
        server.should_exit = True
        thread.join(10)


def _app(fake: FakeServer) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [{"id": MODEL, "object": "model"}]}

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Any:
        if not fake.has_tokenize:
            return JSONResponse({"error": {"message": "not found"}}, 404)
        words = (await request.json())["prompt"].split()
        return {"tokens": [len(word) for word in words], "count": len(words)}

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(request, lambda text: {"text": text}, list)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        first = [{"delta": {"role": "assistant", "content": ""}}]
        return await answer(request, lambda text: {"delta": {"content": text}}, lambda: first)

    async def answer(request: Request, choice: Any, first: Any) -> Response:
        body = await request.json()
        fake.requests.append(body)
        if fake.status != 200:
            return JSONResponse({"error": {"message": "not today", "type": "server_error"}}, fake.status)
        return StreamingResponse(events(body, choice, first()), media_type="text/event-stream")

    async def events(body: dict[str, Any], choice: Any, first: list[Any]) -> AsyncIterator[str]:
        fake.num_running += 1
        fake.max_running = max(fake.max_running, fake.num_running)
        is_whole = False
        try:
            prompt = body.get("prompt") or " ".join(message["content"] for message in body["messages"])
            usage = {"prompt_tokens": len(prompt if isinstance(prompt, list) else prompt.split())}
            usage["prompt_tokens_details"] = {"cached_tokens": 3}
            for item in first:
                yield event(fake, {"choices": [item | {"index": 0, "finish_reason": None}]})
            total, sent = body["max_tokens"], 0
            for index in range(0, total, fake.words_per_event):
                if index and not fake.pause.is_set():
                    await asyncio.to_thread(fake.pause.wait)
                if fake.break_after is not None and index >= fake.break_after:
                    return
                count = min(fake.words_per_event, total - index)
                sent += count
                finish = "length" if sent == total else None
                running = usage | {"completion_tokens": sent} if fake.has_running_usage else None
                content = choice("word " * count) | {"index": 0, "finish_reason": finish}
                yield event(fake, {"choices": [content], "usage": running})
                await asyncio.sleep(0)
            yield event(fake, {"choices": [], "usage": usage | {"completion_tokens": sent}})
            yield f"data: [DONE]{fake.line_end * 2}"
            is_whole = True
        finally:
            fake.num_running -= 1
            fake.num_hung_up += not is_whole

    return app


def event(fake: FakeServer, body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}{fake.line_end * 2}"
