"""Streams of real vLLM servers go on when one is killed. TANDEM_VLLM_PYTHON is a Python of an environment with it."""

from __future__ import annotations

import argparse
import asyncio
import os

import httpx
import pytest

from benchmarks.engines import routed
from benchmarks.stream_moves import kill_under_load
from tandem.cluster.model_store import DEFAULT_MODEL

VLLM_PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not VLLM_PYTHON, reason="TANDEM_VLLM_PYTHON is not set")
def test_streams_of_a_killed_server_go_on_with_the_same_text() -> None:
    settings = argparse.Namespace(vllm_python=VLLM_PYTHON, vllm_eager=True, model=DEFAULT_MODEL)
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
