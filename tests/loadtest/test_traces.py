from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tandem.loadtest.traces import TraceRequest, read_trace
from tests.support.trace_replay import TRACES, load

LINE = {"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [4, 5]}


def test_reads_requests_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps({**LINE, "timestamp": 2000, "hash_ids": []}) + "\n")
    assert list(read_trace(path)) == [TraceRequest(1.5, 700, 9, (4, 5)), TraceRequest(2.0, 700, 9, ())]


def test_reads_compressed_files(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(LINE).encode()))
    assert [request.block_ids for request in read_trace(path)] == [(4, 5)]


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
def test_a_partial_last_block_counts_with_its_real_size(num_blocks: int) -> None:
    assert TraceRequest(0.0, 700, 1, (4, 5)).num_tokens_in(num_blocks) == [0, 512, 700][num_blocks]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"timestamp": 0}',
        json.dumps({**LINE, "hash_ids": "4 5"}),
        json.dumps({**LINE, "input_length": None}),
        json.dumps({**LINE, "hash_ids": [4, 5, 6]}),
    ],
)
def test_a_line_that_is_not_a_request_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{line}\n")
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2"):
        list(read_trace(path))


def test_block_ids_of_the_recorded_traces_are_chained() -> None:
    for trace in TRACES[:2]:  # the third is long
        parent_of: dict[int, int | None] = {}
        for request in load(trace):
            for parent, block_id in zip((None, *request.block_ids), request.block_ids, strict=False):
                assert parent_of.setdefault(block_id, parent) == parent
        assert len(parent_of) > 30_000
