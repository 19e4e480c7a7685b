"""Limits of API keys over HTTP: in one process, and in several frontend processes of one deciding process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.keys.api_key import ApiKey
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.limiter import TEXT_BYTES_PER_TOKEN, LocalLimiter
from tandem.frontend.processes.backend_service import BackendService
from tandem.frontend.processes.deciding_client import JoinSettings
from tandem.frontend.processes.deciding_process import DecidingProcess
from tandem.frontend.processes.remote_backend import RemoteBackend
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import RouterConfig
from tandem.protocol.grammar import GrammarError
from tandem.scheduling.admission.key_limits import KeyLimits
from tandem.text.tokenizer import Tokenizer
from tests.support.apps import app_client
from tests.support.fake_backend import FakeBackend
from tests.support.keys import stored_key
from tests.support.waiting import eventually

COMPLETIONS = "/v1/completions"
BODY = {"prompt": [1, 2, 3, 4], "max_tokens": 6}


class Ready:
    reason = None


class Server:
    """Clients of the server's processes, its limiter, and a clock that does not move."""

    def __init__(self, backend: FakeBackend, keys: Sequence[ApiKey]) -> None:
        self.now = 100.0
        self.backend = backend
        self.limiter = LocalLimiter(lambda: self.now)
        self.api_keys = ApiKeys(keys, is_required=True, limiter=self.limiter)
        self.registry = CollectorRegistry()
        self.deciding: DecidingProcess | None = None
        self.frontends: list[RemoteBackend] = []
        self.clients: list[httpx.AsyncClient] = []

    async def ask(self, secret: str = "sk-a", process: int = 0, **fields: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {secret}"}
        return await self.clients[process].post(COMPLETIONS, json=BODY | fields, headers=headers)

    def tokens_left(self) -> float:
        """Tokens that the only key may still use; NaN while it has requests."""
        [state] = self.limiter.limiter._states.values()
        return state.tokens.level if not state.running else math.nan

    def app(self, backend: Any, keys: ApiKeys, **options: Any) -> Any:
        return create_app(backend, self.backend.tokenizer, RouterConfig(), self.registry, api_keys=keys, **options)


@asynccontextmanager
async def serving(tokenizer: Tokenizer, folder: Path, num_processes: int, *keys: ApiKey) -> AsyncIterator[Server]:
    """A server in this many processes, as far as they could tell; at the end no request may be counted as running."""
    server = Server(FakeBackend(tokenizer), keys)
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        if num_processes == 1:
            apps = [server.app(server.backend, server.api_keys)]
        else:
            deciding = DecidingProcess(
                BackendService(server.backend, Ready(), bytes),
                f"{folder}/hub",
                server.api_keys,
                clock=lambda: server.now,
            )
            server.deciding, server.limiter = deciding, deciding.limiter
            await deciding.start()
            stack.push_async_callback(deciding.close)
            apps = []
            for name in map(str, range(num_processes)):
                deciding.expect(name)
                frontend = RemoteBackend(JoinSettings(f"{folder}/hub", name, lambda: None, 20.0, needs_key=True))
                stack.push_async_callback(frontend.close)
                await frontend.start()
                server.frontends.append(frontend)
                server.registry = CollectorRegistry()
                apps.append(server.app(frontend, frontend.api_keys, readiness=frontend))
        for app in apps:
            client = app_client(app)
            server.clients.append(await stack.enter_async_context(client))
        yield server
        await eventually(lambda: not any(server.limiter.limiter.num_running(key.id) for key in keys))
    assert server.backend.num_open == 0


@pytest.fixture(params=[1, 3], ids=["one process", "three processes"])
def num_processes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


async def test_requests_per_minute_hold_for_all(tokenizer: Tokenizer, tmp_path: Path, num_processes: int) -> None:
    limited = stored_key("sk-a", "a", id="k-a", limits=KeyLimits(requests_per_minute=6))
    async with serving(tokenizer, tmp_path, num_processes, limited, stored_key("sk-b", "b")) as server:
        asked = [server.ask(process=number % num_processes) for number in range(30)]
        answers = await asyncio.gather(*asked)
        assert sorted(answer.status_code for answer in answers) == [200] * 6 + [429] * 24
        refused = next(answer for answer in answers if answer.status_code == 429)
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert error["message"] == "The API key k-a has used up its limit requests_per_minute=6; retry in 10.00 s."
        assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("10", "10000")
        others = await asyncio.gather(*(server.ask("sk-b", number % num_processes) for number in range(10)))
        assert {answer.status_code for answer in others} == {200}
        looking = await server.clients[0].get("/v1/models", headers={"authorization": "Bearer sk-a"})
        assert looking.status_code == 200  # nothing is generated
        server.now += 9.999
        assert (await server.ask()).status_code == 429
        server.now += 0.001
        statuses = [(await server.ask(process=process)).status_code for process in range(num_processes)]
        assert (statuses, len(server.backend.requests)) == ([200, 429, 429][:num_processes], 6 + 10 + 1)


async def test_requests_at_one_time_hold_for_all(tokenizer: Tokenizer, tmp_path: Path, num_processes: int) -> None:
    limited = stored_key("sk-a", "a", limits=KeyLimits(concurrent_requests=2))
    async with serving(tokenizer, tmp_path, num_processes, limited) as server:
        go_on = asyncio.Event()
        server.backend.script = lambda request: [go_on, *server.backend.reply_steps(request)]
        running = [asyncio.create_task(server.ask(process=n % num_processes, stream=n == 0)) for n in range(2)]
        await eventually(lambda: server.backend.num_open == 2)
        refused = await server.ask(process=num_processes - 1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "concurrent_requests=2" in refused.json()["error"]["message"]
        assert 0 < float(refused.headers["retry-after-ms"]) <= 1000
        running[0].cancel()
        await asyncio.wait(running[:1])
        await eventually(lambda: server.limiter.limiter.num_running(limited.id) == 1)
        go_on.set()
        assert (await server.ask(process=num_processes - 1)).status_code == 200
        assert (await running[1]).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_tokens_per_minute_count_prompts_and_answers(
    tokenizer: Tokenizer, tmp_path: Path, num_processes: int, is_stream: bool
) -> None:
    """Each request takes a prompt of 4 tokens and two answers of `length` tokens."""
    length = len(tokenizer.encode("hello world", add_special_tokens=False)) + 1
    taken = 4 + 2 * length
    fields = {"n": 2, "max_tokens": 12, "stream": is_stream}
    limits = KeyLimits(tokens_per_minute=3 * taken - 2 * length + 24)
    limited = stored_key("sk-a", "a", limits=limits)
    assert limits.tokens_per_minute is not None
    async with serving(tokenizer, tmp_path, num_processes, limited) as server:
        statuses = [(await server.ask(process=number % num_processes, **fields)).status_code for number in range(3)]
        assert statuses == [200] * 3
        refused = await server.ask(process=num_processes - 1, **fields)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        left = limits.tokens_per_minute - 3 * taken
        wait_s = (4 + 24 - left) * 60 / limits.tokens_per_minute
        assert int(refused.headers["retry-after-ms"]) == math.ceil(wait_s * 1e3)
        server.now += wait_s + 1e-6
        assert (await server.ask(process=num_processes - 1, **fields)).status_code == 200


async def test_a_request_that_fails_takes_no_tokens(tokenizer: Tokenizer, tmp_path: Path, num_processes: int) -> None:
    limited = stored_key("sk-a", "a", limits=KeyLimits(tokens_per_minute=10))
    async with serving(tokenizer, tmp_path, num_processes, limited) as server:
        server.backend.script = lambda _: [ValueError("a bug")]
        for _ in range(5):
            assert (await server.ask()).status_code == 500
        server.backend.script = server.backend.reply_steps
        assert (await server.ask(max_tokens=6)).status_code == 200
        assert (await server.ask(max_tokens=6)).status_code == 429


async def test_what_a_worker_computed_is_charged(tokenizer: Tokenizer, tmp_path: Path, num_processes: int) -> None:
    """A grammar that fails in the worker ends its request with 400, after its prompt was computed."""
    limited = stored_key("sk-a", "a", limits=KeyLimits(tokens_per_minute=40))
    async with serving(tokenizer, tmp_path, num_processes, limited) as server:
        error = GrammarError("it costs too much")
        error.num_computed_tokens = 3
        server.backend.script = lambda _: [error]
        assert (await server.ask(max_tokens=6)).status_code == 400
        await eventually(lambda: server.tokens_left() == 37)
        server.backend.script = lambda request: [*server.backend.reply_steps(request)[:1], error]
        answer = await server.ask(process=num_processes - 1, max_tokens=6)
        assert answer.status_code == 400
        await eventually(lambda: server.tokens_left() < 37 - 4)  # its prompt, and the tokens of its answer


async def test_text_that_is_only_encoded_is_charged(tokenizer: Tokenizer, tmp_path: Path, num_processes: int) -> None:
    text = "ab " * TEXT_BYTES_PER_TOKEN
    limited = stored_key("sk-a", "a", limits=KeyLimits(tokens_per_minute=1000))
    headers = {"authorization": "Bearer sk-a"}
    async with serving(tokenizer, tmp_path, num_processes, limited) as server:
        client = server.clients[num_processes - 1]
        answer = await client.post("/tokenize", json={"prompt": text}, headers=headers)
        assert answer.status_code == 200
        charged = (3 * TEXT_BYTES_PER_TOKEN + len('{"prompt":""}')) // TEXT_BYTES_PER_TOKEN
        await eventually(lambda: server.tokens_left() == 1000 - charged)
        longest = max(map(len, tokenizer._fast.get_vocab()))
        word = "q" * (longest * server.backend.max_model_len)  # by its length alone it could fit
        refused = await server.ask(prompt=word, process=num_processes - 1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        await eventually(lambda: server.tokens_left() <= 1000 - charged - len(word) // TEXT_BYTES_PER_TOKEN)


async def test_text_that_is_served_is_charged_once(tokenizer: Tokenizer, tmp_path: Path, num_processes: int) -> None:
    text = "ab " * TEXT_BYTES_PER_TOKEN
    limited = stored_key("sk-a", "a", limits=KeyLimits(tokens_per_minute=10_000))
    async with serving(tokenizer, tmp_path, num_processes, limited) as server:
        usage = (await server.ask(prompt=text, max_tokens=6, process=num_processes - 1)).json()["usage"]
        await eventually(lambda: server.tokens_left() == 10_000 - usage["total_tokens"])


async def test_limits_that_change_count_everywhere(tokenizer: Tokenizer, tmp_path: Path, num_processes: int) -> None:
    async with serving(tokenizer, tmp_path, num_processes, stored_key("sk-a", "a")) as server:
        for process in range(num_processes):
            assert (await server.ask(process=process)).status_code == 200
        server.api_keys.replace([stored_key("sk-a", "a", limits=KeyLimits(requests_per_minute=1))])
        await asyncio.sleep(0)

        async def is_limited(process: int) -> bool:
            return (await server.ask(process=process)).status_code == 429

        async with asyncio.timeout(10):
            for process in range(num_processes):
                while not await is_limited(process):
                    pass


async def test_a_frontend_process_that_ends_frees_what_its_requests_held(tokenizer: Tokenizer, tmp_path: Path) -> None:
    limited = stored_key("sk-a", "a", limits=KeyLimits(concurrent_requests=1))
    async with serving(tokenizer, tmp_path, 2, limited) as server:
        server.backend.script = lambda _: [asyncio.Event()]
        running = asyncio.create_task(server.ask(process=0))
        await eventually(lambda: server.backend.num_open == 1)
        assert (await server.ask(process=1)).status_code == 429
        assert server.deciding is not None
        server.deciding.drop("0")
        assert (await running).status_code == 503
        server.backend.script = server.backend.reply_steps
        assert (await server.ask(process=1)).status_code == 200


async def test_a_removed_key_is_refused_where_it_is_still_known(tokenizer: Tokenizer, tmp_path: Path) -> None:
    gone = stored_key("sk-gone", "a", limits=KeyLimits(requests_per_minute=5))
    async with serving(tokenizer, tmp_path, 2, stored_key("sk-a", "a")) as server:
        server.frontends[0].api_keys.replace([gone])
        refused = await server.ask("sk-gone")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_refusals_are_counted_by_the_keys_id(tokenizer: Tokenizer, tmp_path: Path) -> None:
    limited = stored_key("sk-a", "a", id="k-a", limits=KeyLimits(requests_per_minute=1))
    async with serving(tokenizer, tmp_path, 1, limited) as server:
        for _ in range(3):
            await server.ask()
        labels = {"key_id": "k-a", "reason": "rate_limit"}
        assert server.registry.get_sample_value("tandem_router_refused_keys_total", labels) == 2
