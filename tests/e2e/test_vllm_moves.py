"""Streams of real vLLM servers go on when one is killed. Set TANDEM_VLLM_PYTHON to the Python of an environment with it."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from typing import Any

import httpx
import orjson
import psutil
import pytest

from benchmarks.engines import Fleet, routed
from tandem.cluster.model_store import DEFAULT_MODEL

VLLM_PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
NUM_STREAMS = 8
NUM_TOKENS = 96


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VLLM_PYTHON, reason="TANDEM_VLLM_PYTHON is not set")
def test_streams_of_a_killed_server_go_on_with_the_same_text() -> None:
    settings = argparse.Namespace(vllm_python=VLLM_PYTHON, vllm_eager=True, model=DEFAULT_MODEL)
    with routed(settings, ("a", "b")) as fleet:
        undisturbed = asyncio.run(run(fleet, victim=""))
        disturbed = asyncio.run(run(fleet, victim="a"))
        metrics = httpx.get(f"{fleet.router_url}/metrics").text
    moved = [line for line in metrics.splitlines() if line.startswith("tandem_request_moves_total{")]
    assert sum(float(line.split()[-1]) for line in moved) >= 1
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert after["error"] is None
        assert after["text"] == before["text"]
        assert after["usage"]["completion_tokens"] == before["usage"]["completion_tokens"]
        assert after["usage"]["prompt_tokens"] == before["usage"]["prompt_tokens"]
        assert after["finish_reason"] == before["finish_reason"]
        assert len(after["ids"]) == 1


async def run(fleet: Fleet, *, victim: str) -> list[dict[str, Any]]:
    """What the clients saw. The victim is killed once each stream has shown a part of its answer."""
    started = [asyncio.Event() for _ in range(NUM_STREAMS)]
    async with httpx.AsyncClient(base_url=fleet.router_url, timeout=300) as client:
        streams = [asyncio.create_task(one_stream(client, fleet.model, i, started[i])) for i in range(NUM_STREAMS)]
        await asyncio.gather(*(event.wait() for event in started))
        if victim:
            server = psutil.Process(fleet.pids[victim])
            for process in [server, *server.children(recursive=True)]:
                process.send_signal(signal.SIGKILL)
        return await asyncio.gather(*streams)


async def one_stream(client: httpx.AsyncClient, model: str, number: int, started: asyncio.Event) -> dict[str, Any]:
    """A greedy stream: half of them are chats, and half have a stop string that never comes."""
    text = f"Tell a story about {number} boats, with emojis and umlauts: ä, ö, 🙂."
    body: dict[str, Any] = {"model": model, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "min_tokens": 0 if number % 4 < 2 else NUM_TOKENS}
    body |= {"stop": ["never to be seen"]} if number % 4 < 2 else {}
    is_chat = number % 2 == 0
    body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    seen: dict[str, Any] = {"text": "", "usage": None, "finish_reason": None, "error": None, "ids": set()}
    num_pieces = 0
    async with client.stream("POST", f"/v1/{'chat/' * is_chat}completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                seen["error"] = event["error"]
                started.set()
                continue
            seen["ids"].add(event["id"])
            seen["usage"] = event.get("usage") or seen["usage"]
            for choice in event["choices"]:
                seen["text"] += choice["delta"].get("content") or "" if is_chat else choice["text"]
                seen["finish_reason"] = choice["finish_reason"] or seen["finish_reason"]
            num_pieces += 1
            if num_pieces == 10:
                started.set()
    started.set()
    return seen
