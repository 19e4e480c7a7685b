"""What a step of the engine has brought."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.engine.sequence import ScheduledChunk, Sequence
from tandem.protocol.messages import FinishReason, StepStats, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SequenceOutput:
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
    prefill = [chunk for chunk in chunks if not (chunk.num_tokens == 1 and chunk.samples)]
    decode = [chunk for chunk in chunks if chunk.num_tokens == 1 and chunk.samples]
    drafted = [(chunk.start + chunk.num_tokens, len(chunk.draft)) for chunk in chunks if chunk.draft]
    return StepStats(
        duration_s=duration_s,
        num_prefill_tokens=sum(chunk.num_tokens for chunk in prefill) + sum(num for _, num in drafted),
        prefill_attention=sum(chunk.num_tokens * (chunk.start + chunk.num_tokens / 2) for chunk in prefill)
        + sum(num * (start + num / 2) for start, num in drafted),
        num_decode_seqs=len(decode),
        num_decode_kv_tokens=sum(chunk.start + 1 for chunk in decode),
    )
