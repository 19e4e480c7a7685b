"""What is kept from step to step never shows: batches are what their chunks say, whatever was packed before."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.block_table import BlockTable
from tandem.engine.kept_tables import KeptTables
from tandem.engine.sequence import ScheduledChunk, Sequence
from tandem.engine.token_array import token_array
from tandem.protocol.messages import Fork
from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import make_prompt, make_sampling
from tests.support.answers import Expects
from tests.support.forking import fork_sequence

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    {"num_logprobs": 2, "logit_bias": {5: 1.0}},
    {"repetition_penalty": 1.3, "min_tokens": 4},
    {"num_prompt_logprobs": 1},
]


def make_sequence(blocks: list[int], num_tokens: int = 1) -> Sequence:
    token_ids = token_array([5] * num_tokens)
    return Sequence("", token_ids, 1, make_sampling(), root=b"", blocks=BlockTable(blocks))


@pytest.mark.parametrize("seed", range(6))
def test_batches_of_random_schedules_are_what_their_chunks_say(seed: int, build_engine: BuildEngine) -> None:
    """`build_engine` compares every batch; this is about what is in them."""
    engine = build_engine(num_blocks=14, max_num_batched_tokens=24, max_num_seqs=6, speculate="3")
    engine.scheduler.admission.lengths = Expects(1)  # answers get longer: blocks run out
    source, counts, sequences = random.Random(seed), Counter[str](), list[Sequence]()
    count_chunks(engine.runner, counts)
    while len(sequences) < 40 or engine.has_work:
        if len(sequences) < 40 and source.random() < 0.4:
            prompt = (make_prompt(7) * 9)[: source.choice((1, 16, 40, 60))]
            forks = [Fork(f"{len(sequences)}-{i}", i) for i in range(source.choice((0, 0, 2)))]
            sampling = make_sampling(max_tokens=source.choice((1, 20, 40)), **source.choice(KINDS))
            sequences.append(fork_sequence(engine, str(len(sequences)), prompt, sampling, forks))
            engine.add(sequences[-1])
        if sequences and source.random() < 0.05:
            counts["aborted"] += engine.abort(source.choice(sequences).request_id)
        for result in engine.step():
            assert not result.failures
        engine.check_integrity()
    engine.check_integrity(idle=True)
    counts["preempted"] = engine.scheduler.num_preemptions
    kinds = ("aborted", "preempted", "drafted", "mixed", "scored", "forked")
    assert all(counts[kind] for kind in kinds), counts


def count_chunks(runner: Any, counts: Counter[str]) -> None:
    pack = runner.pack

    def packed(chunks: list[ScheduledChunk], *args: Any) -> Any:
        counts["drafted"] += any(chunk.draft for chunk in chunks)
        counts["scored"] += any(chunk.num_scored for chunk in chunks)
        counts["forked"] += any(chunk.sequence.forks for chunk in chunks)
        counts["mixed"] += len({chunk.sequence.has_first_token for chunk in chunks}) == 2
        return pack(chunks, *args)

    runner.pack = packed


@given(st.randoms(use_true_random=False))
def test_kept_tables_are_the_sequences_own(source: random.Random) -> None:
    kept, sequences = KeptTables(), [make_sequence([idx]) for idx in range(9)]
    for _ in range(30):
        for sequence in source.sample(sequences, source.randint(0, 3)):
            change(sequence, source)
        batch = source.sample(sequences, source.randint(1, 9)) if source.random() < 0.3 else sequences
        num_needed = np.array([source.randint(1, len(sequence.blocks)) for sequence in batch])
        tables = kept.pack(batch, num_needed)
        assert tables.shape == (len(batch), num_needed.max())
        for row, sequence in zip(tables.tolist(), batch, strict=True):
            assert row == [*sequence.blocks, *[0] * len(row)][: len(row)]
        tables[:] = -1  # it is the caller's


def change(sequence: Sequence, source: random.Random) -> None:
    """One of all ways in which a table changes; most of them keep its length."""
    blocks, fresh = sequence.blocks, source.randrange(1000)
    match source.randrange(5):
        case 0:
            blocks += [fresh] * source.choice((1, 1, 7))
        case 1:
            blocks[source.randrange(len(blocks))] = fresh
        case 2:
            blocks.truncate(len(blocks) - 1)
            blocks += [fresh]
        case 3:
            sequence.blocks = BlockTable([fresh, *blocks[1:]])
        case 4:
            blocks.truncate(source.randint(1, len(blocks)))


def test_a_token_without_a_slot_is_refused() -> None:
    with pytest.raises(AssertionError, match="no slot"):
        KeptTables().pack([make_sequence([3, 4]), make_sequence([5])], np.array([2, 2]))
