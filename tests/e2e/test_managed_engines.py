"""`tandem serve --engine vllm` with real Ray actors, in front of servers that only look like vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.managed import ask, engines, flip, managed, process_of, roles
from tests.support.server import HTTP, START_S, Server
from tests.support.waiting import until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def server(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("managed")
    flags = [f"--engine-log-folder={folder}", "--routing=cost,pairs"]
    with managed(text_model, folder, "vllm", *flags) as running:
        yield running


def test_a_pair_answers(server: Server) -> None:
    answer = ask(server)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "word word word "
    assert answer.headers["x-tandem-engine"].startswith("decode-")
    assert engines(server)["prefill-0"]["num_requests"] == 1


def test_a_server_flips_and_back(server: Server) -> None:
    record = flip(server, "decode-1", "prefill").json()
    assert (record["worker"], record["from"], record["to"]) == ("decode-1", "decode", "prefill")
    assert record["serving_after_s"] >= 0
    assert roles(server) == {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "prefill"}
    refused = flip(server, "decode-0", "prefill")
    assert refused.status_code == 409
    assert "only decode worker" in refused.json()["error"]["message"]
    assert flip(server, "nobody", "prefill").status_code == 404
    assert flip(server, "prefill-0", "both").status_code == 400
    assert ask(server).headers["x-tandem-engine"] == "decode-0"
    assert flip(server, "decode-1", "decode").status_code == 200
    flips = HTTP.get(f"{server.url}/v1/pools").json()["autoscaler"]["flips"]
    assert [one["worker"] for one in flips] == ["decode-1", "decode-1"]


def test_a_killed_server_and_a_killed_actor_are_replaced(server: Server) -> None:
    for victim, kills_actor in (("decode-0", False), ("prefill-0", True)):
        url, process = engines(server)[victim]["url"], process_of(server, victim)
        tree = [process, *process.children(recursive=True)]
        assert len(tree) > 1
        (process.parent() if kills_actor else process).kill()  # type: ignore[union-attr]
        _, alive = psutil.wait_procs(tree, timeout=30)
        assert not alive, "a part of the server is left"
        assert ask(server).status_code in (200, 502, 503)
        until(lambda: engines(server).get(victim, {}).get("url", url) != url, START_S, lambda: server.output)  # noqa: B023
        until(lambda: len(roles(server)) == 3, START_S, lambda: server.output)
        assert ask(server).status_code == 200


def test_without_decode_servers_a_prefill_server_answers_until_one_is_back(server: Server) -> None:
    victims = [process_of(server, name) for name in ("decode-0", "decode-1")]
    for victim in victims:
        victim.kill()
    until(lambda: "decode" in roles(server).values() and "prefill-0" in roles(server), START_S, lambda: server.output)
    until(lambda: ask(server).status_code == 200, START_S, lambda: server.output)
    back = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    until(lambda: roles(server) == back, START_S, lambda: f"{roles(server)} {server.output}")
    flips = HTTP.get(f"{server.url}/v1/pools").json()["autoscaler"]["flips"]
    assert [(one["worker"], one["to"]) for one in flips[-2:]] == [("prefill-0", "decode"), ("prefill-0", "prefill")]


def test_at_the_end_nothing_is_left(server: Server) -> None:
    server.children()
    assert server.stop() == 0
