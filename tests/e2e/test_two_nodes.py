"""`tandem serve --ray-address` on a cluster whose prefill and decode worker run on different nodes.

The nodes are two raylets beside the head, each at an address of its own, with its own cores and home folder. UCX may
only use TCP, as between two machines.
"""

from __future__ import annotations

import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tandem.protocol.config import cache_folder
from tandem.text.tokenizer import Tokenizer
from tests.support.cluster_harness import Oracle
from tests.support.ray_nodes import JOIN, RayNode, ray_cluster
from tests.support.server import HTTP, START_S, Server, started
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

HEAD, *NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
# The cache has the compiled kernels, which would take each node ten seconds.
ENVIRONMENT = {"TANDEM_CACHE": str(cache_folder()), "UCX_TLS": "tcp"}
SMALL = ("--pool-bytes", "20000000")
MAX_TOKENS = 12
PROMPTS = [f"{number} bottles of beer on the wall, " * 12 for number in range(4)]


@pytest.fixture(scope="module")
def nodes(text_model: Path) -> Iterator[list[RayNode]]:
    """The head, which has no cores for workers, and two nodes with one core each; the model is in each home folder."""
    with ray_cluster(HEAD, *NODES, head_cpus=0, env=ENVIRONMENT) as nodes:
        for node in nodes:
            shutil.copytree(text_model, node.home / "m")
        yield nodes


@contextmanager
def serving(nodes: list[RayNode], folder: Path, *flags: str, model: str = "~/m") -> Iterator[Server]:
    flags = ("--ray-address", nodes[0].address, "--cpus-per-worker", "1", *SMALL, *flags)
    with started(model, folder, *flags, env=JOIN | ENVIRONMENT | {"HOME": str(nodes[0].home)}) as server:
        yield server


def ask(server: Server, prompt: str) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    return HTTP.post(f"{server.url}/v1/completions", json=body)


def answers(server: Server) -> list[str]:
    responses = [ask(server, prompt) for prompt in PROMPTS]
    assert [response.status_code for response in responses] == [200] * len(PROMPTS), [r.text for r in responses]
    return [response.json()["choices"][0]["text"] for response in responses]


def hosts(server: Server) -> set[str]:
    """Where the workers of both roles get requests; "" for a role whose worker is gone or still flips."""
    workers = [server.worker(role) for role in ("prefill", "decode")]
    return {worker["host"] if worker.get("state") == "ready" else "" for worker in workers}


def num_handoffs(server: Server) -> int:
    return int(HTTP.get(f"{server.url}/v1/pools").json()["num_handoffs"])


def oracle_answers(model: Path) -> list[str]:
    """What one engine alone answers."""
    oracle, tokenizer = Oracle(model), Tokenizer(str(model))
    answered = [oracle.answer(tokenizer.encode(prompt), max_tokens=MAX_TOKENS) for prompt in PROMPTS]
    return [tokenizer.decode(token_ids, skip_special_tokens=True) for token_ids in answered]


@pytest.mark.slow  # a minute
def test_two_nodes_answer_as_one_engine_through_deaths(nodes: list[RayNode], text_model: Path, tmp_path: Path) -> None:
    expected = oracle_answers(text_model)
    with serving(nodes, tmp_path, "--routing=cost,pairs", "--disk-cache-path=~/kv") as server:
        assert answers(server.wait_ready()) == expected
        assert (hosts(server), num_handoffs(server)) == (set(NODES), len(PROMPTS))
        assert [(node.home / "kv").is_dir() for node in nodes] == [False, True, True]
        workers = [psutil.Process(server.worker(role)["pid"]) for role in ("prefill", "decode")]
        server.process.kill()
        server.process.wait()
        with serving(nodes, tmp_path, "--routing=cost,pairs") as new:
            assert answers(new.wait_ready()) == expected
            assert (hosts(new), num_handoffs(new)) == (set(NODES), len(PROMPTS))
            assert not psutil.wait_procs(workers, timeout=30)[1], "the new server starts workers in another way"
            a_node_dies_and_comes_back(new, nodes, text_model, expected)
            assert new.stop(signal.SIGTERM) == 0


def a_node_dies_and_comes_back(server: Server, nodes: list[RayNode], model: Path, expected: list[str]) -> None:
    """A stream goes on where it was, and clients get answers of the survivor, then of both nodes."""
    [number] = [i for i, node in enumerate(nodes) if node.ip == server.worker("decode")["host"]]
    body = {"prompt": "tell me", "max_tokens": 1500, "temperature": 0, "stream": True, "ignore_eos": True}
    events: list[str] = []
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
        for line in stream.iter_lines():
            if not events:
                threading.Thread(target=nodes[number].kill).start()
            events += [line] if line else []
    assert events[-1] == "data: [DONE]"
    assert not any('"error"' in event for event in events), events
    until(lambda: ask(server, PROMPTS[0]).status_code == 200, START_S, lambda: server.output)
    assert answers(server) == expected
    assert hosts(server) == {"", server.worker("decode")["host"]} == {"", *NODES} - {nodes[number].ip}
    nodes[number] = RayNode(nodes[number].ip, head=nodes[0].address, num_cpus=1, env=ENVIRONMENT)
    shutil.copytree(model, nodes[number].home / "m")
    until(lambda: hosts(server) == set(NODES), START_S, lambda: server.output)
    before = num_handoffs(server)
    assert answers(server) == expected
    assert num_handoffs(server) == before + len(PROMPTS)
    assert "did not start" not in server.output, "a node's death is one death of its worker"


def test_a_folder_that_a_node_lacks_is_reported_with_the_node(
    nodes: list[RayNode], text_model: Path, tmp_path: Path
) -> None:
    for node in nodes[:2]:
        shutil.copytree(text_model, node.home / "rare")
    with serving(nodes, tmp_path, model="~/rare") as server:
        assert server.process.wait(START_S) == 2
    last = server.output.strip().splitlines()[-1]
    assert f" did not start: on node {NODES[1]}: model folder ~/rare does not exist" in last, server.output
