"""`tandem serve --ray-address`: a cluster that demands a token, which this user has or has not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.server import START_S, started
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]

TOKEN = "0123456789abcdef" * 4
# On loopback, which Ray reads as "no other nodes": see cluster/ray_runtime.py.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray cluster of one node that demands TOKEN."""
    scratch = Path(tempfile.mkdtemp(prefix="t-"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0", "--num-cpus=2"]
    with (scratch / "log").open("wb") as log:
        head = subprocess.Popen(
            [*command, "--include-dashboard=false", f"--temp-dir={scratch / 'ray'}"],
            env=environment | LOOPBACK | {"RAY_AUTH_TOKEN": TOKEN},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(
            lambda: "Ray runtime started" in (scratch / "log").read_text() or head.poll() is not None,
            START_S,
            (scratch / "log").read_text,
        )
        [gcs] = [process for process in psutil.Process(head.pid).children() if process.name() == "gcs_server"]
        [port] = [one.laddr.port for one in gcs.net_connections("inet") if one.status == psutil.CONN_LISTEN]
        yield f"127.0.0.1:{port}"
    finally:
        children = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
        head.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            head.wait(30)
        head.kill()
        head.wait()
        for process in psutil.wait_procs(children, timeout=10)[1]:
            process.kill()
        shutil.rmtree(scratch, ignore_errors=True)


def test_the_token_of_the_cluster_lets_a_server_join(text_model: Path, tmp_path: Path, ray_address: str) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    flags = ("--colocated", "--pool-bytes", "20000000", "--ray-address", ray_address)
    with started(text_model, tmp_path, *flags, env=LOOPBACK | {"RAY_AUTH_TOKEN_PATH": str(token)}) as server:
        server.wait_ready()
        body = {"prompt": "hello", "max_tokens": 3}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


@pytest.mark.parametrize(
    "environment",
    [
        LOOPBACK | {"RAY_AUTH_TOKEN": "f" * 64},
        LOOPBACK | {"RAY_AUTH_TOKEN_PATH": "/no/such/token"},
        LOOPBACK | {"RAY_AUTH_MODE": "disabled"},
    ],
    ids=["wrong", "missing", "none"],
)
def test_without_its_token_the_error_says_what_to_set(
    text_model: Path, tmp_path: Path, ray_address: str, environment: dict[str, str]
) -> None:
    with started(text_model, tmp_path, "--colocated", "--ray-address", ray_address, env=environment) as server:
        assert server.process.wait(120) == 2
        last = server.output.strip().splitlines()[-1]
        assert last.startswith(f"tandem: ray_address='{ray_address}' cannot be joined: "), server.output
        assert "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH" in last
