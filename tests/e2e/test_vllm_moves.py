"""Streams of real vLLM servers go on when one is killed. TANDEM_VLLM_PYTHON is a Python of an environment with it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from tandem.protocol.config import DEFAULT_MODEL
from tests.support.vllm_servers import Fleet, routed

VLLM_PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
STORY = "Tell a story about {} boats, with emojis and umlauts: ä, ö, 🙂."


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VLLM_PYTHON, reason="TANDEM_VLLM_PYTHON is not set")
def test_streams_of_a_killed_server_go_on_with_the_same_text() -> None:
    settings = argparse.Namespace(vllm_python=VLLM_PYTHON, model=DEFAULT_MODEL)
    with routed(settings, ("a", "b")) as fleet:
        before = asyncio.run(kill_under_load(fleet, 8, 96))
        after = asyncio.run(kill_under_load(fleet, 8, 96, victim="a"))
        metrics = httpx.get(f"{fleet.router_url}/metrics").text
    moved = [line for line in metrics.splitlines() if line.startswith("tandem_request_moves_total{")]
    assert sum(float(line.split()[-1]) for line in moved) >= 1
    assert [seen.error for seen in after] == [None] * 8
    assert all(len(seen.ids) == 1 for seen in after)
    assert [seen.usage for seen in after] == [seen.usage for seen in before]
    assert [seen.text for seen in after] == [seen.text for seen in before]


@dataclass
class Seen:
    """What the client of one stream saw."""

    text: str = ""
    usage: tuple[int, int] = (0, 0)  # prompt, answer
    error: dict[str, Any] | None = None
    ids: set[str] = field(default_factory=set)
    num_events: int = 0


async def kill_under_load(fleet: Fleet, num_streams: int, num_tokens: int, *, victim: str = "") -> list[Seen]:
    """What the clients saw. The victim is killed once each stream has shown a part of its answer."""
    started = [asyncio.Event() for _ in range(num_streams)]
    seen = [Seen() for _ in range(num_streams)]
    async with httpx.AsyncClient(base_url=fleet.router_url, timeout=300) as client:
        streams = [
            asyncio.create_task(read_stream(client, fleet.model, i, num_tokens, seen[i], started[i]))
            for i in range(num_streams)
        ]
        await asyncio.gather(*(event.wait() for event in started))
        if victim:
            server = psutil.Process(fleet.pids[victim])
            for process in [*server.children(recursive=True), server]:
                process.send_signal(signal.SIGKILL)
        await asyncio.gather(*streams)
    return seen


async def read_stream(
    client: httpx.AsyncClient, model: str, number: int, num_tokens: int, seen: Seen, started: asyncio.Event
) -> None:
    """A greedy stream: half of them are chats, and half have a stop string that never comes."""
    text = STORY.format(number)
    body: dict[str, Any] = {"model": model, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    body |= {"stop": ["never to be seen"]} if number % 4 < 2 else {"min_tokens": num_tokens}
    body |= {"messages": [{"role": "user", "content": text}]} if number % 2 else {"prompt": text}
    body |= {"stream_options": {"include_usage": True}}
    async with client.stream("POST", f"/v1/{'chat/' * (number % 2)}completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                note(seen, json.loads(line[6:]))
            if seen.num_events == min(10, num_tokens // 2):
                started.set()
    started.set()


def note(seen: Seen, event: dict[str, Any]) -> None:
    seen.num_events += 1
    seen.error = seen.error or event.get("error")
    if "id" in event:
        seen.ids.add(event["id"])
    if usage := event.get("usage"):
        seen.usage = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in event.get("choices", ()):
        seen.text += (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
