"""The actor of an engine server, without Ray: a fake server stands for vLLM's."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tandem.cluster.engines import vllm
from tandem.cluster.engines.actor import EngineActor, EngineEnd, EngineStarted
from tandem.cluster.engines.process import ServerProcess
from tandem.cluster.engines.server import EngineServer
from tandem.protocol.errors import WorkerError
from tandem.router.engines.engine_status import EngineReport, ReportedLoad, WorkDone
from tandem.runtime.ports import free_ports
from tests.support.managed import engine_python, engine_server
from tests.support.waiting import until

TIMEOUT_S = 60.0


def server(folder: Path, *arguments: str, **fields: object) -> EngineServer:
    here = {"python": str(engine_python(folder, "fake_vllm")), "model": str(folder), "log_folder": str(folder / "logs")}
    return engine_server(worker_id="decode-0", arguments=arguments, **(here | fields))


@contextmanager
def running(spec: EngineServer) -> Iterator[tuple[EngineActor, EngineStarted, list[psutil.Process]]]:
    """An actor whose server serves, and the server's processes."""
    actor = EngineActor(spec)
    started = actor.start()
    try:
        assert isinstance(started, EngineStarted), started
        process = psutil.Process(started.pid)
        yield actor, started, [process, *process.children(recursive=True)]
    finally:
        actor.stop()


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


def failed_start(spec: EngineServer) -> EngineEnd:
    end = EngineActor(spec).start()
    assert isinstance(end, EngineEnd)
    return end


@pytest.mark.cluster
def test_a_server_serves_reports_its_work_and_is_ended_whole(tmp_path: Path) -> None:
    with running(server(tmp_path)) as (actor, started, processes):
        assert len(processes) >= 2
        body = {"model": "toy", "prompt": "a b", "max_tokens": 2, "stream": False}
        url = f"{started.url}/v1/completions"
        assert httpx.post(url, json=body, timeout=TIMEOUT_S).status_code == 401
        answer = httpx.post(url, json=body, headers={"authorization": "Bearer secret"}, timeout=TIMEOUT_S)
        assert answer.json()["choices"][0]["text"] == "word word "
        assert started.events.startswith("ipc:///")
        with ServerProcess("vllm", ["sleep", "600"], {}, None) as process:
            idle = EngineReport(ReportedLoad(0, 0, 0.0), WorkDone(7.0, is_of_each_step=True))
            assert process.report(f"{started.url}/metrics") == idle
            assert process.report(f"{started.url}/absent") == EngineReport(None, None)
            assert process.report("http://127.0.0.1:9/metrics") is None
    assert actor.watch().reason == "stopped"
    assert_gone(processes)
    assert "serving toy" in (tmp_path / "logs" / "decode-0.log").read_text()


@pytest.mark.cluster
def test_a_server_that_ignores_sigterm_is_ended_by_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.engines.process._STOP_TIMEOUT_S", 0.3)
    with running(server(tmp_path, "--fake-deaf")) as (_, _, processes):
        pass
    assert_gone(processes)


@pytest.mark.cluster
def test_the_end_of_a_server_is_reported_and_its_children_go_with_it(tmp_path: Path) -> None:
    with running(server(tmp_path)) as (actor, _, processes):
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(actor.watch)
            processes[0].kill()
            assert ended.result(TIMEOUT_S).reason == "vllm was ended by signal 9"
        assert_gone(processes)


def test_a_server_that_cannot_start_is_reported_by_its_error(tmp_path: Path) -> None:
    line = "(APIServer pid=1) ValueError: the model is too large"
    end = failed_start(server(tmp_path, f"--fake-error={line}"))
    assert end.reason == "vllm ended with code 3: ValueError: the model is too large"
    assert end.tail == ["some line before it", line]


@pytest.fixture
def host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The name of the host memory of the server that is started next."""
    monkeypatch.setattr(vllm, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("tandem.cluster.engines.actor.secrets.token_hex", lambda _: "ab")
    name = tmp_path / "vllm_offload_ab.mmap"
    name.touch()
    return name


def test_a_server_that_cannot_start_leaves_no_host_memory(tmp_path: Path, host_memory: Path) -> None:
    failed_start(server(tmp_path, "--fake-error=ValueError: no"))
    assert not host_memory.exists()


@pytest.mark.cluster
def test_the_name_of_host_memory_is_gone_once_a_server_serves(tmp_path: Path, host_memory: Path) -> None:
    """So that nothing is left when it is killed."""
    with running(server(tmp_path)):
        assert not host_memory.exists()


def test_a_python_that_cannot_run_the_engine_is_named(tmp_path: Path) -> None:
    end = failed_start(server(tmp_path, python=str(tmp_path / "absent")))
    assert end.reason == f"{tmp_path / 'absent'} cannot be started: No such file or directory"
    end = failed_start(server(tmp_path, python=sys.executable))
    assert "No module named 'vllm'" in end.reason
    assert "make engine-vllm" in end.reason


@pytest.mark.parametrize("in_the_way", ["logs", "logs/decode-0.log"])
def test_a_log_that_cannot_be_written_is_reported_before_the_server_is_started(tmp_path: Path, in_the_way: str) -> None:
    if in_the_way == "logs":
        (tmp_path / in_the_way).touch()
    else:
        (tmp_path / in_the_way).mkdir(parents=True)
    end = failed_start(server(tmp_path))
    assert end.reason.startswith(f"engine_log_folder='{tmp_path}/logs' cannot be written: ")


SPINS = """
import threading, time
def spin():
    while True: pass
threads = [threading.Thread(target=one, daemon=True) for one in (spin, lambda: time.sleep(600))]
for thread in threads: thread.start()
print(*(thread.native_id for thread in threads), flush=True)
time.sleep(600)
"""


def test_threads_that_spin_in_an_idle_server_give_way_to_others(tmp_path: Path) -> None:
    with ServerProcess("vllm", [sys.executable, "-c", SPINS], {}, None) as process:
        until(lambda: bool(process.tail), TIMEOUT_S)
        spinning, sleeping = map(int, process.tail[0].split())
        process.lower_spinning_threads()
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        niceness = [os.getpriority(os.PRIO_PROCESS, thread) for thread in (process.pid, sleeping, spinning)]
        assert niceness == [usual, usual, 10]


def sleeping(folder: Path) -> str:
    """A program that never serves."""
    program = folder / "sleeps"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    return str(program)


def test_a_server_that_is_late_is_ended(tmp_path: Path) -> None:
    end = failed_start(server(tmp_path, python=sleeping(tmp_path), start_timeout_s=0.2))
    assert "did not serve in time; its last line: " in end.reason


def test_a_server_can_be_stopped_while_it_loads(tmp_path: Path) -> None:
    actor = EngineActor(server(tmp_path, python=sleeping(tmp_path)))
    ends: list[object] = []
    starting = threading.Thread(target=lambda: ends.append(actor.start()))
    starting.start()
    actor.stop()
    starting.join(TIMEOUT_S)
    assert isinstance(ends[0], EngineEnd)


def test_ports_in_a_row_are_free() -> None:
    first = free_ports("127.0.0.1", 4)
    assert 1024 <= first <= 65532
    with pytest.raises(WorkerError, match="70000 free ports in a row were not found"):
        free_ports("127.0.0.1", 70_000)
