"""What a step of the engine has brought."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tandem.engine.sequence import ScheduledChunk, Sequence
from tandem.protocol.messages import FinishReason, StepStats, TokenLogprobs


class SequenceOutput(msgspec.Struct, frozen=True):
    """One new token of a sequence, and whether the sequence ended with it.

    Tokens of the request's prediction that a step computed count with the step's first token.
    """

    sequence: Sequence
    offset: int  # of the token in the output
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    stop_token_id: int | None  # the new token, if it ended the sequence and is not part of the answer
    num_accepted_tokens: int = 0  # of the prediction
    num_rejected_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """A sequence that a step ended because it raised `error`."""

    sequence: Sequence
    error: Exception


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. `chunks` are computed and published; `outputs` are in batch order."""

    chunks: list[ScheduledChunk]
    outputs: list[SequenceOutput]
    stats: StepStats
    failures: list[SequenceFailure] = field(default_factory=list)


def step_stats(chunks: list[ScheduledChunk], duration_s: float) -> StepStats:
    """A drafted token is work like a prompt's token."""
    num_prefill_tokens = num_decode_seqs = num_decode_kv_tokens = 0
    prefill_attention = 0.0
    for chunk in chunks:
        if chunk.num_tokens == 1 and chunk.samples:
            num_decode_seqs += 1
            num_decode_kv_tokens += chunk.start + 1
        else:
            num_prefill_tokens += chunk.num_tokens
            prefill_attention += chunk.num_tokens * (chunk.start + chunk.num_tokens / 2)
        if num_drafted := len(chunk.draft):
            num_prefill_tokens += num_drafted
            prefill_attention += num_drafted * (chunk.start + chunk.num_tokens + num_drafted / 2)
    return StepStats(
        duration_s=duration_s,
        num_prefill_tokens=num_prefill_tokens,
        prefill_attention=prefill_attention,
        num_decode_seqs=num_decode_seqs,
        num_decode_kv_tokens=num_decode_kv_tokens,
    )
