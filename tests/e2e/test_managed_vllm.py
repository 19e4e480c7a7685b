"""Real vLLM servers as workers. Set TANDEM_VLLM_PYTHON to the Python of an environment with vLLM (make engine-vllm)."""

from __future__ import annotations

import argparse
import os

import pytest

from benchmarks.engines import measure_answers, measure_turns
from benchmarks.managed_engines import managed, measure_flip, measure_kills
from tandem.cluster.model_store import DEFAULT_MODEL

VLLM_PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not VLLM_PYTHON, reason="TANDEM_VLLM_PYTHON is not set")
def test_a_managed_pair_answers_flips_and_survives_kills() -> None:
    settings = argparse.Namespace(vllm_python=VLLM_PYTHON, vllm_eager=True, model=DEFAULT_MODEL)
    with managed(settings) as fleet:
        answers = measure_answers(fleet)
        assert answers["num_compared"] > 0
        # vLLM computes a long prompt in other pieces on two servers, so a token may differ where two are about equal.
        assert len(answers["different"]) <= answers["num_compared"] // 4
        turns = measure_turns(fleet, num_chats=2, num_turns=2)
        assert all(turn["expected_tokens"] == turn["cached_tokens"] for turn in turns)
        flip = measure_flip(fleet)
        assert (flip["load"]["num_broken"], flip["load"]["num_refused"]) == (0, 0)
        assert [one["to"] for one in flip["flips"]] == ["decode", "prefill"]
        for killed in measure_kills(fleet).values():
            assert killed["num_left"] == 0
            assert killed["load"]["num_refused"] == 0
