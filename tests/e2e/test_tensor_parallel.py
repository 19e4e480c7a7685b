"""Workers of two ranks and of one in a real server: they answer alike, and a rank that is killed is replaced."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.server import Server, started
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

FLAGS = ("--routing=cost,pairs", "--worker-timeout-s", "6", "--pool-bytes", "20000000")


def answer(server: Server) -> str:
    body = {"model": "tiny", "prompt": "What ranks compute together. " * 9, "max_tokens": 24, "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    return str(reply.json()["choices"][0]["text"]) if reply.status_code == 200 else ""


def followers(server: Server) -> set[int]:
    """Processes of ranks that this server started."""
    found = set()
    for child in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            if "tandem.engine.tensor_parallel.follower" in child.cmdline():
                found.add(child.pid)
    return found


def test_a_server_with_workers_of_two_ranks(text_model: Path, tmp_path: Path) -> None:
    with started(text_model, tmp_path, *FLAGS) as server:
        expected = answer(server.wait_ready())
    with started(text_model, tmp_path, *FLAGS, "--tensor-parallel-size", "2", "--decode-parallel-size", "1") as server:
        assert answer(server.wait_ready()) == expected != ""
        [killed] = followers(server)
        os.kill(killed, signal.SIGKILL)
        until(lambda: followers(server) - {killed} and answer(server) == expected, 120, lambda: "no rank came back")
        left = followers(server)
    until(lambda: not any(map(psutil.pid_exists, left)), 10, lambda: f"{left} are left")
