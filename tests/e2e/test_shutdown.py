"""What clients see of `tandem route` that gets SIGTERM: nothing breaks off that ends in time, and the rest is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.fake_openai import FakeServer, fake_openai
from tests.support.server import HTTP, REPOSITORY, begun_stream, status_of
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

STREAM = {"prompt": "a b", "max_tokens": 8, "stream": True}
FORMER_LIMIT_S = 5.0  # after SIGTERM, answers once had this long


@contextmanager
def routing_process(engine: FakeServer, folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`tandem route` in front of an engine, and its URL."""
    engines, log = folder / "engines.toml", folder / "route.log"
    engines.write_text(f'[[engines]]\nname = "a"\nurl = "{engine.url}"\nkind = "vllm"\n')
    command = [sys.executable, "-m", "tandem", "route", f"--engines={engines}", "--port=0", "--probe-interval-s=0.05"]
    environment = os.environ | {"COLUMNS": "400", "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *flags], cwd=REPOSITORY, stdout=output, stderr=output, env=environment)
    try:
        until(lambda: " on http://" in log.read_text() or process.poll() is not None, explain=log.read_text)
        url = log.read_text().split(" on ")[1].split()[0]
        until(lambda: status_of(f"{url}/ready") == 200, explain=log.read_text)
        yield process, url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def engine() -> Iterator[FakeServer]:
    """Its streams stop after their first event until it is told to resume."""
    with fake_openai() as fake:
        fake.pause.clear()
        yield fake


def closes(answer: httpx.Response) -> bool:
    """Whether the connection of this good answer is not used again."""
    assert answer.status_code == 200
    return answer.headers.get("connection") == "close"


@pytest.mark.parametrize("num_processes", [1, 2])
def test_after_sigterm_balancers_leave_and_streams_end(engine: FakeServer, tmp_path: Path, num_processes: int) -> None:
    flags = (f"--router-processes={num_processes}", "--shutdown-delay-s=6", "--drain-timeout-s=0.1")
    with (
        routing_process(engine, tmp_path, *flags) as (process, url),
        httpx.Client(trust_env=False) as kept,
        begun_stream(url, STREAM) as lines,
    ):
        assert "connection" not in kept.get(f"{url}/health").headers
        told_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        until(lambda: "shutting down" in HTTP.get(f"{url}/ready").text)
        # Its processes hear of it one after the other. A kept connection is not used again, and requests are answered.
        until(lambda: kept.get(f"{url}/health").headers.get("connection") == "close")
        until(lambda: closes(HTTP.post(f"{url}/v1/completions", json=STREAM | {"stream": False})))
        until(lambda: status_of(f"{url}/health") == 0)
        assert time.monotonic() - told_s > FORMER_LIMIT_S
        engine.resume()
        assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("hurry", "num_processes"),
    [
        ("grace is over", 1),
        ("second signal", 2),
        pytest.param("grace is over", 2, marks=pytest.mark.slow),
        pytest.param("second signal", 1, marks=pytest.mark.slow),
    ],
)
def test_a_stream_that_is_late_is_told_of_the_end(
    engine: FakeServer, tmp_path: Path, hurry: str, num_processes: int
) -> None:
    delays = ("--shutdown-delay-s=600",) if hurry == "second signal" else ("--shutdown-grace-s=0.5",)
    with (
        routing_process(engine, tmp_path, f"--router-processes={num_processes}", *delays) as (process, url),
        begun_stream(url, STREAM) as lines,
    ):
        process.send_signal(signal.SIGTERM)
        if hurry == "second signal":
            until(lambda: status_of(f"{url}/ready") == 503)
            process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
        assert '"error"' in last
        assert "the server is shutting down; send the request again" in last
        assert process.wait(30) == 0


def test_ctrl_c_stays_quick(engine: FakeServer, tmp_path: Path) -> None:
    flags = ("--shutdown-delay-s=600", "--shutdown-grace-s=600", "--drain-timeout-s=0.1")
    with routing_process(engine, tmp_path, *flags) as (process, url), begun_stream(url, STREAM) as lines:
        process.send_signal(signal.SIGINT)
        assert '"error"' in [line for line in lines if line][-1]
        assert process.wait(30) == 0
