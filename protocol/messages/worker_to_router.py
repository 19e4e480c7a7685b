"""Messages from a worker to a router."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from tandem.protocol.digest import check_digest_run
from tandem.protocol.messages.fields import DigestRun, Name, Number, Packed, Seconds, Text, TokenIds
from tandem.protocol.messages.places import POOL_PLACE, holder_name
from tandem.protocol.messages.worker import StepStats, WorkerCard, WorkerLoad
from tandem.protocol.timeline import Ages

INVALID_REQUEST = "invalid_request"  # `RequestFailed.code` of a request that no worker could serve
CANCELLED = "cancelled"  # `RequestFailed.code` that confirms a `Cancel`


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to `Hello`. A worker with another wire version sets `refusal`."""

    card: WorkerCard
    refusal: Text = ""


class FinishReason(enum.StrEnum):
    """Why a sequence ended in the engine. The router handles stop strings, as it sees text."""

    STOP = "stop"  # end-of-sequence or stop token
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # cancelled


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one chosen token and of the best alternatives, best first."""

    token_id: Number
    logprob: float
    top: list[tuple[int, float]] = []


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of a prompt's tokens behind the first, and of the k likeliest tokens at each place, best first.

    Packed, because a long prompt has hundreds of thousands of them.
    """

    chosen: Packed  # [n], float32
    top_logprobs: Packed  # [n, k], float32
    top_ids: Packed  # [n, k], uint32


class SequenceDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request, from its worker through the router to its reader.

    `offset` counts the output tokens before these. The first token comes from the prefill worker and the rest from the
    decode worker, over two sockets: the offset lets the router put them in order.
    If a stop token ended the sequence, it may be the last of `token_ids`: it counts but is not shown.
    """

    request_id: Name
    offset: Number
    token_ids: TokenIds
    finish_reason: FinishReason | None = None
    stop_token_id: Number | None = None
    num_cached_tokens: Number | None = None  # with the first token: prompt tokens that were not computed
    num_loaded_tokens: dict[Name, Number] | None = None  # those of them that were not in the pool, by tier, or "peer"
    logprobs: list[TokenLogprobs] | None = None  # one for each of `token_ids`, if requested
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, if requested
    timeline: Ages | None = None  # with the first tokens that this worker sends of a traced request
    grammar_s: Seconds = 0.0  # with the last token: CPU time that this worker took for its grammar
    num_accepted_tokens: Number = 0  # of the request's prediction: those that were drafted before these tokens and came
    num_rejected_tokens: Number = 0  # and those that did not come
    decision: dict[str, Any] | None = None  # with the first token, if requested: its routing, which the router adds


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything that one engine step produced for this router, in one message.

    It also carries first tokens that were held until their prompts had a lease; `stats` then describes no work.
    """

    worker_id: Name
    epoch: Number
    deltas: list[SequenceDelta]
    stats: StepStats
    load: WorkerLoad


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker gave the request up and holds nothing for it."""

    request_id: Name
    message: Text
    code: Name
    num_computed_tokens: Number = 0  # of its prompt, by the sender or a peer, cached ones too
    grammar_s: Seconds = 0.0  # CPU time that the sender took for its grammar


class _OfPlace(msgspec.Struct, frozen=True, kw_only=True):
    """About the blocks in one place. `sequence` counts the events of a place in an epoch, from 1."""

    worker_id: Name
    epoch: Number
    sequence: Number
    place: Name = POOL_PLACE

    @property
    def holder(self) -> str:
        """Name of the place in the prefix index."""
        return holder_name(self.worker_id, self.place)


class BlockEvents(_OfPlace, frozen=True, kw_only=True, tag=True):
    """Blocks added to and removed from a place. More than fit into one message come in several, one after the other."""

    stored: DigestRun
    removed: DigestRun

    def __post_init__(self) -> None:
        check_digest_run(self.stored)
        check_digest_run(self.removed)


class BlockSnapshot(_OfPlace, frozen=True, kw_only=True, tag=True):
    """All digests in a place now, or a part of them. It includes the events up to and including `sequence`.

    The parts come one after the other, numbered from 0.
    """

    digests: DigestRun
    part: Number = 0
    is_last: bool = True

    def __post_init__(self) -> None:
        check_digest_run(self.digests)


class PinReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to `PinQuery`: leading blocks of each pin's chain, by place ("pool" or a tier). Omits unknown ids."""

    query_id: Name
    held: dict[Name, dict[Name, Number]]
