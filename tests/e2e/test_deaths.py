"""Kills the server, or a daemon of Ray: nothing is left behind, and the last message names the cause."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.server import Server, started
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

POOL = ("--pool-bytes", "20000000")
GONE_S = 10.0  # a quiet machine needs one second


def stream_of(server: Server) -> httpx.Response:
    """A streamed answer that has begun and takes longer than the test."""
    client = httpx.Client(timeout=60)
    body = {"model": "tiny", "prompt": "x" * 100, "max_tokens": 1900, "stream": True, "ignore_eos": True}
    response = client.send(client.build_request("POST", f"{server.url}/v1/completions", json=body), stream=True)
    next(response.iter_lines())
    return response


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie does not: only its new parent has not reaped it yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("is_worker_stopped", [False, True], ids=["", "with a stopped worker"])
def test_after_a_killed_server_nothing_is_left(text_model: Path, tmp_path: Path, is_worker_stopped: bool) -> None:
    with started(text_model, tmp_path, "--router-processes", "2", *POOL) as server:
        children = server.wait_ready().children()
        assert len(children) > 8
        stream = stream_of(server)
        if is_worker_stopped:
            psutil.Process(server.worker("prefill")["pid"]).suspend()
        server.process.send_signal(signal.SIGKILL)
        assert server.process.wait(GONE_S) == -signal.SIGKILL
        until(lambda: not any(map(is_alive, children)), GONE_S, lambda: str([p for p in children if is_alive(p)]))
        until(lambda: not list(server.scratch.iterdir()), GONE_S, lambda: str(list(server.scratch.iterdir())))
        stream.close()


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_the_death_of_a_daemon_of_ray_is_told_in_our_words(text_model: Path, tmp_path: Path, name: str) -> None:
    with started(text_model, tmp_path, *POOL) as server:
        children = server.wait_ready().children()
        stream = stream_of(server)
        [daemon] = [process for process in children if process.name() == name]
        killed_at = time.monotonic()
        daemon.kill()
        assert server.process.wait(45.0) == 1, server.output
        print(f"ended {time.monotonic() - killed_at:.1f} s after the death of {name}")
        assert f"Ray's {name} (pid {daemon.pid})" in server.output
        assert "start the server again" in server.output
        assert "Traceback" not in server.output
        until(lambda: not any(map(is_alive, children)), GONE_S, lambda: str([p for p in children if is_alive(p)]))
        assert not list(server.scratch.iterdir())
        stream.close()


def test_sigterm_to_all_processes_of_a_server_ends_it_as_sigterm_to_one_does(text_model: Path, tmp_path: Path) -> None:
    """As systemd sends it by default. Ray's daemons end with it, and a call of such a Ray may block for a minute."""
    with started(text_model, tmp_path, "--router-processes", "2", *POOL) as server:
        children = server.wait_ready().children()
        signalled_at = time.monotonic()
        for process in (server.process, *children):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        assert server.process.wait(45.0) == 0, server.output
        print(f"ended after {time.monotonic() - signalled_at:.1f} s")
        assert "Traceback" not in server.output
        assert "GCS" not in server.output
        until(lambda: not any(map(is_alive, children)), GONE_S, lambda: str([p for p in children if is_alive(p)]))
        until(lambda: not list(server.scratch.iterdir()), GONE_S, lambda: str(list(server.scratch.iterdir())))


def test_a_worker_that_gets_sigterm_moves_its_answers_and_is_replaced(text_model: Path, tmp_path: Path) -> None:
    with started(text_model, tmp_path, *POOL) as server:
        victim = server.wait_ready().worker("decode")
        body = {"prompt": "x" * 100, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
        expected = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["choices"]
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=120)
            until(lambda: server.worker("decode")["num_running"] > 0)
            psutil.Process(victim["pid"]).send_signal(signal.SIGTERM)
            assert answer.result().json()["choices"] == expected
        server.wait_recovered(victim)
        assert "decode worker decode-0 has left" in server.output
        assert "died" not in server.output
        assert server.stop() == 0
