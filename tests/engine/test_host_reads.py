"""A forward and the scoring of prompts wait for nothing: they read no value of a tensor on the host."""

from __future__ import annotations

import pytest
import torch

from tandem.engine.block_table import BlockTable
from tandem.engine.sampling.logprobs import RowLogprobs
from tandem.engine.sampling.prompt_scoring import split_logits
from tandem.engine.sequence import ScheduledChunk, Sequence
from tandem.engine.token_array import token_array
from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import make_sampling
from tests.support.host_reads import HostReads

READERS = ("llama, dynamic rope", "jetmoe")  # their own code does


@pytest.mark.parametrize(
    "name", ["llama", "qwen2, sliding", "gemma2", "mixtral", "deepseek_v3", "gpt_oss", "opt", *READERS]
)
def test_a_forward_reads_nothing(name: str, build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine.cpu.optimize.optimize", lambda module, **_: None)  # as a GPU runs it
    runner = build_engine(name).runner
    tables = [BlockTable([block]) for block in range(3)]
    sequences = [Sequence("", token_array([5, 6, 7]), 1, make_sampling(), root=b"", blocks=table) for table in tables]
    starts = zip(sequences, (0, 2, 2), strict=True)
    chunks = [ScheduledChunk(sequence, start, 3 - start, True) for sequence, start in starts]
    with HostReads() as reads:
        runner.run(chunks)
    assert bool(reads.found) == (name in READERS), reads.found


def test_scoring_reads_nothing_on_the_host() -> None:
    sequence = Sequence("", token_array([5, 6, 7, 8]), 4, make_sampling(num_prompt_logprobs=2), root=b"")
    chunks = [ScheduledChunk(sequence, 0, 1, True), ScheduledChunk(sequence, 0, 4, True, num_scored=3)]
    logits, token_ids = torch.arange(5.0)[:, None].expand(5, 50), torch.tensor([6, 7, 8])
    with torch.inference_mode(), HostReads() as reads:
        sampled, [rows] = split_logits(logits, chunks)
        RowLogprobs(rows.logits, token_ids, 0)  # the likeliest ones are sorted by numpy on a CPU only
    assert sampled[:, 0].tolist() == [0, 4]
    assert rows.logits[:, 0].tolist() == [1, 2, 3]
    assert rows.token_ids.tolist() == [6, 7, 8]
    assert not reads.found
