"""Chats that come back to real vLLM servers with tiers: vLLM's own scheduler, with a worker that copies by numpy.

Set TANDEM_VLLM_PYTHON to the Python of an environment with vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from tandem.cluster.engines import vllm
from tandem.protocol.config import DEFAULT_MODEL
from tests.support.managed import engine_server
from tests.support.vllm_servers import STORY, Fleet, routed

VLLM_PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
SETTINGS = argparse.Namespace(vllm_python=VLLM_PYTHON, model=DEFAULT_MODEL)
NUM_CHATS, NUM_TURNS = 8, 6
# Two pools of 1,216 tokens have a third of the chats' KV.
SMALL_POOL = ["--block-size", "32", "--num-gpu-blocks-override", "38", "--max-model-len", "1100"]
SPEC = Path(__file__).parents[1] / "support" / "vllm_spec"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not VLLM_PYTHON, reason="TANDEM_VLLM_PYTHON is not set"),
]


def tier_flags(folder: Path | None, host_gb: float) -> list[str]:
    """As `tandem serve` renders them, with the copying worker instead of the one that needs a GPU."""
    server = engine_server(
        num_gpus=1.0,
        is_disaggregated=False,
        host_cache_bytes=round(host_gb * 1e9),
        disk_cache_path=str(folder) if folder else "",
    )
    connector: dict[str, Any] = vllm._offloading(server)
    connector["kv_connector_extra_config"] |= {"spec_name": "NumpySpec", "spec_module_path": "numpy_spec"}
    return ["--kv-transfer-config", json.dumps(connector)]


def chat_turns(fleet: Fleet) -> list[dict[str, Any]]:
    """Every chat takes its turn, in another order each time: what it found, was expected to find, and its TTFT."""
    messages: list[list[dict[str, str]]] = [[] for _ in range(NUM_CHATS)]
    turns, rng = [], random.Random(1)
    with httpx.Client(timeout=120.0, trust_env=False) as client:
        order = [(turn, chat) for turn in range(NUM_TURNS) for chat in rng.sample(range(NUM_CHATS), NUM_CHATS)]
        for turn, chat in order:
            question = "".join(STORY.format(f"{chat}-{turn}-{i}") for i in range(4)) + "What came next?"
            messages[chat].append({"role": "user", "content": question})
            body = {"model": fleet.model, "messages": messages[chat], "max_tokens": 16, "temperature": 0}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            turns.append({"turn": turn, "chat": chat, **_stream(client, fleet, body, messages[chat])})
    return turns


def _stream(client: httpx.Client, fleet: Fleet, body: dict[str, Any], messages: list[dict[str, str]]) -> dict[str, Any]:
    began_s, ttft_s, text, usage = time.monotonic(), 0.0, "", {}
    with client.stream("POST", f"{fleet.router_url}/v1/chat/completions", json=body) as response:
        request_id = response.raise_for_status().headers["x-request-id"]
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if event["choices"] and (part := event["choices"][0]["delta"].get("content")):
                ttft_s = ttft_s or time.monotonic() - began_s
                text += part
    messages.append({"role": "assistant", "content": text})
    # A stream whose first token is late has no headers about its engine.
    decisions = client.get(f"{fleet.router_url}/v1/route/decisions").raise_for_status().json()["data"]
    [chosen] = [one["placement"]["candidates"][0] for one in decisions if one["request_id"] == request_id]
    return {
        "ttft_s": ttft_s,
        "engine": chosen["decode_worker"],
        "tier": chosen["kv_tier"] or "",
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
        "expected_tokens": chosen["num_cached_tokens"],
    }


def summary(fleet: Fleet, turns: list[dict[str, Any]]) -> dict[str, Any]:
    engines = httpx.get(f"{fleet.router_url}/v1/pools", trust_env=False, timeout=10.0).json()["engines"]
    found = {
        "num_kv_tokens": sum(one["prompt_tokens"] for one in turns[-NUM_CHATS:]),
        "hit_ratio": sum(one["cached_tokens"] for one in turns) / sum(one["prompt_tokens"] for one in turns),
        "exact": sum(one["expected_tokens"] == one["cached_tokens"] for one in turns) / len(turns),
        "ttft_p50_s": median(one["ttft_s"] for one in turns),
        "tiers": sorted({one["tier"] for one in turns}),
        "by_engine": [[(tier["name"], tier["num_blocks"], tier["num_hits"]) for tier in e["tiers"]] for e in engines],
        "block_s": [[tier["block_s"] for tier in engine["tiers"]] for engine in engines],
    }
    print(json.dumps(found))
    return found


def measured(flags: list[str]) -> dict[str, Any]:
    environment = {"PYTHONPATH": str(SPEC)}
    with routed(SETTINGS, ("a", "b"), flags=[*SMALL_POOL, *flags], more_env=environment) as fleet:
        turns = chat_turns(fleet)
        return summary(fleet, turns)


def test_without_tiers_chats_come_back_to_little() -> None:
    found = measured([])
    assert found["hit_ratio"] <= 0.3, found
    assert found["tiers"] == [""]


def test_chats_come_back_to_host_memory() -> None:
    found = measured(tier_flags(None, 0.5))
    assert found["hit_ratio"] >= 0.7, found
    assert found["exact"] >= 0.95, found
    assert "host" in found["tiers"], found


def test_chats_come_back_to_a_disk_behind_little_host_memory(tmp_path: Path) -> None:
    found = measured(tier_flags(tmp_path, 0.04))  # 54 blocks
    assert found["hit_ratio"] >= 0.7, found
    assert "disk" in found["tiers"], found
