"""Work of other processes, beside which a benchmark measures."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from benchmarks.common import HERE, beside, end_whole

_BUSY_S = 0.005
_COMPILE = ("g++", "-std=c++17", "-O2", "-w", "-c", "-o", "/dev/null", "engine/cpu/paged_attention.cpp")


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """A process that computes half of the time."""
    with beside(_be_busy) as pipe:
        pipe.recv()
        yield


@contextlib.contextmanager
def compilers() -> Iterator[None]:
    """Two compilers at a time, as of `make -j2`, again and again."""
    with beside(_compile) as pipe:
        pipe.recv()
        yield


BESIDE: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "busy core": busy_core,
    "compilers": compilers,
}


def _be_busy(pipe: Connection) -> None:
    pipe.send(None)
    while True:
        begun_s = time.perf_counter()
        while time.perf_counter() - begun_s < _BUSY_S:
            pass
        time.sleep(_BUSY_S)


def _compile(pipe: Connection) -> None:
    end_whole()
    running: list[subprocess.Popen[bytes]] = []
    try:
        while True:
            running = [subprocess.Popen(_COMPILE, cwd=HERE, start_new_session=True) for _ in range(2)]
            pipe.send(None)
            if codes := [code for process in running if (code := process.wait())]:
                raise RuntimeError(f"{' '.join(_COMPILE)} ended with {codes[0]}")
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
