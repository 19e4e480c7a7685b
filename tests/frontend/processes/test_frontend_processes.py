"""Real frontend processes around a scripted backend: no workers, no Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tandem.frontend.http.listening import listening
from tandem.frontend.http.tls import scheme_of
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.key_file import KeyFile
from tandem.frontend.keys.store import create_key, revoke_key
from tandem.frontend.processes.backend_service import BackendService
from tandem.frontend.processes.child import FrontendSettings, RouteFrontend, ServeFrontend
from tandem.frontend.processes.deciding_process import DecidingProcess
from tandem.frontend.processes.parent import FrontendProcesses, frontend_processes
from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.protocol.digest import cache_scope
from tandem.protocol.errors import ConfigError
from tandem.scheduling.admission.tenants import TenantPolicy, Tenants
from tandem.text.tokenizer import Tokenizer
from tests.support.certificates import DAY, Authority
from tests.support.fake_backend import FakeBackend
from tests.support.keys import api_keys_of, make_key_file
from tests.support.toy_tokenizer import build_tokenizer
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

BODY = {"messages": [{"role": "user", "content": "hi"}]}
MODEL = FakeBackend.model
START_S = 60.0


class Always:
    reason = None


class Frontends:
    def __init__(self, processes: FrontendProcesses, backend: FakeBackend, client: httpx.AsyncClient) -> None:
        self.processes = processes
        self.backend = backend
        self.client = client
        self.metrics_folder = processes.metrics_folder

    def pids(self) -> list[int]:
        return self.processes.group.pids

    def counter_files(self) -> set[str]:
        return {path.name for path in Path(self.metrics_folder).glob("counter_*.db")}

    def add_unreadable_counter_files(self) -> None:
        Path(self.metrics_folder, "counter_7.db").touch()  # its process is about to write it
        Path(self.metrics_folder, "counter_8.db").symlink_to("gone")  # its process has ended

    def is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.client.base_url.port or 0)) == 0

    async def serving(self) -> None:
        await eventually(lambda: self.processes.is_serving or self.processes.serving.done(), START_S)

    async def chat(self) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=BODY)

    async def metric(self, line: str) -> float:
        text = (await self.client.get("/metrics")).text
        return float(next(row.rpartition(" ")[2] for row in text.splitlines() if row.startswith(f"{line} ")))

    async def is_openmetrics(self) -> None:
        """A scraper that prefers OpenMetrics can read the texts of all processes together."""
        headers = {"accept": "application/openmetrics-text"}
        families = list(text_string_to_metric_families((await self.client.get("/metrics", headers=headers)).text))
        assert {"tandem_hub", "tandem_router_requests"} <= {family.name for family in families}


async def hub_metrics() -> bytes:
    return b"tandem_hub 1.0\n"


@asynccontextmanager
async def frontends(
    folder: Path,
    *,
    num_processes: int,
    api_keys: ApiKeys | None = None,
    tenants: Tenants = Tenants(),
    ca: ssl.SSLContext | bool = True,
    **config: Any,
) -> AsyncIterator[Frontends]:
    """Nothing may run or be open at the end."""
    model = build_tokenizer(folder)
    backend = FakeBackend(Tokenizer(model))
    router = RouterConfig(port=0, router_processes=num_processes, **config)
    with listening(router.host, 0) as listener:
        serving = frontend_processes(
            BackendService(backend, Always(), hub_metrics),
            ServeFrontend(str(model)),
            config=router,
            listener=listener,
            api_keys=api_keys or ApiKeys(),
            tenants=tenants,
        )
        base_url = f"{scheme_of(router)}://127.0.0.1:{listener.getsockname()[1]}"
        limits = httpx.Limits(max_keepalive_connections=0)
        client = httpx.AsyncClient(base_url=base_url, limits=limits, timeout=START_S, verify=ca)
        async with asyncio.timeout(2 * START_S), client, serving as processes:
            here = Frontends(processes, backend, client)
            await here.serving()
            children = [psutil.Process(pid) for pid in here.pids()]
            yield here
    assert not any(child.is_running() for child in children)
    assert backend.num_open == 0


async def test_processes_share_the_port_and_their_counters(tmp_path: Path) -> None:
    async with frontends(tmp_path, num_processes=2, vllm_metric_names=True) as here:
        answers = [await here.chat() for _ in range(40)]
        assert {answer.json()["choices"][0]["message"]["content"] for answer in answers} == {"hello world"}
        assert len({answer.json()["id"] for answer in answers}) == 40
        created = {(await here.client.get("/v1/models")).json()["data"][0]["created"] for _ in range(10)}
        assert len(created) == 1
        total = 'tandem_router_requests_total{endpoint="/v1/chat/completions",status="200"}'
        here.add_unreadable_counter_files()
        assert await here.metric(total) == 40
        assert await here.metric("tandem_hub") == 1
        assert await here.metric(f'vllm:e2e_request_latency_seconds_count{{engine="0",model_name="{MODEL}"}}') == 40
        await here.is_openmetrics()
        assert here.counter_files() >= {"counter_0.db", "counter_1.db"}  # both processes have answered
        port = here.client.base_url.port
        with pytest.raises(ConfigError, match="Address already in use"), listening("127.0.0.1", port or 0):
            pass


async def test_all_processes_take_a_renewed_certificate_under_load(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue()
    ca = ssl.create_default_context(cafile=authority.ca_file)
    files = {"tls_cert": str(certificate), "tls_key": str(key)}
    expiry = "tandem_tls_certificate_expiry_timestamp_seconds"
    async with (
        frontends(tmp_path, num_processes=2, ca=ca, **files) as here,
        openai.AsyncOpenAI(
            base_url=f"{here.client.base_url}/v1", api_key="-", http_client=here.client, max_retries=0
        ) as client,
        asyncio.TaskGroup() as group,
    ):
        first, is_over = await here.metric(expiry), asyncio.Event()

        async def ask() -> int:
            num_answers = 0
            while not is_over.is_set():
                stream = await client.chat.completions.create(
                    model=here.backend.model, messages=[{"role": "user", "content": "hi"}], stream=True
                )
                text = [event.choices[0].delta.content or "" async for event in stream if event.choices]
                assert "".join(text) == "hello world"
                num_answers += 1
            return num_answers

        asking = [group.create_task(ask()) for _ in range(3)]
        authority.issue(expires_in=90 * DAY)

        async def is_later() -> bool:
            return await here.metric(expiry) != first  # the earliest of both processes

        await eventually(is_later, START_S)
        is_over.set()
        assert sum(await asyncio.gather(*asking)) > 0
        assert await here.metric("tandem_tls_reloads_total") >= 2
        assert await here.metric("tandem_tls_files_damaged") == 0


async def test_a_killed_process_loses_its_own_answers_and_is_replaced(tmp_path: Path) -> None:
    async with frontends(tmp_path, num_processes=2) as here:
        go_on = asyncio.Event()
        here.backend.script = lambda request: [go_on, *here.backend.reply_steps(request)]
        asking = [asyncio.create_task(here.chat()) for _ in range(24)]
        await eventually(lambda: here.backend.num_open == 24)
        victim, survivor = here.pids()
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: here.backend.num_open < 24)
        num_left = here.backend.num_open
        assert 0 < num_left < 24  # both had some: 2 ** -23 that one had all
        go_on.set()
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert sum(isinstance(answer, httpx.Response) and answer.status_code == 200 for answer in answers) == num_left
        assert sum(isinstance(answer, httpx.TransportError) for answer in answers) == 24 - num_left
        await eventually(lambda: len(here.pids()) == 2 and victim not in here.pids())
        assert survivor in here.pids()
        assert (await here.chat()).status_code == 200
        assert await here.metric("tandem_router_running_requests") == 0


async def test_a_process_that_hangs_is_killed_and_replaced(tmp_path: Path) -> None:
    async with frontends(tmp_path, num_processes=1, worker_timeout_s=2.0) as here:
        (pid,) = here.pids()
        os.kill(pid, signal.SIGSTOP)
        await eventually(lambda: here.pids() not in ([], [pid]), START_S)
        assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "disconnected"])
async def test_a_replaced_process_has_the_keys_the_tenants_and_the_counts(tmp_path: Path, is_killed: bool) -> None:
    keys = api_keys_of({"first": "search", "second": "batch"})
    tenants = Tenants(named={"batch": TenantPolicy(shared_cache=True)})
    async with frontends(tmp_path, num_processes=1, api_keys=keys, tenants=tenants) as here:
        assert (await here.chat()).status_code == 401
        here.client.headers["authorization"] = "Bearer first"
        assert (await here.chat()).status_code == 200
        answered = 'tandem_router_requests_total{endpoint="/v1/chat/completions",status="200"}'
        (pid,) = here.pids()
        if is_killed:

            async def is_counted() -> bool:
                return await here.metric(answered) == 1  # an answer is counted once it is sent

            await eventually(is_counted)
            os.kill(pid, signal.SIGKILL)
        else:
            here.processes.deciding.drop("frontend-0-1")
        await eventually(lambda: here.pids() not in ([], [pid]), START_S)
        await eventually(here.is_listening, START_S)
        assert (await here.chat()).status_code == 200
        here.client.headers["authorization"] = "Bearer second"
        assert (await here.chat()).status_code == 200
        told = [(request.service_class.tenant, request.cache_scope) for request in here.backend.requests[1:]]
        assert told == [("search", cache_scope("", "search")), ("batch", cache_scope("", ""))]
        assert await here.metric(answered) == 3
        assert await here.metric("tandem_router_running_requests") == 0
        assert here.counter_files() == {"counter_0.db"}


async def test_a_revoked_key_is_refused_by_all_processes_under_load(tmp_path: Path) -> None:
    """A key is revoked in the file while eight clients ask: both processes refuse it then, and no other key."""
    path = make_key_file(tmp_path / "keys", {"sk-ours": "a", "sk-theirs": "b"})
    key_file = KeyFile(str(path))
    is_revoked = asyncio.Event()
    async with key_file.followed() as keys, frontends(tmp_path, num_processes=2, api_keys=keys) as here:

        async def ask(secret: str) -> tuple[list[int], list[int]]:
            """The statuses of requests that were sent before all processes knew, and after that."""
            before: list[int] = []
            after: list[int] = []
            headers = {"authorization": f"Bearer {secret}"}
            while len(after) < 20:
                statuses = after if is_revoked.is_set() else before
                answer = await here.client.post("/v1/chat/completions", json=BODY, headers=headers)
                statuses.append(answer.status_code)
            return before, after

        async def refused_by(secret: str) -> set[int]:
            """Ports of processes cannot be told apart, but 30 connections reach both of two processes."""
            headers = {"authorization": f"Bearer {secret}"}
            return {(await here.client.get("/v1/models", headers=headers)).status_code for _ in range(30)}

        asking = [asyncio.create_task(ask(secret)) for secret in ["sk-ours", "sk-theirs"] * 4]
        await eventually(lambda: len(here.backend.requests) > 40, START_S)
        await asyncio.to_thread(revoke_key, str(path), "sk-ours")
        async with asyncio.timeout(START_S):
            while await refused_by("sk-ours") != {401}:
                pass
        is_revoked.set()
        for secret, (before, after) in zip(["sk-ours", "sk-theirs"] * 4, await asyncio.gather(*asking), strict=True):
            assert (before[0], set(after)) == (200, {401} if secret == "sk-ours" else {200})
            assert secret == "sk-ours" or set(before) == {200}
        secret = (await asyncio.to_thread(create_key, str(path), tenant="c"))[1]
        async with asyncio.timeout(START_S):
            while await refused_by(secret) != {200}:
                pass


async def test_draining_lets_answers_end_and_ends_the_processes(tmp_path: Path) -> None:
    async with frontends(tmp_path, num_processes=2) as here:
        go_on = asyncio.Event()
        here.backend.script = lambda request: [go_on, *here.backend.reply_steps(request)]
        asking = [asyncio.create_task(here.chat()) for _ in range(6)]
        await eventually(lambda: here.processes.num_running == 6)
        here.processes.drain()
        assert not here.processes.serving.done()
        go_on.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 6
        await here.processes.serving
        with pytest.raises(httpx.ConnectError):
            await here.chat()


async def test_a_process_that_cannot_start_is_reported(tmp_path: Path) -> None:
    backend = FakeBackend(Tokenizer(build_tokenizer(tmp_path)))
    with listening("127.0.0.1", 0) as listener:
        config = RouterConfig(port=0, router_processes=2)
        model = str(tmp_path / "nothing")
        serving = frontend_processes(
            BackendService(backend, Always(), lambda: b""),
            ServeFrontend(model),
            config=config,
            listener=listener,
            api_keys=ApiKeys(),
        )
        async with asyncio.timeout(START_S), serving as processes:
            with pytest.raises(ConfigError, match="nothing"):
                await processes.serving
            assert not processes.is_serving


async def test_a_temporary_folder_with_a_long_name_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with listening("127.0.0.1", 0) as listener:
        serving = frontend_processes(
            BackendService(FakeBackend(Tokenizer(build_tokenizer(tmp_path))), Always(), lambda: b""),
            ServeFrontend(str(tmp_path)),
            config=RouterConfig(port=0, router_processes=2),
            listener=listener,
            api_keys=ApiKeys(),
        )
        with pytest.raises(ConfigError, match=r"longlong.*set TMPDIR to a local folder"):
            await serving.__aenter__()
    assert list(folder.iterdir()) == []


@asynccontextmanager
async def child(folder: Path, frontend: ServeFrontend | RouteFrontend) -> AsyncIterator[asyncio.subprocess.Process]:
    with listening("127.0.0.1", 0) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        async with asyncio.timeout(START_S):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tandem.frontend.processes.child", stdin=PIPE, stdout=PIPE, start_new_session=True
            )
            settings = FrontendSettings(
                frontend_id="one",
                number=0,
                endpoint=f"{folder}/hub",
                frontend=frontend,
                port=listener.getsockname()[1],
                router=RouterConfig(),
                metrics_folder=str(folder),
                started_at_s=1,
            )
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            yield process


@pytest.mark.parametrize("is_route", [False, True])
async def test_a_process_that_cannot_join_says_why(tmp_path: Path, is_route: bool) -> None:
    build_tokenizer(tmp_path)
    frontend = RouteFrontend({}, ExternalEnginesConfig()) if is_route else ServeFrontend(str(tmp_path))
    async with child(tmp_path, frontend) as process:
        said, _ = await process.communicate()
    assert b"error: the deciding process cannot be reached" in said
    assert process.returncode == 1


async def test_a_process_whose_parent_is_gone_ends(tmp_path: Path) -> None:
    backend = FakeBackend(Tokenizer(build_tokenizer(tmp_path)))
    deciding = DecidingProcess(BackendService(backend, Always(), bytes), f"{tmp_path}/hub", ApiKeys())
    await deciding.start()
    deciding.expect("one")
    async with child(tmp_path, ServeFrontend(str(tmp_path))) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while (word := await process.stdout.readline()) == b"alive\n":
            pass
        assert word == b"ready\n"
        process.stdin.close()
        assert await process.wait() == 0
    await deciding.close()


async def test_every_process_has_the_limits_and_knows_whom_to_listen_to(tmp_path: Path) -> None:
    async def slow(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    async with frontends(tmp_path, num_processes=2, header_timeout_s=0.5) as here:
        answers = await asyncio.gather(*(slow(here.client.base_url.port or 0) for _ in range(16)))
        assert {answer.split()[1] for answer in answers} == {b"408"}
        for headers in ({"host": "page.example"}, {"origin": "http://page.example"}):
            refused = [await here.client.post("/v1/chat/completions", json=BODY, headers=headers) for _ in range(8)]
            assert {answer.status_code for answer in refused} == {403}
        assert here.backend.requests == []
        assert (await here.chat()).status_code == 200
