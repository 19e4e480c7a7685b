"""A server with the default model and an API key, and the environment of the clients."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tandem.cluster.model_store import DEFAULT_MODEL, resolve_model, served_name
from tests.support.keys import make_key_file
from tests.support.server import REPOSITORY, Server, started

PYTHON = Path(os.environ.get("TANDEM_CLIENTS_PYTHON", REPOSITORY / ".venv-clients" / "bin" / "python"))
KEY = "sk-clients"
CLIENTS = ("openai", "anthropic", "langchain", "litellm")
PROGRAM_S = 300.0

INTRODUCTION = """\
# Clients

<!-- Written by `make test-clients TANDEM_TRANSCRIPTS=docs/clients.md`. -->

These are programs as users of client libraries write them, each step with what it printed, run by `make test-clients`
against a `tandem serve` with one prefill and one decode worker, an API key and the default model,
SmolLM2-135M-Instruct, in float32. The programs are in `tests/clients/programs`; each step fails the run if its
assertions do. The answers are those of a very small model. The same target runs an lm-eval task through the server and
through plain transformers, which must have the same score, and schemathesis on the OpenAPI documents of `tandem serve`
and `tandem route` (section 44 of [benchmarks.md](benchmarks.md#44-clients-and-the-api)).
"""

RunProgram = Callable[[str], str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason=f"{PYTHON} is missing: run scripts/clients.sh, as `make test-clients` does")
    for item in items:
        if "clients" in item.keywords and not PYTHON.exists():
            item.add_marker(skip)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    keys = folder / "keys.json"
    make_key_file(keys, {KEY: "clients"})
    flags = ("--no-local-prefill", "--dtype", "float32", "--api-key-file", str(keys))
    with started(resolve_model(DEFAULT_MODEL), folder, *flags) as server:
        yield server.wait_ready()


def client_environment(server: Server) -> Mapping[str, str]:
    """Where a program finds the server. It finds nothing of Tandem's environment."""
    others = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    told = {"TANDEM_URL": server.url, "TANDEM_KEY": KEY, "TANDEM_MODEL": served_name(str(resolve_model(DEFAULT_MODEL)))}
    return others | told | {"NO_PROXY": "*", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def transcripts() -> Iterator[dict[str, str]]:
    """The transcripts of this run, by client. Those of all clients become the file that TANDEM_TRANSCRIPTS names."""
    found: dict[str, str] = {}
    yield found
    path = os.environ.get("TANDEM_TRANSCRIPTS")
    if path and len(found) == len(CLIENTS):
        Path(path).write_text("\n".join([INTRODUCTION, *found.values()]))


@pytest.fixture
def run_program(server: Server, transcripts: dict[str, str]) -> RunProgram:
    """Runs a client's program against the server; returns its transcript, which it checks has no path."""

    def run(client: str) -> str:
        command = [str(PYTHON), "-m", f"tests.clients.programs.{client}_client"]
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=client_environment(server),
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        transcripts[client] = done.stdout.strip() + "\n"
        assert str(REPOSITORY) not in done.stdout
        return done.stdout

    return run
