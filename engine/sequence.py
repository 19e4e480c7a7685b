"""One request inside an engine: its tokens, its blocks and how far it has come."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.protocol.messages import FinishReason, KvHolder, PeerAddress, PrefillPriority
from tandem.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Onboarding", "Phase", "Sequence", "SequenceStatus"]


class SequenceStatus(enum.Enum):
    """Where the engine keeps the sequence."""

    WAITING = enum.auto()  # not admitted: holds no blocks (or only those received for it)
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Phase(enum.Enum):
    """How much of the request this engine does."""

    WHOLE = enum.auto()  # prefill and decode
    PREFILL_ONLY = enum.auto()  # up to the first token; blocks are kept until the handoff is over


@dataclass(eq=False, slots=True)
class Onboarding:
    """Blocks of a prompt that come from a tier or a peer while the engine may already compute those before them.

    tokens   0 ····· num_computed ····· hold_at ········ start ▓▓▓▓▓▓▓▓▓ end ·····
                          in the pool / computed            in place, not counted yet

    Loads come in from `end` downwards. Once computing reaches `start` it goes on from `end`; it overtakes a load that
    is late, whose blocks are then computed like any other.
    """

    start: int  # first token in place; `end` while nothing is
    end: int
    hold_at: int | None  # computing stops here for now: the loads are expected to be faster


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and what was generated so far.

    token_ids     [0, num_prompt)          prompt
                  [num_prompt, len)        output
    num_computed  tokens whose KV is in `blocks`; the last token's never is while it waits for its step
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    root: bytes  # root of the digest chain: namespace and tenant
    phase: Phase = Phase.WHOLE
    priority: PrefillPriority = field(default_factory=PrefillPriority)
    status: SequenceStatus = SequenceStatus.WAITING
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of full blocks of token_ids
    arrival: int = 0  # counted by the scheduler; 0 = it is not there yet
    num_passed_blocks: int = 0  # given to those behind it in line while there was no room for it
    num_computed_tokens: int = 0
    num_published_blocks: int = 0
    num_cached_tokens: int = 0  # prompt tokens not computed: found in the pool at first admission, or loaded
    is_admitted_before: bool = False  # preempted sequences keep their first hit count
    onboarding: Onboarding | None = None
    logit_bias: tuple[Tensor, Tensor] | None = None  # ids and values on the device; the sampler makes them once
    kv_holder: KvHolder | None = None  # a peer that has some of the prompt's KV
    kv_receiver: PeerAddress | None = None  # whom the prompt's KV is handed to
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, wherever they were generated."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens the next steps must compute before another one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def order(self) -> float:
        """Its place among those that wait or are computed; whoever has its first token goes before all who lack it."""
        return self.priority.order if self.num_output_tokens == 0 else -math.inf

    @property
    def is_decoding(self) -> bool:
        """Whether exactly the newest token is missing its KV."""
        return self.num_uncomputed_tokens == 1 and self.num_output_tokens > 0
