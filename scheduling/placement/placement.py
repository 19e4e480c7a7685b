"""Where a request may go, and what that costs: plain values in predicted seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from tandem.protocol.routing import COST
from tandem.scheduling.workers.load import RequestLoad
from tandem.scheduling.workers.workers import RegisteredWorker

ANY_RANK = (0.0, 0.0)  # of a choice by cost
NO_SHADOW: Mapping[str, float] = MappingProxyType({})


class Terms(NamedTuple):
    """The predicted cost of a placement, term by term, in seconds."""

    queue_s: float = 0.0  # computing prompts before this one: those booked on the worker or held in the router for it
    fetch_s: float = 0.0  # reading cached blocks from another worker or a tier
    prefill_s: float = 0.0  # computing the rest of the prompt
    delay_s: float = 0.0  # time this takes from the sequences decoding on the same worker, summed over them
    transfer_s: float = 0.0  # part of the KV transfer that prefill does not hide
    memory_s: float = 0.0  # waiting until the decode worker has room and a seat
    decode_s: float = 0.0  # decoding the answer, and what that adds to the steps of other sequences

    @property
    def total_s(self) -> float:
        """The cost that placement minimises."""
        return sum(self)

    @property
    def ttft_s(self) -> float:
        """Predicted time to first token. The first token comes from the prefill side and waits for no transfer."""
        return self.queue_s + self.fetch_s + self.prefill_s


class Held(NamedTuple):
    """Work that waits in the router for one worker. A request behind it waits as if it were on the worker."""

    prefill_s: float = 0.0  # computing prompts there
    num_seqs: int = 0  # sequences to decode there
    kv_tokens: int = 0  # their prompts and expected outputs

    def plus(self, other: Held) -> Held:
        """The sum of both."""
        return Held(self.prefill_s + other.prefill_s, self.num_seqs + other.num_seqs, self.kv_tokens + other.kv_tokens)


class Holder(NamedTuple):
    """A worker that has leading blocks of the prompt."""

    worker: RegisteredWorker
    num_blocks: int


class Candidate(NamedTuple):
    """One way to serve the request: on a pair, or on one worker twice."""

    prefill: RegisteredWorker
    decode: RegisteredWorker
    num_cached_tokens: int  # prompt tokens that the prefill side has, or will fetch
    holder: Holder | None  # another worker that has more of the prompt, where reading it is worthwhile
    terms: Terms
    tier: str = ""  # the worker's own tier that has more of the prompt, where loading it is worthwhile

    @property
    def is_pair(self) -> bool:
        """Whether prompt and decoding are on different workers."""
        return self.prefill is not self.decode

    def explain(self) -> dict[str, object]:
        """The candidate with its terms, as JSON."""
        return {
            "prefill_worker": self.prefill.worker_id,
            "decode_worker": self.decode.worker_id,
            "num_cached_tokens": self.num_cached_tokens,
            "kv_holder": self.holder.worker.worker_id if self.holder else None,
            "kv_tier": self.tier or None,
            "total_s": self.terms.total_s,
            **self.terms._asdict(),
        }


@dataclass(frozen=True, slots=True)
class Placement:
    """The decision, and the alternatives that cost more."""

    best: Candidate
    # One worker if `best` is a pair, else the best pair; where there are no pairs, the next best worker.
    runner_up: Candidate | None
    others: tuple[Candidate, ...]  # the next best of any shape, where requested
    num_prompt_tokens: int
    expected_output_tokens: int
    skipped: dict[str, int]  # reason -> number of workers not considered
    strategy: str = COST  # by which it was decided
    rank: tuple[float, float] = ANY_RANK  # among choices from several pools the highest wins, then the cheapest
    # Predicted seconds that other strategies would have lost: of none, of one in turn, or of all where requested.
    shadow: Mapping[str, float] = field(default_factory=lambda: NO_SHADOW)
    num_shared_tokens: int = 0  # prompt tokens whose KV is booked for another answer to the same prompt

    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens to compute."""
        return self.num_prompt_tokens - self.best.num_cached_tokens

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV the sequence is expected to take."""
        return self.num_prompt_tokens + self.expected_output_tokens - self.num_shared_tokens

    @property
    def load(self) -> RequestLoad:
        """The load to book on the chosen workers."""
        best = self.best
        prefill, decode = best.prefill.worker_id, best.decode.worker_id
        return RequestLoad(prefill, decode, self.num_new_tokens, best.num_cached_tokens, self.num_kv_tokens)
