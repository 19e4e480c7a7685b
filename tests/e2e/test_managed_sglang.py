"""`tandem serve --engine sglang` with real Ray actors, in front of servers that keep SGLang's rules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.managed import ask, engines, flip, managed, process_of, roles
from tests.support.server import START_S, Server
from tests.support.waiting import until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def server(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = "--disaggregation-transfer-backend mooncake --enable-pd-role-switch"
    with managed(text_model, tmp_path_factory.mktemp("sglang"), "sglang", f"--engine-args={arguments}") as running:
        yield running


def test_a_pair_answers(server: Server) -> None:
    answer = ask(server)
    assert answer.json()["choices"][0]["text"] == "decode word word word "
    assert answer.headers["x-tandem-engine"].startswith("decode-")
    assert ask(server, stream=True).text.count("word") == 3
    assert engines(server)["prefill-0"]["num_requests"] == 2
    assert engines(server)["prefill-0"]["block_size"] == 16


def test_a_server_switches_its_mode_and_back(server: Server) -> None:
    refused = flip(server, "prefill-0", "decode")
    assert refused.status_code == 409
    assert "only prefill worker" in refused.json()["error"]["message"]
    assert flip(server, "decode-1", "prefill").status_code == 200
    assert roles(server) == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill"}
    assert flip(server, "prefill-0", "decode").status_code == 200  # now the other one computes prompts
    assert roles(server) == {"prefill-0": "decode", "decode-0": "decode", "decode-1": "prefill"}
    for _ in range(4):
        assert ask(server).json()["choices"][0]["text"] == "decode word word word "
    assert engines(server)["decode-1"]["num_requests"] >= 4
    assert flip(server, "decode-0", "prefill").status_code == 200
    assert flip(server, "decode-1", "decode").status_code == 200
    assert ask(server).status_code == 200


def test_a_killed_server_is_replaced_in_the_role_that_it_had(server: Server) -> None:
    before = roles(server)
    victim = next(name for name, role in before.items() if role == "prefill")
    url = engines(server)[victim]["url"]
    process = process_of(server, victim)
    process.kill()
    psutil.wait_procs([process], timeout=30)
    assert ask(server).status_code in (502, 503)  # there is no other prefill server
    until(lambda: engines(server).get(victim, {}).get("url", url) != url, START_S, lambda: server.output)
    until(lambda: roles(server) == before, START_S, lambda: server.output)
    assert ask(server).json()["choices"][0]["text"] == "decode word word word "


def test_at_the_end_nothing_is_left(server: Server) -> None:
    server.children()
    assert server.stop() == 0
