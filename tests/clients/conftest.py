"""A server with the default model and an API key, and the environment of the clients."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tandem.cluster.model_store import DEFAULT_MODEL, resolve_model, served_name
from tests.clients.agents import AGENTS, Agent, installed_version
from tests.clients.forcing_proxy import ForcingProxy
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
and `tandem route` ([benchmarks.md](benchmarks.md#clients-and-the-api)).
"""

TABLE_INTRODUCTION = """\
# Programs that were run against Tandem

<!-- Written by `make test-clients TANDEM_TRANSCRIPTS=docs/clients.md`. -->

Each program ran as its users start it, from its package, against a `tandem serve` with one prefill and one decode
worker and an API key; [use_it_with.md](use_it_with.md) has the settings. A proxy between them sets `tool_choice` in the
first request that offers the tool named here, to a call that reads a file, because a model small enough for tests calls
no tools by itself. A program passes if it ran the tool and sent the result, each of its requests was answered with 2xx,
it showed the answer and ended with exit code 0, and it asked other hosts for nothing but what is named. "Tokens" are
those of its longest prompt, by SmolLM2's tokenizer; "session" is what names its conversation
([tiers.md](tiers.md#pinning-and-sessions)); "ignored" are the fields that `x-tandem-ignored` named.

| Program | Version | API | What was tried | Requests | Tokens | Session | Result | Ignored | Asks other hosts for |
|---|---|---|---|---:|---:|---|---|---|---|
"""

RunProgram = Callable[[str], str]


class ClientTable:
    """The agents that passed in this run, each a row of a table."""

    def __init__(self) -> None:
        self._rows: dict[Agent, str] = {}

    def add(self, agent: Agent, proxy: ForcingProxy) -> None:
        """Enter one that passed."""
        ignored = ", ".join(f"`{name}`" for name in proxy.ignored)
        sessions = ", ".join(f"`{name}`" for name in {one.session: None for one in proxy.exchanges} if name)
        tokens = max(exchange.num_prompt_tokens for exchange in proxy.exchanges)
        numbers = [f"{len(proxy.exchanges)}", f"{tokens:,}" if tokens else ""]
        tried = [agent.name, installed_version(agent), agent.api, agent.tried]
        self._rows[agent] = f"| {' | '.join([*tried, *numbers, sessions, 'passed', ignored, agent.asks_elsewhere])} |"

    def text(self) -> str:
        """The table, if all agents are in it; otherwise empty."""
        missing = set(AGENTS) - self._rows.keys()
        return "" if missing else TABLE_INTRODUCTION + "".join(f"{self._rows[agent]}\n" for agent in AGENTS)


@pytest.fixture(scope="session")
def client_table() -> Iterator[ClientTable]:
    """The table of this run. It becomes client_table.md beside the file that TANDEM_TRANSCRIPTS names."""
    table = ClientTable()
    yield table
    path = os.environ.get("TANDEM_TRANSCRIPTS")
    if path and (text := table.text()):
        Path(path).with_name("client_table.md").write_text(text)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    skip = pytest.mark.skip(reason=f"{PYTHON} is missing: run scripts/clients.sh, as `make test-clients` does")
    for item in items:
        is_library = item.get_closest_marker("clients") is not None and "client_table" not in item.fixturenames
        if is_library and not PYTHON.exists():
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
