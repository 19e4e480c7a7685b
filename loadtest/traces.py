"""Recorded requests: arrival, lengths, and hashes of the prompt's blocks, by which prompts share prefixes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TRACE_BLOCK_SIZE = 512  # tokens per block id


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. A block id names a block and its whole prefix; the last block may have an id without being full."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...]

    def num_tokens_in(self, num_blocks: int) -> int:
        """Prompt tokens in the leading `num_blocks` blocks."""
        return min(num_blocks * TRACE_BLOCK_SIZE, self.num_prompt_tokens)


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """The requests of a .jsonl or .jsonl.gz file, in order. Raises `ValueError` for a line that is not a request."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _parse(json.loads(line))
            except (ValueError, KeyError, TypeError) as exc:
                raise ValueError(f"{path}, line {number}: not a request with block hashes ({exc!r})") from exc


def _parse(fields: dict[str, object]) -> TraceRequest:
    timestamp, num_prompt_tokens, num_output_tokens, block_ids = (
        fields[name] for name in ("timestamp", "input_length", "output_length", "hash_ids")
    )
    if not (
        isinstance(timestamp, int | float)
        and isinstance(num_prompt_tokens, int)
        and isinstance(num_output_tokens, int)
        and isinstance(block_ids, list)
    ):
        raise TypeError(f"a field of {fields} has the wrong type")
    if not (0 <= timestamp < 1e15 and 0 < num_prompt_tokens < 1 << 40 and 0 <= num_output_tokens < 1 << 40):
        raise ValueError(f"{timestamp} ms, {num_prompt_tokens} and {num_output_tokens} tokens")
    if not all(isinstance(one, int) and 0 <= one < 1 << 63 for one in block_ids):
        raise TypeError("a block id is not a whole number from 0 to 2^63")
    if len(block_ids) > -(-num_prompt_tokens // TRACE_BLOCK_SIZE):
        raise ValueError(f"{len(block_ids)} blocks for {num_prompt_tokens} tokens")
    return TraceRequest(timestamp / 1e3, num_prompt_tokens, num_output_tokens, tuple(block_ids))
