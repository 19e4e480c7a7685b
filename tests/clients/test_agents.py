"""Real agents against a real server: each asks, runs the tool that the model was made to call, and ends with a text.

The server has a model with room for their prompts (`tests/support/terse_llama.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cluster.model_store import resolve_model
from tandem.protocol.config import DEFAULT_MODEL
from tests.clients.agents import AGENTS, FOLDER, SECRET, Agent, Place, run_agent
from tests.clients.conftest import KEY, ClientPage
from tests.clients.forcing_proxy import ForcingProxy, forcing_proxy
from tests.support.keys import make_key_file
from tests.support.server import Server, started
from tests.support.terse_llama import ANSWER_TEXT, save_terse_model

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

MODEL = "terse"


@pytest.fixture(scope="module")
def agent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not (FOLDER / "packages.txt").exists():
        pytest.skip(f"{FOLDER} is missing: run scripts/agents.sh, as `make test-clients` does")
    folder = tmp_path_factory.mktemp("agents")
    make_key_file(folder / "keys.json", {KEY: "agents"})
    model = save_terse_model(folder / MODEL, Path(resolve_model(DEFAULT_MODEL)))
    flags = ("--routing=cost,pairs", "--dtype", "float32", "--api-key-file", str(folder / "keys.json"))
    with started(model, folder, *flags) as server:
        yield server.wait_ready()


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: f"{agent.name}, {agent.api}")
def test_an_agent_calls_a_tool(agent: Agent, agent_server: Server, tmp_path: Path, client_page: ClientPage) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    with forcing_proxy(agent_server.url) as proxy:
        place = Place(home=home, work=work, url=proxy.base_url, model=MODEL, key=KEY)
        proxy.call = agent.call(place)
        finished = run_agent(agent, place)
    answered = [(exchange.path, exchange.status, exchange.error) for exchange in proxy.exchanges]
    told = f"{answered}\n{finished.output[-3000:]}\n{finished.errors[-3000:]}"
    assert finished.code == 0, told
    assert ANSWER_TEXT in finished.output, told
    assert answered, told
    assert all(200 <= status < 300 for _, status, _ in answered), told
    if proxy.call is not None:
        check_loop(proxy, told)
    assert agent.asks_elsewhere or not proxy.elsewhere, proxy.elsewhere
    client_page.add_agent(agent, proxy)


def check_loop(proxy: ForcingProxy, told: str) -> None:
    """One request was made to call the tool; its result, with the file's text, came with a later one."""
    assert sum(exchange.was_forced for exchange in proxy.exchanges) == 1, told
    assert proxy.num_told(SECRET) >= 1, told
