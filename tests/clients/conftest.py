"""A server with the default model and an API key, and the environment of the clients."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tandem.cluster.model_store import resolve_model, served_name
from tandem.protocol.config import DEFAULT_MODEL
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

<!-- Written by `make test-clients TANDEM_CLIENTS=docs/clients.md`. -->

What was run against a `tandem serve` with one prefill and one decode worker and an API key. The same target runs an
lm-eval task through the server and through plain transformers, which must have the same score, and schemathesis on
the OpenAPI documents of `tandem serve` and `tandem route`. [use_it_with.md](use_it_with.md) has the settings of each
program.

## Libraries

Programs as users of client libraries write them, with the default model in float32. Each step fails the run if its
assertions do. The programs are in `tests/clients/programs`: copy from them.

| Library | Version | Program | Steps |
|---|---|---|---|
"""

AGENTS_INTRODUCTION = """
## Agents

Each program ran as its users start it, from its package. A proxy between it and the server sets `tool_choice` in the
first request that offers the tool named here, to a call that reads a file, because a model small enough for tests
calls no tools by itself. A program passes if it ran the tool and sent the result, each of its requests was answered
with 2xx, it showed the answer and ended with exit code 0, and it asked other hosts for nothing but what is named.
"Tokens" are those of its longest prompt, by SmolLM2's tokenizer; "session" is what names its conversation
([tiers.md](tiers.md#pinning-and-sessions)); "ignored" are the fields that `x-tandem-ignored` named.

| Program | Version | API | What was tried | Requests | Tokens | Session | Result | Ignored | Asks other hosts for |
|---|---|---|---|---:|---:|---|---|---|---|
"""

RunProgram = Callable[[str], str]


class ClientPage:
    """The libraries and agents that passed in this run, each a row of a table of docs/clients.md."""

    def __init__(self) -> None:
        self._libraries: dict[str, str] = {}
        self._agents: dict[Agent, str] = {}

    def add_library(self, client: str, output: str) -> None:
        """Enter a library, from what its program printed: its name and version, and the title of each step."""
        (heading,) = re.findall(r"^## (.+)$", output, flags=re.MULTILINE)
        name, _, version = heading.rpartition(" ")
        steps = "; ".join(re.findall(r"^### (.+)$", output, flags=re.MULTILINE))
        self._libraries[client] = f"| {name} | {version} | `tests/clients/programs/{client}_client.py` | {steps} |"

    def add_agent(self, agent: Agent, proxy: ForcingProxy) -> None:
        """Enter an agent."""
        ignored = ", ".join(f"`{name}`" for name in proxy.ignored)
        sessions = ", ".join(f"`{name}`" for name in {one.session: None for one in proxy.exchanges} if name)
        tokens = max(exchange.num_prompt_tokens for exchange in proxy.exchanges)
        numbers = [f"{len(proxy.exchanges)}", f"{tokens:,}" if tokens else ""]
        tried = [agent.name, installed_version(agent), agent.api, agent.tried]
        self._agents[agent] = f"| {' | '.join([*tried, *numbers, sessions, 'passed', ignored, agent.asks_elsewhere])} |"

    def text(self) -> str:
        """The page, if all libraries and agents are in it; otherwise empty."""
        if set(CLIENTS) - self._libraries.keys() or set(AGENTS) - self._agents.keys():
            return ""
        libraries = "".join(f"{self._libraries[client]}\n" for client in CLIENTS)
        return INTRODUCTION + libraries + AGENTS_INTRODUCTION + "".join(f"{self._agents[agent]}\n" for agent in AGENTS)


@pytest.fixture(scope="session")
def client_page() -> Iterator[ClientPage]:
    """The page of this run. It becomes the file that TANDEM_CLIENTS names."""
    page = ClientPage()
    yield page
    path = os.environ.get("TANDEM_CLIENTS")
    if path and (text := page.text()):
        Path(path).write_text(text)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    skip = pytest.mark.skip(reason=f"{PYTHON} is missing: run scripts/clients.sh, as `make test-clients` does")
    for item in items:
        is_library = item.get_closest_marker("clients") is not None and "agent_server" not in item.fixturenames
        if is_library and not PYTHON.exists():
            item.add_marker(skip)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    keys = folder / "keys.json"
    make_key_file(keys, {KEY: "clients"})
    flags = ("--routing=cost,pairs", "--dtype", "float32", "--api-key-file", str(keys))
    with started(resolve_model(DEFAULT_MODEL), folder, *flags) as server:
        yield server.wait_ready()


def client_environment(server: Server) -> Mapping[str, str]:
    """Where a program finds the server. It sees no part of Tandem's environment."""
    others = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    told = {"TANDEM_URL": server.url, "TANDEM_KEY": KEY, "TANDEM_MODEL": served_name(str(resolve_model(DEFAULT_MODEL)))}
    return others | told | {"NO_PROXY": "*", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def run_program(server: Server, client_page: ClientPage) -> RunProgram:
    """Runs a client's program against the server, enters it in the page, and returns what it printed."""

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
        client_page.add_library(client, done.stdout)
        return done.stdout

    return run
