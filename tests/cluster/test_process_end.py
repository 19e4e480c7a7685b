"""A process is gone when the kernel says so, not when somebody else does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from cluster import process_end
from cluster.process_end import ProcessIdentity, end_process, is_here, own_identity, until_gone


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def identity_of(pid: int) -> ProcessIdentity:
    started = process_end._started(pid)
    assert started is not None
    return replace(own_identity("node"), pid=pid, started=started)


def test_our_own_identity_names_us() -> None:
    me = own_identity("node")
    assert (me.pid, is_here(me)) == (os.getpid(), True)
    assert me == own_identity("node")


def test_a_stopped_process_is_ended_and_then_gone(child: subprocess.Popen[bytes]) -> None:
    identity = identity_of(child.pid)
    os.kill(child.pid, signal.SIGSTOP)
    assert end_process(identity, timeout_s=20.0)
    assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "our own child, which we have not reaped"
    assert end_process(identity), "a second time changes nothing"
    child.wait()
    assert end_process(identity)


def test_a_process_that_took_the_number_is_left_alone(child: subprocess.Popen[bytes]) -> None:
    former = replace(identity_of(child.pid), started=1)
    assert end_process(former)
    assert child.poll() is None
    assert psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE


def test_a_process_of_another_machine_is_neither_killed_nor_called_gone(child: subprocess.Popen[bytes]) -> None:
    elsewhere = replace(identity_of(child.pid), machine="another")
    assert not end_process(elsewhere)
    assert psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE


def test_a_name_with_parentheses_does_not_shift_the_fields() -> None:
    code = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'a) R 1 (b', 0, 0, 0); "
        "print('named', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        started = process_end._started(process.pid)
        ours = process_end._started(os.getpid())
        assert started is not None
        assert ours is not None
        assert started >= ours
        process.kill()


def test_without_proof_it_is_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_end, "_FIRST_RETRY_S", 0.001)
    asked: list[int] = []

    async def end(process: ProcessIdentity) -> bool:
        asked.append(process.pid)
        return len(asked) == 4

    asyncio.run(until_gone(own_identity("node"), end=end))
    assert asked == [os.getpid()] * 4
