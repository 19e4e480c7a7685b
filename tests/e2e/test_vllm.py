"""A real vLLM server behind `tandem route`. Set TANDEM_VLLM_PYTHON to the Python of an environment with vLLM."""

from __future__ import annotations

import argparse
import os

import pytest

from tandem.protocol.config import DEFAULT_MODEL
from tests.support.vllm_servers import measure_answers, measure_turns, routed

VLLM_PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.skipif(not VLLM_PYTHON, reason="TANDEM_VLLM_PYTHON is not set")
def test_answers_are_vllms_own_and_the_index_knows_what_it_has_cached() -> None:
    settings = argparse.Namespace(vllm_python=VLLM_PYTHON, model=DEFAULT_MODEL)
    with routed(settings, ("a",)) as fleet:
        answers = measure_answers(fleet)
        assert answers["different"] == []
        assert answers["num_compared"] > 0
        turns = measure_turns(fleet, num_chats=2, num_turns=2)
    second = [turn for turn in turns if turn["turn"] == 2]
    assert all(turn["cached_tokens"] > 0 for turn in second)
    assert all(turn["expected_tokens"] == turn["cached_tokens"] for turn in second)
