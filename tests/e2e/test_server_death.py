"""`tandem serve --ray-address`: a server dies and its workers live. The next one takes them over, or they end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tandem.protocol.config import cache_folder
from tests.support.ray_nodes import JOIN, RayNode, ray_cluster
from tests.support.server import HTTP, START_S, Server, started
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

# The cache has the compiled kernels, which would take the node ten seconds.
ENVIRONMENT = {"TANDEM_CACHE": str(cache_folder()), "UCX_TLS": "tcp"}
PROMPT = "ninety-nine bottles of beer on the wall, " * 12
FLAGS = ("--cpus-per-worker", "1", "--pool-bytes", "20000000")


@pytest.fixture(scope="module")
def node() -> Iterator[RayNode]:
    with ray_cluster("127.0.0.5", head_cpus=2, env=ENVIRONMENT) as [head]:
        yield head


def serving(node: RayNode, model: Path, folder: Path, *flags: str) -> AbstractContextManager[Server]:
    flags = ("--ray-address", node.address, *FLAGS, *flags)
    return started(str(model), folder, *flags, env=JOIN | ENVIRONMENT)


def ask(server: Server) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    answer = HTTP.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def epochs(server: Server) -> dict[str, int]:
    roles = HTTP.get(f"{server.url}/v1/pools").json()["roles"]
    return {one["worker_id"]: one["epoch"] for workers in roles.values() for one in workers}


def workers_of(server: Server) -> list[psutil.Process]:
    return [psutil.Process(server.worker(role)["pid"]) for role in ("prefill", "decode")]


def kill(server: Server) -> None:
    server.process.kill()
    server.process.wait()


def test_the_next_server_takes_over_the_workers_and_their_kv(node: RayNode, text_model: Path, tmp_path: Path) -> None:
    with serving(node, text_model, tmp_path) as first:
        expected = ask(first.wait_ready())
        before, workers = epochs(first), workers_of(first)
        body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
        with HTTP.stream("POST", f"{first.url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            kill(first)
            with pytest.raises(httpx.TransportError):  # the client is told at once
                list(lines)
    with serving(node, text_model, tmp_path) as second:
        again = ask(second.wait_ready())
        assert "taking over 2 worker(s)" in second.output
        assert epochs(second) == before
        assert again["choices"] == expected["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        until(
            lambda: HTTP.post(f"{second.url}/v1/pools/check").json()["idle"], START_S
        )  # the killed server's stream has left nothing
        workers[1].kill()
        second.wait_recovered({"worker_id": "decode-0", "epoch": before["decode-0"]})
        assert ask(second)["choices"] == expected["choices"]
        assert second.stop(signal.SIGTERM) == 0
    assert not psutil.wait_procs(workers, timeout=20)[1]


def test_a_second_server_of_the_same_name_is_refused(node: RayNode, text_model: Path, tmp_path: Path) -> None:
    with serving(node, text_model, tmp_path, "--colocated") as first:
        first.wait_ready()
        with serving(node, text_model, tmp_path, "--colocated") as second:
            assert second.process.wait(START_S) == 2
            assert "another tandem serve on this Ray cluster has this name: pid" in second.output
            assert "give this one another --service-name" in second.output
        ask(first)
        with serving(node, text_model, tmp_path, "--colocated", "--service-name", "other") as other:
            ask(other.wait_ready())
            assert other.stop(signal.SIGTERM) == 0
        ask(first)
        assert first.stop(signal.SIGTERM) == 0


def test_a_server_that_stood_still_lets_go_of_claimed_workers(node: RayNode, text_model: Path, tmp_path: Path) -> None:
    with serving(node, text_model, tmp_path, "--colocated") as first:
        first.wait_ready()
        first.process.send_signal(signal.SIGSTOP)
        try:
            with serving(node, text_model, tmp_path, "--colocated") as second:
                ask(second.wait_ready())
                assert "taking over 1 worker(s)" in second.output
                first.process.send_signal(signal.SIGCONT)
                assert first.process.wait(START_S) == 2
                assert "another server has claimed the workers" in first.output
                ask(second)
                assert second.stop(signal.SIGTERM) == 0
        finally:
            first.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("orphan_timeout_s", ["3", "0"])
def test_orphans_end_and_give_back_cores(
    node: RayNode, text_model: Path, tmp_path: Path, orphan_timeout_s: str
) -> None:
    with serving(node, text_model, tmp_path, "--orphan-timeout-s", orphan_timeout_s) as server:
        workers = workers_of(server.wait_ready())
        began_s = time.monotonic()
        kill(server)
        assert not psutil.wait_procs(workers, timeout=60)[1]
        print(f"ended after {time.monotonic() - began_s:.1f} s")
    with serving(node, text_model, tmp_path) as after:  # there are cores for its workers
        assert "taking over" not in after.wait_ready().output
        ask(after)
        assert after.stop(signal.SIGTERM) == 0
