"""A process is gone when the kernel says so, not when somebody else does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from msgspec.structs import replace
from ray.exceptions import RayActorError

from tandem.cluster.process_end import ProcessIdentity, end_process, own_identity, until_gone
from tandem.protocol.process import ProcessId
from tandem.runtime.backoff import Backoff
from tests.support.processes import known, sleeping_child
from tests.support.waiting import until


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with sleeping_child() as process:
        yield process


def test_a_stopped_process_is_ended_and_then_gone(child: subprocess.Popen[bytes]) -> None:
    process = known(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    assert end_process(process, timeout_s=20.0)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "our own child, which we have not reaped"
    assert end_process(process), "a second time changes nothing"
    child.wait()
    assert end_process(process)


def test_a_process_that_took_the_number_is_left_alone(child: subprocess.Popen[bytes]) -> None:
    former = replace(known(child.pid), started=1)
    assert end_process(former)
    assert child.poll() is None
    assert psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE


def test_a_process_of_another_machine_is_neither_killed_nor_called_gone(child: subprocess.Popen[bytes]) -> None:
    elsewhere = replace(known(child.pid), machine="another")
    assert not end_process(elsewhere)
    assert psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE


def test_without_proof_it_is_asked_repeatedly() -> None:
    asked: list[int] = []

    async def end(identity: ProcessIdentity) -> bool:
        asked.append(identity.process.pid)
        return len(asked) == 4

    asyncio.run(until_gone(own_identity("node"), end=end, backoff=Backoff(0.001, 0.01)))
    assert asked == [os.getpid()] * 4


class Ticking:
    """An actor whose thread shows in a file that its process runs."""

    def start(self, file: str) -> ProcessIdentity:
        self._tick_once(file)
        threading.Thread(target=self._tick, args=(file,), daemon=True).start()
        return own_identity(ray.get_runtime_context().get_node_id())

    def wait(self) -> None:
        threading.Event().wait()

    def _tick(self, file: str) -> None:
        while True:
            self._tick_once(file)
            time.sleep(0.002)  # the interval of the ticks

    def _tick_once(self, file: str) -> None:
        next_file = Path(f"{file}.next")
        next_file.write_text(str(time.monotonic()))
        next_file.replace(file)  # whole, whenever it is killed


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder:
        ray.init(address="local", num_cpus=1, include_dashboard=False, _temp_dir=folder, logging_level="ERROR")
        yield
        ray.shutdown()


@pytest.mark.cluster
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("is_near", [True, False], ids=["this machine", "through a task on its node"])
def test_an_actor_is_gone_after_the_proof_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_near: bool) -> None:
    monkeypatch.setattr(ProcessId, "is_here", is_near)  # in this process, not in Ray's
    file = tmp_path / "ticks"
    actor = ray.remote(Ticking).options(num_cpus=0, max_concurrency=4).remote()
    identity = ray.get(actor.start.remote(str(file)), timeout=60)
    process = psutil.Process(identity.process.pid)
    waiting = actor.wait.remote()
    process.suspend()
    until(lambda: process.status() == psutil.STATUS_STOPPED, 60)
    ray.kill(actor, no_restart=True)
    with pytest.raises(RayActorError):
        ray.get(waiting, timeout=60)
    if is_near:
        assert process.status() == psutil.STATUS_STOPPED, "Ray's word comes first"
    asyncio.run(asyncio.wait_for(until_gone(identity), 60))
    gone_at = time.monotonic()
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert float(file.read_text()) < gone_at
