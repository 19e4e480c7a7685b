"""schemathesis reads /openapi.json and sends what it may and may not: no 5xx, no hang, no undocumented answer."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.common import free_port, launched
from tests.clients.conftest import KEY, PYTHON
from tests.support.keys import make_key_file
from tests.support.server import REPOSITORY, Server, started
from tests.support.tiny_llama import save_tiny_text_model

# The number of requests is fixed, and each one has its own limit: the whole may take long on a busy machine.
pytestmark = [pytest.mark.clients, pytest.mark.timeout(2500)]

CASES_PER_ROUTE = 30
MIN_REQUESTS, MAX_S, MAX_SILENT_S = 1500, 2400.0, 30.0
EXCLUDED = (
    "/v1/dashboard",  # a stream that ends with its client
    "/v1/embeddings",  # 501 is what it documents
)
EXCLUDED_OF_ROUTE = (*EXCLUDED, "/v1/pools/migrate")  # 501 as well: engines cannot move their answers
# Many bodies that fit their schema are wrong for other reasons: an unknown model, two fields that exclude each other.
UNCHECKED = "positive_data_acceptance"


@pytest.fixture(scope="module")
def tiny_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("schemathesis")
    make_key_file(folder / "keys.json", {KEY: "*"})
    # Answers without a limit of tokens go on to the end of the context: it is short.
    flags = (
        "--routing=cost,pairs",
        "--pool-bytes",
        "20000000",
        "--max-model-len",
        "256",
        "--api-key-file",
        str(folder / "keys.json"),
    )
    with started(save_tiny_text_model(folder / "tiny"), folder, *flags) as server:
        yield server.wait_ready()


@pytest.fixture(scope="module")
def router_url(tiny_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`tandem route` with that server as its engine, and the same key."""
    folder = tmp_path_factory.mktemp("route")
    make_key_file(folder / "keys.json", {KEY: "*"})
    engine = f'[[engines]]\nname = "a"\nurl = "{tiny_server.url}"\nkind = "openai"\napi_key_env = "ENGINE_KEY"\n'
    (folder / "engines.toml").write_text(engine)
    port = free_port()
    command = [sys.executable, "-m", "tandem", "route", f"--engines={folder / 'engines.toml'}", f"--port={port}"]
    command += [f"--api-key-file={folder / 'keys.json'}"]
    url = f"http://127.0.0.1:{port}"
    with launched(command, ready=f"{url}/ready", env={"ENGINE_KEY": KEY}):
        yield url


def run_schemathesis(url: str, folder: Path, seed: int, excluded: Sequence[str]) -> tuple[int, str, dict[str, Any]]:
    """Its exit code, its report and the answers that were counted."""
    answers = folder / "answers.json"
    command = [str(PYTHON.parent / "st"), "run", f"{url}/openapi.json", "--no-color", "--seed", str(seed)]
    command += ["--header", f"Authorization: Bearer {KEY}", "--exclude-checks", UNCHECKED, "--workers", "1"]
    command += ["--max-examples", str(CASES_PER_ROUTE), "--continue-on-failure", "--no-shrink"]
    command += ["--request-timeout", str(MAX_SILENT_S), "--generation-database", "none"]
    command += [part for path in excluded for part in ("--exclude-path", path)]
    command += ["--exclude-path-regex", "^/v1/engines"]  # they have a token of their own, and remove engines
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "PYTHONPATH": str(REPOSITORY),
        "SCHEMATHESIS_HOOKS": "tests.clients.programs.schemathesis_hooks",
        "ANSWERS_FILE": str(answers),
        "NO_PROXY": "*",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=MAX_S, check=False
    )
    counted: dict[str, Any] = json.loads(answers.read_text())
    return done.returncode, done.stdout + done.stderr, counted


def check_answers(url: str, folder: Path, excluded: Sequence[str] = EXCLUDED) -> None:
    seed = random.randrange(2**31)
    code, report, counted = run_schemathesis(url, folder, seed, excluded)
    statuses = {int(status): number for status, number in counted["statuses"].items()}
    print(f"schemathesis, seed {seed}: {sum(statuses.values())} requests, {counted}\n{report[-800:]}")
    assert code == 0, report[report.find("FAILURES") :][:6000]
    assert sum(statuses.values()) >= MIN_REQUESTS
    assert {status for status in statuses if status >= 500} == set(), statuses
    assert counted["longest_s"] < MAX_SILENT_S
    assert {200, 400} < statuses.keys()


def test_what_it_sends_to_a_server_is_answered_as_documented(tiny_server: Server, tmp_path: Path) -> None:
    check_answers(tiny_server.url, tmp_path)
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx.post(f"{tiny_server.url}/v1/pools/check", headers=headers, timeout=30).json()["idle"]


def test_what_it_sends_to_a_router_is_answered_as_documented(router_url: str, tmp_path: Path) -> None:
    check_answers(router_url, tmp_path, EXCLUDED_OF_ROUTE)
