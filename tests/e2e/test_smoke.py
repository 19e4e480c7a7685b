"""The whole product once: it serves, its answer survives `kill -9` of a worker, and nothing is left at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.server import HTTP, Server, begun_stream, started
from tests.support.waiting import until

NUM_TOKENS = 1600  # a worker that is killed at the first of them has not computed the last, however fast it is
BODY = {"prompt": "x" * 100, "max_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 9, "ignore_eos": True}


def text_of(events: Iterator[str]) -> str:
    """The text of a stream, up to its end."""
    data = [event.removeprefix("data: ") for event in events if event]
    assert data[-1] == "[DONE]", data[-1]
    return "".join(json.loads(one)["choices"][0]["text"] for one in data[:-1])


def is_idle(server: Server) -> bool:
    return bool(HTTP.post(f"{server.url}/v1/pools/check").json()["idle"])


@pytest.mark.timeout(400)
def test_an_answer_survives_the_kill_of_its_worker_token_for_token(text_model: Path, tmp_path: Path) -> None:
    with started(text_model, tmp_path, "--routing=cost,pairs", "--pool-bytes=20000000") as server:
        server.wait_ready()
        victim = server.worker("decode")
        with begun_stream(server.url, BODY | {"stream": True}) as events:
            psutil.Process(victim["pid"]).kill()
            text = text_of(events)
        server.wait_recovered(victim)
        assert 'tandem_request_moves_total{cause="worker_lost"}' in HTTP.get(f"{server.url}/metrics").text
        answer = HTTP.post(f"{server.url}/v1/completions", json=BODY).json()  # asked before, it would be drafted from
        assert (answer["usage"]["completion_tokens"], text) == (NUM_TOKENS, answer["choices"][0]["text"])
        until(lambda: is_idle(server), 30, lambda: server.output)
        assert server.stop() == 0
        assert "Traceback" not in server.output
