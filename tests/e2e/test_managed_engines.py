"""`tandem serve --engine vllm` with real Ray actors, in front of servers that only look like vLLM's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.fake_vllm import fake_engine_python
from tests.support.server import START_S, Server, started, until

BODY: dict[str, Any] = {"model": "toy", "prompt": "a b c " * 40, "max_tokens": 3, "stream": False}
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def server(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("managed")
    python = fake_engine_python(folder)
    flags = ["--engine=vllm", f"--engine-python={python}", "--served-model-name=toy", "--no-autoscale"]
    flags += [
        "--prefill=1",
        "--decode=2",
        "--cpus-per-worker=0.1",
        f"--engine-log-folder={folder}",
        "--no-local-prefill",
    ]
    with started(text_model, folder, *flags) as running:
        yield running.wait_ready()


def engines(server: Server) -> dict[str, dict[str, Any]]:
    pools = httpx.get(f"{server.url}/v1/pools", timeout=TIMEOUT_S).json()
    return {engine["name"]: engine for engine in pools["engines"]}


def roles(server: Server) -> dict[str, str]:
    return {name: engine["role"] for name, engine in engines(server).items() if engine["state"] == "ready"}


def ask(server: Server) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=TIMEOUT_S)


def flip(server: Server, worker: str, role: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/pools/roles", json={"worker": worker, "role": role}, timeout=TIMEOUT_S)


def process_of(server: Server, engine: str) -> psutil.Process:
    """The server process behind an engine's URL."""
    port = engines(server)[engine]["url"].rpartition(":")[2]
    return next(one for one in server.children() if one.is_running() and port in one.cmdline())


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
    flips = httpx.get(f"{server.url}/v1/pools", timeout=TIMEOUT_S).json()["autoscaler"]["flips"]
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
    flips = httpx.get(f"{server.url}/v1/pools", timeout=TIMEOUT_S).json()["autoscaler"]["flips"]
    assert [(one["worker"], one["to"]) for one in flips[-2:]] == [("prefill-0", "decode"), ("prefill-0", "prefill")]


def test_at_the_end_nothing_is_left(server: Server) -> None:
    server.children()
    assert server.stop() == 0
