"""Ray's address, privacy and daemons; starting real workers is in tests/e2e."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import uvloop
from ray._private import node, ray_constants, services
from ray._private import worker as ray_worker
from ray.exceptions import AuthenticationError

from tandem.cluster import ray_runtime
from tandem.cluster.ray_runtime import RayDaemon, daemons_watched, probe_address, ray_running
from tandem.protocol.errors import ConfigError, WorkerError
from tests.support.engines_harness import dead_url
from tests.support.processes import known, sleeping_child
from tests.support.waiting import eventually


def test_a_ray_address_where_nothing_listens_is_reported_at_once() -> None:
    address = dead_url().removeprefix("http://")
    for text in (address, f"ray://{address}", "127.0.0.1:99999"):
        with pytest.raises(ConfigError, match=f"ray_address='{text}' cannot be reached"):
            probe_address(text)


def test_a_ray_address_that_answers_or_has_no_port_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5.0)
        probe_address(f"127.0.0.1:{listener.getsockname()[1]}")
        with listener.accept()[0] as connection:
            assert connection.recv(1) == b""  # it has hung up again
    addresses: list[Any] = []
    monkeypatch.setattr(socket, "create_connection", addresses.append)
    probe_address("auto")
    assert addresses == []


def test_rays_paragraph_about_a_dead_worker_is_not_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    printed: list[str] = []

    def show(data: dict[str, Any], ignore_prefix: bool) -> None:
        assert not ignore_prefix
        printed.extend(data["lines"])

    monkeypatch.setattr(show, "__module__", ray_worker.__name__)
    monkeypatch.setattr(ray_worker, "print_to_stdstream", show)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for _ in range(2):
        ray_running("auto", tmp_path, lambda _: None)  # it is not entered: nothing is joined
    notice = f"{ray_runtime.DEATH_NOTICE} while executing a task by an unexpected system error. To troubleshoot ..."
    for data in (
        {"pid": "raylet", "lines": [notice]},
        {"pid": "raylet", "lines": ["no room for an actor"]},
        {"pid": 7, "lines": [f"a worker's own line: {notice}"]},
    ):
        ray_worker.print_to_stdstream(data, ignore_prefix=False)
    assert printed == ["no room for an actor", f"a worker's own line: {notice}"]


def test_ray_still_writes_that_notice() -> None:
    raylet = Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet"
    assert ray_runtime.DEATH_NOTICE.encode() in raylet.read_bytes()


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Failed to connect to Ray cluster at 127.0.0.1:6379"),  # a token that is missing or wrong
        AuthenticationError("Token authentication is enabled but no authentication token was found"),
    ],
    ids=["refused", "no token here"],
)
def test_a_ray_out_of_reach_may_demand_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", refuse)
    with (
        pytest.raises(ConfigError, match=r"cannot be joined: \w+.*\. If that Ray demands a token, set RAY_AUTH_MODE="),
        ray_running("auto", tmp_path, lambda _: None),
    ):
        pass


def test_a_private_ray_may_start_slowly_and_finds_its_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = ("RAY_raylet_start_wait_time_s", "RAY_gcs_server_port_wait_time_s", "RAY_agent_register_timeout_ms")
    node_id, ports = ray.NodeID.from_random().hex(), []

    def start_raylet(node_id: str, session_dir: str, runtime_env_agent_port: int = 0) -> None:
        ports.append(runtime_env_agent_port)

    def start(**_: object) -> None:
        assert [float(os.environ[name]) for name in limits] == [180, 9, 180_000], "a user's value stays"
        assert ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S == 180
        services.start_raylet(node_id, session_dir=str(tmp_path), runtime_env_agent_port=0)
        raise Exception("stop here")

    monkeypatch.setattr(os, "environ", {**os.environ, limits[1]: "9"})
    monkeypatch.setattr(services, "start_raylet", start_raylet)
    monkeypatch.setattr(ray, "init", start)
    before = ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S
    with pytest.raises(WorkerError, match="stop here"), ray_running("", tmp_path, lambda _: None):
        pass
    assert (services.start_raylet, ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S) == (start_raylet, before)
    assert ports[0] > 0
    written = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert written == {f"{name}_{node_id}": "-1" for name in ray_runtime._UNUSED_PORTS}


def test_ray_still_has_what_lets_it_start_slowly() -> None:
    raylet = Path(ray.__file__).parent / "core" / "src" / "ray" / "raylet" / "raylet"
    content = raylet.read_bytes()
    assert all(name in content for name in (b"RAY_raylet_start_wait_time_s", b"RAY_agent_register_timeout_ms"))
    assert "RAY_gcs_server_port_wait_time_s" in inspect.getsource(node)
    assert "ray._private.services.start_raylet(" in inspect.getsource(node)
    assert "ray_constants.RAY_DASHBOARD_STARTUP_TIMEOUT_S" in inspect.getsource(services)
    options = inspect.signature(services.start_raylet).parameters
    assert {"node_id", "session_dir", "runtime_env_agent_port", *ray_runtime._UNUSED_PORTS} <= options.keys()


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
    with pytest.raises(WorkerError, match=expected), ray_running("", tmp_path, lambda _: None):
        pass


def test_ctrl_c_while_ray_starts_is_answered_and_stops_it_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[str] = []

    def start(**_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        assert told[1:] == ["stopping: Ray, which starts now, may take some seconds"]
        told.append("Ray has started")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(ray, "init", start)
    try:
        with pytest.raises(KeyboardInterrupt), ray_running("", tmp_path, told.append):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert told[2:] == ["Ray has started"]


@pytest.mark.parametrize("is_stopped", [False, True], ids=["", "with Ctrl-C"])
def test_a_failed_start_of_ray_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_stopped: bool
) -> None:
    def start(**_: object) -> None:
        if is_stopped:
            signal.raise_signal(signal.SIGINT)
        raise Exception("The current node timed out during startup. This could happen because")  # as Ray does

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(ray, "init", start)
    expected = (KeyboardInterrupt, None) if is_stopped else (WorkerError, r"timed out during startup\. If .* is busy")
    try:
        with pytest.raises(expected[0], match=expected[1]), ray_running("", tmp_path, lambda _: None):
            pass
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, WorkerError], ids=["stopped", "Ctrl-C", "failed"])
def test_a_ray_that_hangs_at_the_end_is_left_with_the_right_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[BaseException] | None
) -> None:
    hangs, at_exit = threading.Event(), []
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: hangs.wait(60))
    monkeypatch.setattr("tandem.cluster.ray_runtime._LEAVE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(atexit, "register", lambda call, code: at_exit.append((call.__name__, code)))
    try:
        with contextlib.suppress(error or ()), ray_running("auto", tmp_path, lambda _: None):
            if error is not None:
                raise error("the server ends")
    finally:
        hangs.set()
    assert at_exit == [("_exit_without_ray", int(error is WorkerError))]


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_the_death_of_a_daemon_of_ray_is_reported_once(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    deaths: list[WorkerError] = []

    async def run(process: subprocess.Popen[bytes]) -> None:
        daemon = RayDaemon("gcs_server", known(process.pid))
        with daemons_watched([daemon], deaths.append):
            await asyncio.sleep(0)
            assert (deaths, daemon.is_alive) == ([], True)
            process.kill()  # nobody waits for it: it stays a zombie
            await eventually(lambda: deaths)
            assert not daemon.is_alive
            for _ in range(10):
                await asyncio.sleep(0)
        assert [str(death).partition(",")[0] for death in deaths] == [f"Ray's gcs_server (pid {process.pid})"]

    with sleeping_child() as process, asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run(process))
