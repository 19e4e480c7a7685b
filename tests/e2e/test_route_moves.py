"""`tandem route` in front of two clusters of `tandem serve`: the streams of one that is killed go on on the other."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from benchmarks.common import free_port, launched
from tests.support.engines_harness import CHAT, COMPLETIONS
from tests.support.server import started
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(500)]

FLAGS = ("--colocated", "--pool-bytes", "20000000")
NUM_STREAMS = 8


def test_streams_of_a_killed_cluster_go_on_with_the_same_text(text_model: Path, tmp_path: Path) -> None:
    with started(text_model, tmp_path, *FLAGS) as one, started(text_model, tmp_path, *FLAGS) as two:
        servers = {"a": one.wait_ready(), "b": two.wait_ready()}
        body = {"model": "tiny", "prompt": "abcdefghijklmnopqrstuvwxyz ", "add_special_tokens": False}
        letters = httpx.post(f"{one.url}/tokenize", json=body).json()["tokens"]
        engines = tmp_path / "engines.toml"
        engines.write_text("".join(f'[[engines]]\nname = "{name}"\nurl = "{s.url}"\n' for name, s in servers.items()))
        url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "tandem", "route", f"--engines={engines}", f"--port={port}"]
        with launched([*command, "--router-processes=2"], ready=f"{url}/ready"):
            until(lambda: [e["state"] for e in httpx.get(f"{url}/v1/pools").json()["engines"]] == ["ready"] * 2)
            before = asyncio.run(run(url, letters))
            killed: list[str] = []

            def kill(engine: str) -> None:
                if not killed:
                    killed.append(engine)
                    servers[engine].process.send_signal(signal.SIGKILL)

            after = asyncio.run(run(url, letters, kill))
            assert killed
            assert after == before
            metrics = httpx.get(f"{url}/metrics").text
    moves = [line for line in metrics.splitlines() if line.startswith("tandem_request_moves_total{")]
    assert sum(float(line.split()[-1]) for line in moves) >= 1


async def run(url: str, letters: list[int], kill: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """What the clients of some streams saw. `kill` is called with the engine of each one in its middle."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return await asyncio.gather(*(one_stream(client, letters, number, kill) for number in range(NUM_STREAMS)))


async def one_stream(
    client: httpx.AsyncClient, letters: list[int], number: int, kill: Callable[[str], None]
) -> dict[str, Any]:
    """A greedy stream of letters: what a random model writes is often no whole character."""
    is_chat, text = number % 2 == 0, f"number {number}"
    body: dict[str, Any] = {"max_tokens": 150, "temperature": 0, "stream": True, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    body |= {"logit_bias": {str(i): 100 for i in letters}, "stream_options": {"include_usage": True}}
    body |= {"repetition_penalty": 1.5, "stop": "no such text"}
    seen: dict[str, Any] = {"text": "", "usage": None, "finish_reason": None, "error": None}
    num_pieces = 0
    async with client.stream("POST", CHAT if is_chat else COMPLETIONS, json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = msgspec.json.decode(line[6:])
            seen["error"] = seen["error"] or event.get("error")
            if usage := event.get("usage"):
                seen["usage"] = usage["prompt_tokens"], usage["completion_tokens"]
            for choice in event.get("choices", ()):
                seen["text"] += choice["delta"].get("content") or "" if is_chat else choice["text"]
                seen["finish_reason"] = choice["finish_reason"] or seen["finish_reason"]
            num_pieces += 1
            if num_pieces == 30:
                kill(response.headers["x-tandem-engine"])
    return seen
