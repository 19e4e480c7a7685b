"""One request inside an engine: its tokens, its blocks and how far it has come."""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tandem.engine.block_table import BlockTable
from tandem.protocol.messages import FinishReason, KvHolder, PeerAddress, WorkerPriority
from tandem.protocol.sampling import SamplingParams
from tandem.protocol.timeline import Timeline

if TYPE_CHECKING:
    import numpy as np

    from tandem.engine.block_index import CachedPrefix
    from tandem.engine.prompt_scores import PromptScores
    from tandem.engine.sampling.request_plan import RequestPlan
    from tandem.engine.speculation.sources import DraftSources, RequestTexts
    from tandem.engine.structured_output import GrammarMatcher

    Array = np.ndarray[Any, Any]

PENDING_TOKEN = -1  # stands for a token that is still on the device


class SequenceStatus(enum.Enum):
    """The engine's queue that the sequence is in."""

    WAITING = enum.auto()  # not admitted: holds no blocks (or only those received for it)
    RUNNING = enum.auto()
    FORKING = enum.auto()  # in no queue: it begins with the first token of the sequence that computes its prompt
    FINISHED = enum.auto()


class Phase(enum.Enum):
    """The part of the request that this engine computes."""

    WHOLE = enum.auto()  # prefill and decode
    PREFILL_ONLY = enum.auto()  # up to the first token; blocks are kept until the handoff is over


_WHOLE = Phase.WHOLE  # looking up a member of an enum takes longer than a call


@dataclass(eq=False, slots=True)
class Onboarding:
    """Blocks of a prompt that are loaded from a tier or a peer while the engine may compute the blocks before them.

    tokens   0 ····· num_computed ····· hold_at ········ start ▓▓▓▓▓▓▓▓▓ end ·····
                          in the pool / computed            in place, not counted yet

    Loads arrive from `end` downwards. Once computing reaches `start` it goes on from `end`. It overtakes a late load,
    whose blocks are then computed like any others.
    """

    start: int  # first loaded token; `end` while nothing is loaded
    end: int
    hold_at: int | None  # computing stops here for now, because loading is expected to be faster
    pieces: list[tuple[int, str]] = field(default_factory=list)  # where each loaded piece starts, last first, and from

    def tokens_by_source(self, first: int) -> Iterator[tuple[str, int]]:
        """Sources of the tokens from `first` on, and how many each loaded."""
        end = self.end
        for start, source in self.pieces:
            if end > first:
                yield source, end - max(start, first)
            end = start


@dataclass(eq=False, slots=True)
class Sequence:
    """A prompt and the tokens generated so far.

    token_ids     [0, num_prompt)          prompt
                  [num_prompt, len)        output, the last `num_pending_tokens` of which are not read yet
    num_computed  tokens whose KV is in `blocks`; never that of the last token while it waits for its step
    """

    request_id: str
    token_ids: array[int]  # see `token_array`
    num_prompt_tokens: int
    sampling: SamplingParams
    root: bytes  # root of the digest chain: namespace and tenant
    phase: Phase = Phase.WHOLE
    priority: WorkerPriority = field(default_factory=WorkerPriority)
    status: SequenceStatus = SequenceStatus.WAITING
    blocks: BlockTable = field(default_factory=BlockTable)
    cached_prefix: CachedPrefix | None = None  # what was cached of it when that was last counted, while it waits
    forks: list[Sequence] = field(default_factory=list)  # other answers to its prompt, until that is computed
    leader: Sequence | None = None  # the sequence whose fork it is, until then
    digests: list[bytes] = field(default_factory=list)  # of full blocks of token_ids
    arrival: int = 0  # counted by the scheduler; 0 = not queued yet
    num_passed_blocks: int = 0  # blocks given to later sequences in the queue while there was no room for this one
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    has_last_token: bool = False  # its last token is sampled, whether it is read yet or not
    num_published_blocks: int = 0
    num_cached_tokens: int = 0  # prompt tokens that were not computed: cached at first admission, or loaded
    num_loaded_tokens: dict[str, int] = field(default_factory=dict)  # those of them that were loaded, by source
    is_admitted_before: bool = False  # preempted sequences keep their first hit count
    may_take_room: bool = False  # it waits for room, and others give way if it gets short of it
    gave_way: bool = False  # it was preempted for another tenant, so no seat is kept for it
    onboarding: Onboarding | None = None
    request_plan: RequestPlan | None = None  # what it asks of the sampler, which makes it once
    logit_bias: tuple[Array, Array] | None = None  # ids and values; the sampler makes them once
    prompt_ids: Array | None = None  # each id of the prompt once; the sampler makes them for the repetition penalty
    matcher: GrammarMatcher | None = None  # of a grammar that its output must match
    texts: RequestTexts | None = None  # in which drafts are looked for; forks share them
    drafts: DraftSources | None = None  # what its next tokens may be, once it was asked
    prompt_scores: PromptScores | None = None  # log probabilities of the prompt's tokens, if they were asked for
    kv_holder: KvHolder | None = None  # a peer that has some of the prompt's KV
    kv_receiver: PeerAddress | None = None  # the worker to which the prompt's KV is handed
    finish_reason: FinishReason | None = None
    timeline: Timeline | None = None  # of a traced request, until its first tokens were sent

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, wherever they were generated."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_ids(self) -> list[int]:
        """Tokens generated so far; `PENDING_TOKEN` for those that are not read yet."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def unmatched_ids(self) -> list[int]:
        """Tokens of the output that the matcher has not seen."""
        return self._output_from(0 if self.matcher is None else self.matcher.num_consumed)

    @property
    def unprobed_ids(self) -> list[int]:
        """Tokens of the output after which no forced ones were looked for yet."""
        return self._output_from(0 if self.matcher is None else self.matcher.num_probed)

    @property
    def can_sample(self) -> bool:
        """Whether its next token may be sampled, once all before it are computed: its grammar is ready."""
        return self.matcher is None or self.matcher.is_ready

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens the next steps must compute before another one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_computed_prompt_tokens(self) -> int:
        """Tokens of its prompt that were computed or found cached, here or by a peer."""
        return self.num_prompt_tokens if self.has_first_token else self.num_computed_tokens

    @property
    def is_scored(self) -> bool:
        """Whether computing it also gives the log probabilities of its prompt's tokens."""
        return self.prompt_scores is not None and self.num_output_tokens == 0

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens whose KV may come from a cache. The others are computed, because their logits are needed."""
        scores = self.prompt_scores
        return len(self.token_ids) - 1 if scores is None or not self.is_scored else scores.num_launched

    @property
    def has_first_token(self) -> bool:
        """Whether its prompt was computed, here or by a peer."""
        return len(self.token_ids) > self.num_prompt_tokens

    @property
    def decodes_here(self) -> bool:
        """Whether it takes more blocks as it goes on. A prompt that is handed over keeps its blocks until that ends."""
        return self.phase is _WHOLE

    @property
    def current_priority(self) -> WorkerPriority:
        """Its priority; a sequence with its first token goes before all that have none."""
        return WorkerPriority(self.order, self.priority.max_step_tokens)

    def take_forks(self) -> list[Sequence]:
        """Its forks, which no longer wait for its prompt."""
        forks, self.forks = self.forks, []
        for fork in forks:
            fork.leader = None
        return forks

    def add_pending_token(self, *, is_last: bool) -> None:
        """Note that the device has sampled one more token."""
        self.token_ids.append(PENDING_TOKEN)
        self.num_pending_tokens += 1
        self.has_last_token = is_last

    def set_pending_token(self, token_id: int) -> int:
        """Set the oldest token that was not read yet. Returns its position."""
        position = len(self.token_ids) - self.num_pending_tokens
        self.token_ids[position] = token_id
        self.num_pending_tokens -= 1
        return position

    def drop_pending_tokens(self) -> None:
        """Forget the tokens that were not read yet, and the KV of all but the last of the others."""
        if self.num_pending_tokens:
            del self.token_ids[-self.num_pending_tokens :]
            self.num_pending_tokens, self.has_last_token = 0, False
            self.num_computed_tokens = min(self.num_computed_tokens, len(self.token_ids) - 1)

    @property
    def order(self) -> float:
        """Its place among waiting or computed sequences; those with their first token go before all others."""
        return self.priority.order if self.num_output_tokens == 0 else -math.inf

    def _output_from(self, offset: int) -> list[int]:
        """The tokens of the output from this one on, without those that are not read yet."""
        return self.token_ids[self.num_prompt_tokens + offset : len(self.token_ids) - self.num_pending_tokens].tolist()

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token lacks its KV."""
        num_tokens = len(self.token_ids)
        return num_tokens == self.num_computed_tokens + 1 and num_tokens > self.num_prompt_tokens


class ScheduledChunk(msgspec.Struct, frozen=True):  # a step makes hundreds, each in a tenth of a dataclass's time
    """Compute tokens [start, start + num_tokens) of a sequence; `samples` if that reaches its end.

    The logits of its last tokens are needed: of `num_scored` to score the prompt, and then of one if it samples.
    NOTE: both are stored, because the sequence changes as soon as the step is launched.
    Behind the tokens of one that samples those of `draft` are computed, with logits, in case they come next.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    num_scored: int = 0
    draft: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """How many tokens are computed."""
        return self.num_tokens + len(self.draft)

    @property
    def num_sampled(self) -> int:
        """How many of the last of them have logits to sample from."""
        return self.samples + len(self.draft)

    @property
    def num_logits(self) -> int:
        """How many of the last of them have logits that are needed."""
        return self.num_scored + self.num_sampled
