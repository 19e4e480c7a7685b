"""A scripted backend: answers with given texts, counts its open generators, fails or stalls where told."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import CacheScope
from tandem.protocol.errors import PinNotFound, WorkerNotFound
from tandem.protocol.messages import FinishReason, Prefetch, PromptLogprobs, Role, SequenceDelta, TokenLogprobs
from tandem.router.backend import GenerateRequest, HintAction, HintedPin, PinRequest, PinState
from tandem.router.streams import Stream
from tandem.runtime.tracing.tracing import Tracing
from tandem.text.tokenizer import Tokenizer
from tests.support.dashboard_world import DashboardWorld
from tests.support.streams import GeneratorStream

Client = httpx.AsyncClient
Step = SequenceDelta | Exception | asyncio.Event


class FakePins:
    """Takes every pin, and says that worker "d" holds one block of it."""

    def __init__(self) -> None:
        self.requests: list[PinRequest] = []
        self.prefetched: list[Prefetch] = []
        self.live: dict[str, PinRequest] = {}
        self.hinted: list[tuple[HintAction, PinRequest]] = []

    async def pin(self, request: PinRequest) -> PinState:
        self.requests.append(request)
        pin_id = f"pin-{len(self.requests)}"
        self.live[pin_id] = request
        return self._state(pin_id)

    async def hint(self, request: PinRequest, action: HintAction) -> HintedPin:
        self.hinted.append((action, request))
        return HintedPin(min(request.ttl_s or 300.0, 3600.0), 32, is_cut=False)

    async def unpin(self, pin_id: str, tenant: str | None) -> None:
        self._check(pin_id, tenant)
        del self.live[pin_id]

    async def prefetch(self, pin_id: str, prefetch: Prefetch, tenant: str | None) -> PinState:
        self._check(pin_id, tenant)
        self.prefetched.append(prefetch)
        return self._state(pin_id)

    async def pins(self, tenant: str | None, cache_scope: CacheScope | None) -> list[PinState]:
        return [
            self._state(pin_id)
            for pin_id, request in self.live.items()
            if tenant in (None, request.tenant) and cache_scope in (None, request.cache_scope)
        ]

    def _check(self, pin_id: str, tenant: str | None) -> None:
        if pin_id not in self.live or tenant not in (None, self.live[pin_id].tenant):
            raise PinNotFound("There is no such pin.", param="id")

    def _state(self, pin_id: str) -> PinState:
        request = self.live[pin_id]
        return PinState(
            pin_id=pin_id,
            tenant=request.tenant,
            conversation_id=request.conversation_id,
            num_blocks=2,
            num_tokens=32,
            remaining_s=30.0,
            prefetch=request.prefetch,
            held={"d": {"pool": 1}, "p": None},
        )


class FakeManagedWorkers:
    """Workers "p" and "d"."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}  # worker -> what it holds

    async def set_role(self, worker: str, role: Role) -> dict[str, Any]:
        if worker not in ("p", "d"):
            raise WorkerNotFound(f"There is no worker '{worker}'.")
        return {"worker": worker, "to": role}

    async def drain(self, worker: str, grace_s: float, *, restart: bool) -> dict[str, Any]:
        if worker not in ("p", "d"):
            raise WorkerNotFound(f"There is no worker '{worker}'.")
        return {"worker": worker, "grace_s": grace_s, "restart": restart}

    async def add_worker(self, role: Role) -> dict[str, Any]:
        return {"worker": f"{role}-9"}

    async def check_integrity(self) -> dict[str, str]:
        return self.held


class FakeBackend:
    """Generates `reply` token by token (or `run` at a time), or the steps that `script` makes for a request."""

    model = "org/toy"

    def __init__(self, tokenizer: Tokenizer, reply: str = "hello world", *, run: int = 1) -> None:
        self.tokenizer = tokenizer
        self.reply = reply
        self.run = run
        self.script: Callable[[GenerateRequest], list[Step]] = self.reply_steps
        self.max_model_len: int | None = 512
        self.ready = True
        self.requests: list[GenerateRequest] = []
        self.num_open = 0
        self.max_open = 0
        self.num_steps = 0
        self.cache = FakePins()
        self.manager = FakeManagedWorkers()

    def serve(self, request: GenerateRequest) -> Stream[SequenceDelta]:
        return GeneratorStream(self._serve(request))

    async def _serve(self, request: GenerateRequest) -> AsyncGenerator[SequenceDelta, None]:
        self.requests.append(request)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        try:
            for step in self.script(request):
                await asyncio.sleep(0)
                self.num_steps += 1
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield step
        finally:
            self.num_open -= 1

    async def explain(self, request: GenerateRequest) -> dict[str, Any]:
        self.requests.append(request)
        return {"outcome": "admitted", "tenant": request.service_class.tenant}

    async def decisions(self) -> list[dict[str, Any]]:
        return [{"request_id": one.request_id, "tenant": one.service_class.tenant} for one in reversed(self.requests)]

    async def pools(self) -> dict[str, Any]:
        return {"workers": []}

    async def overview(self) -> dict[str, Any]:
        return {"models": [self.model], **await DashboardWorld(0).overview()}

    async def migrate(self, worker: str, to: str, request_id: str) -> dict[str, Any]:
        if worker not in ("p", "d"):
            raise WorkerNotFound(f"There is no worker '{worker}'.")
        return {"moving": ["r1"], "staying": []}

    def reply_steps(self, request: GenerateRequest) -> list[Step]:
        """The reply, ended by </s> or by max_tokens; 3 cached tokens."""
        sampling = request.sampling
        eos = self.tokenizer.encode("</s>", add_special_tokens=False)
        ids = [*self.tokenizer.encode(self.reply, add_special_tokens=False), *eos][: sampling.max_tokens]
        steps: list[Step] = []
        for start in range(0, len(ids), self.run):
            token_ids = ids[start : start + self.run]
            is_last = start + self.run >= len(ids)
            stop_id = eos[0] if is_last and token_ids[-1] == eos[0] else None
            finish = (FinishReason.LENGTH if stop_id is None else FinishReason.STOP) if is_last else None
            logprobs = None
            if sampling.num_logprobs is not None:
                top = [(0, -2.5), (1, float("-inf"))]
                logprobs = [TokenLogprobs(i, -0.5, [(i, -0.5), *top][: sampling.num_logprobs]) for i in token_ids]
            decision = None
            if request.explains and start == 0:
                decision = {"outcome": "dispatched", "tenant": request.service_class.tenant}
            scores = None if start else scores_of(request)
            steps.append(
                delta_of(
                    token_ids,
                    finish,
                    stop_token_id=stop_id,
                    num_cached_tokens=None if start else 3,
                    logprobs=logprobs,
                    decision=decision,
                    prompt_logprobs=scores,
                )
            )
        return steps


def delta_of(token_ids: list[int], finish_reason: FinishReason | None = None, **fields: Any) -> SequenceDelta:
    """A delta as a backend passes it on: nobody reads the request's id and the offset any more."""
    return SequenceDelta("", 0, token_ids, finish_reason, **fields)


def scores_of(request: GenerateRequest) -> PromptLogprobs | None:
    """Token i of the prompt has log probability -i, and tokens 0, 1, ... are the likeliest, with -0.5, -1.5, ..."""
    num_top, num_tokens = request.sampling.num_prompt_logprobs, len(request.token_ids)
    if num_top is None:
        return None
    chosen = struct.pack(f"<{num_tokens - 1}f", *[-float(i) for i in range(1, num_tokens)])
    values = struct.pack(f"<{num_top}f", *[-0.5 - i for i in range(num_top)])
    return PromptLogprobs(
        chosen, values * (num_tokens - 1), struct.pack(f"<{num_top}I", *range(num_top)) * (num_tokens - 1)
    )


def backend_of(tokenizer: Tokenizer, reply: str = "hello world", *, run: int = 1) -> FakeBackend:
    """One with room for tools in its prompts, whose tokens are bytes."""
    backend = FakeBackend(tokenizer, reply, run=run)
    backend.max_model_len = 4096
    return backend


def make_app(
    backend: FakeBackend,
    registry: CollectorRegistry | None = None,
    tracing: Tracing | None = None,
    api_keys: ApiKeys | None = None,
    **config: Any,
) -> FastAPI:
    return create_app(
        backend,
        backend.tokenizer,
        RouterConfig(**config),
        registry or CollectorRegistry(),
        api_keys=api_keys or ApiKeys(),
        tracing=tracing,
    )


def make_client(backend: FakeBackend, **config: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(backend, **config)), base_url="http://localhost")


@asynccontextmanager
async def closing(backend: FakeBackend, **config: Any) -> Any:
    """A client whose end checks that no generator was left open."""
    async with make_client(backend, **config) as client:
        yield client
    assert backend.num_open == 0


def events(response: httpx.Response) -> list[Any]:
    """Parsed events of a stream; "[DONE]" stays text."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8", response.text
    parts = response.text.split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    data = [part.removeprefix("data: ") for part in parts]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


class RawClient:
    """One request on the ASGI app itself, with a client that can leave."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any], **headers: str) -> None:
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self.sent: list[dict[str, Any]] = []
        self.got_body = asyncio.Event()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [
                (b"content-type", b"application/json"),
                *((name.encode(), value.encode()) for name, value in headers.items()),
            ],
        }
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._send))

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.got_body.set()


class SlowClient(RawClient):
    """Takes `num_parts` parts of a body, and the rest when `may_go_on` is set."""

    def __init__(self, app: FastAPI, path: str, body: dict[str, Any], num_parts: int = 1) -> None:
        self.may_go_on = asyncio.Event()
        self._num_parts = num_parts
        super().__init__(app, path, body)

    @property
    def is_full(self) -> bool:
        """Whether the server waits for it."""
        return len(self.sent) > self._num_parts  # the head too

    async def _send(self, message: Any) -> None:
        await super()._send(message)
        if self.is_full:
            await self.may_go_on.wait()
