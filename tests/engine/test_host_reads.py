"""A forward waits for nothing: it reads no value of a tensor on the host."""

from __future__ import annotations

import pytest

from tandem.engine.sequence import ScheduledChunk, Sequence
from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import make_sampling
from tests.support.host_reads import HostReads

READERS = ("llama, dynamic rope", "jetmoe")  # their own code does


@pytest.mark.parametrize(
    "name", ["llama", "qwen2, sliding", "gemma2", "mixtral", "deepseek_v3", "gpt_oss", "opt", *READERS]
)
def test_a_forward_reads_nothing_on_the_host(
    name: str, build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.engine.cpu.optimize.optimize", lambda module: None)  # as a GPU runs it
    runner = build_engine(name).runner
    chunks = [
        ScheduledChunk(Sequence("", [5, 6, 7], 1, make_sampling(), root=b"", blocks=[block]), start, 3 - start, True)
        for block, start in enumerate((0, 2, 2))
    ]
    with HostReads() as reads:
        runner.run(chunks)
    assert bool(reads.found) == (name in READERS), reads.found
