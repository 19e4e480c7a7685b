"""The launcher's checks and its stop; starting real workers is in tests/e2e."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import ray
import uvloop
from prometheus_client import CollectorRegistry
from ray._private import ray_constants
from ray.exceptions import AuthenticationError
from starlette.types import Receive, Scope, Send

from tandem.cluster.http_front import drain
from tandem.cluster.serve import _Daemon, _probe, _ray, _watched, resolve, worker_configs
from tandem.protocol.config import ClusterConfig, EngineConfig, RouterConfig
from tandem.protocol.errors import ConfigError, WorkerError
from tandem.router.http.server import http_server
from tandem.router.openai.app import create_app
from tandem.router.text.tokenizer import Tokenizer
from tests.router.conftest import build_tokenizer
from tests.support.cluster_harness import eventually
from tests.support.fake_worker import fake_cluster, first_token, one_token, until

CONFIG = ClusterConfig(engine=EngineConfig(model="m"))


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})


@pytest.mark.usefixtures("four_cores")
def test_more_cores_than_the_machine_has_are_refused() -> None:
    assert resolve(replace(CONFIG, num_cpus_per_worker=2)).num_cpus_per_worker == 2
    with pytest.raises(ConfigError, match=r"=64 for 2 worker\(s\) needs 128 cores; this machine has 4"):
        resolve(replace(CONFIG, num_cpus_per_worker=64))


@pytest.mark.usefixtures("four_cores")
def test_a_cluster_that_was_joined_may_grow() -> None:
    assert resolve(replace(CONFIG, num_cpus_per_worker=64, ray_address="auto")).num_cpus_per_worker == 64


def test_a_ray_address_where_nothing_listens_is_told_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        for text in (address, f"ray://{address}", "127.0.0.1:99999"):
            with pytest.raises(ConfigError, match=f"ray_address='{text}' cannot be reached"):
                _probe(text)


def test_a_ray_address_that_answers_or_has_no_port_passes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _probe(f"127.0.0.1:{listener.getsockname()[1]}")
    _probe("auto")


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Failed to connect to Ray cluster at 127.0.0.1:6379"),  # a token that is missing or wrong
        AuthenticationError("Token authentication is enabled but no authentication token was found"),
    ],
    ids=["refused", "no token here"],
)
def test_a_ray_that_cannot_be_joined_may_demand_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", refuse)
    config = replace(CONFIG, ray_address="auto")
    with (
        pytest.raises(ConfigError, match=r"cannot be joined: \w+.*\. If that Ray demands a token, set RAY_AUTH_MODE="),
        _ray(config, tmp_path, lambda _: None),
    ):
        pass


@pytest.mark.parametrize(
    ("address", "mode", "expected"),
    [("192.0.2.7", "token", "listens on 192.0.2.7"), ("127.0.0.1", "disabled", "demands no token")],
)
def test_a_private_ray_that_is_not_private_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, mode: str, expected: str
) -> None:
    """How Ray is told to be private is nothing it promises: another version may not listen to it."""

    def start(**_: object) -> None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)

    for name in ("RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        monkeypatch.setenv(name, "")  # so that it is put back
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    with pytest.raises(WorkerError, match=expected), _ray(CONFIG, tmp_path, lambda _: None):
        pass


@pytest.mark.parametrize("is_hurried", [False, True], ids=["deadline", "second signal"])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "plain"])
def test_answers_that_do_not_end_in_time_end_with_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_hurried: bool, is_stream: bool
) -> None:
    tokenizer = Tokenizer(build_tokenizer(tmp_path))
    timeout_s = 600.0 if is_hurried else 0.05
    told: list[str] = []

    async def scenario() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with fake_cluster(prefill=first_token, decode=one_token) as cluster, asyncio.timeout(20):
            app = create_app(cluster.flow, tokenizer, RouterConfig(), CollectorRegistry(), api_keys={})
            async with (
                http_server(app, RouterConfig(), listener) as server,
                httpx.AsyncClient(base_url=base_url) as client,
            ):
                body = {"model": "toy", "prompt": "hello " * 20, "max_tokens": 9, "stream": is_stream}
                request = client.build_request("POST", "/v1/completions", json=body)
                asking = asyncio.create_task(client.send(request, stream=True))
                if is_stream:
                    await asyncio.wait({asking})  # the first token is here
                await until(lambda: cluster.registry.num_bookings == 2)  # this one and the readiness probe
                stop_now = asyncio.Event()
                if is_hurried:
                    stop_now.set()
                await drain(server, stop_now, cluster.flow, timeout_s, told.append)
                answer = await asking
                assert "the server is shutting down" in (await answer.aread()).decode()
                assert answer.status_code == (200 if is_stream else 503)
                assert server.serving.done()
            cluster.assert_nothing_left()

    asyncio.run(scenario())
    assert told == [f"stopping: waiting up to {timeout_s:g} s for 1 answer (Ctrl-C again stops now)"]
    assert "Traceback" not in caplog.text


def test_a_client_that_does_not_read_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the client is gone."""
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.create_task(_gone(receive))
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)

    async def scenario() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        async with asyncio.timeout(20):
            async with http_server(endless, RouterConfig(), listener) as server:
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await until(lambda: server.num_running == 1)
            assert server.serving.done()
            writer.close()

    asyncio.run(scenario())
    assert "Traceback" not in caplog.text


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def test_workers_of_one_machine_have_files_for_sockets_and_those_of_several_have_ports() -> None:
    resolved = replace(CONFIG, engine=replace(CONFIG.engine, num_threads=1))
    here = worker_configs(resolved, router_key="key", socket_folder="/private")
    assert {(config.socket_folder, config.host, config.router_key) for config in here} == {
        ("/private", "127.0.0.1", "key")
    }
    there = worker_configs(replace(resolved, ray_address="auto"), router_key="key", socket_folder="/private")
    assert {(config.socket_folder, config.host, config.router_key) for config in there} == {("", "", "key")}


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_death_of_a_daemon_of_ray_is_told_at_once_and_once(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    daemon = _Daemon("gcs_server", psutil.Process(process.pid))
    deaths: list[WorkerError] = []

    async def run() -> None:
        with _watched([daemon], deaths.append):
            await asyncio.sleep(0)
            assert (deaths, daemon.is_alive) == ([], True)
            process.kill()  # nobody waits for it: it stays a zombie
            await eventually(lambda: deaths)
            assert not daemon.is_alive
            for _ in range(10):
                await asyncio.sleep(0)
        assert [str(death).partition(",")[0] for death in deaths] == [f"Ray's gcs_server (pid {process.pid})"]

    try:
        with asyncio.Runner(loop_factory=make_loop) as runner:
            runner.run(run())
    finally:
        process.kill()
        process.wait()
