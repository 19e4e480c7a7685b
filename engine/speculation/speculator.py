"""Chooses drafts: for which sequences of a step, and how many tokens of each.

A step computes a sequence's last token and behind it the drafted ones, with logits of all of them. Each is then sampled
as a step of its own would have done it. The first that differs from the draft is the right token, and what was computed
behind it is not used. So drafts change how many steps an answer takes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

from msgspec.structs import replace

from tandem.engine.sequence import Phase, ScheduledChunk, Sequence
from tandem.engine.speculation.sources import DraftSources, RecentAnswers, RequestTexts
from tandem.engine.speculation.step_time import StepTime
from tandem.engine.speculation.token_index import GRAM

_AUTO_DRAFT = 24
_MIN_GAIN = 1.02  # in tokens a second; less is not worth the risk of a wrong estimate
_MIN_SHARE = 0.05  # probability below which a token is not worth a look
_STEP_GRAMS = 2048  # of each kind of text that are indexed in a step, so that long prompts do not delay it


class Speculator:
    """Drafts of one engine. `speculate` is its setting: `auto`, or most tokens of a draft, whatever they cost."""

    def __init__(self, speculate: str, *, max_model_len: int, max_tokens: int, max_rows: int) -> None:
        """A step has at most `max_tokens` tokens and logits of at most `max_rows` drafted ones."""
        self.num_drafted = 0  # tokens, since the start
        self.num_accepted = 0
        self._is_auto = speculate == "auto"
        self._most = _AUTO_DRAFT if self._is_auto else int(speculate)
        self._max_model_len, self._max_tokens, self._max_rows = max_model_len, max_tokens, max_rows
        self._answers = RecentAnswers()
        self._step_time = StepTime()

    def add_drafts(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """The chunks of a step, with drafts where they pay. Room for them in the pool is not there yet."""
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        room = 0 if _is_short(chunks) else min(self._max_tokens - num_tokens, self._max_rows)
        max_grams = max(_STEP_GRAMS // max(len(chunks), 1), GRAM)
        shares = [self._propose(chunk.sequence, max_grams) if _may_draft(chunk) else [] for chunk in chunks]
        num_sampled = sum(chunk.samples for chunk in chunks)
        least = self._least_share(shares, num_sampled, num_tokens, room) if self._is_auto else 0.0
        drafted: list[ScheduledChunk] = []
        for chunk, ahead in zip(chunks, shares, strict=True):
            num = min(sum(share >= least for share in ahead), room)
            room -= num
            sources = chunk.sequence.drafts
            drafted.append(replace(chunk, draft=tuple(sources.drafted[:num])) if num and sources else chunk)
        return drafted

    def note_step(self, chunks: Seq[ScheduledChunk], duration_s: float) -> None:
        """Learn from a step how long steps take."""
        if all(chunk.samples and chunk.num_tokens == 1 for chunk in chunks):
            self._step_time.observe(sum(chunk.num_rows for chunk in chunks), duration_s)

    def note_draft(self, num_drafted: int, num_accepted: int) -> None:
        """Count a draft that a step has computed."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted

    def note_end(self, sequence: Sequence) -> None:
        """A sequence has ended: later answers may be like its own."""
        if sequence.phase is Phase.WHOLE and sequence.has_first_token:
            self._answers.add(sequence.root, sequence.token_ids, sequence.num_prompt_tokens)

    def _propose(self, sequence: Sequence, max_grams: int) -> list[float]:
        """Let the sequence expect its next tokens. Returns their probabilities."""
        if sequence.drafts is None:
            if sequence.texts is None:
                prompt = sequence.token_ids[: sequence.num_prompt_tokens]
                sequence.texts = RequestTexts(prompt, sequence.sampling.prediction)
            sequence.drafts = DraftSources(sequence.token_ids, sequence.texts, self._answers.of(sequence.root))
        sources, token_ids = sequence.drafts, sequence.token_ids
        # Behind the draft there is one more token, which is sampled.
        left = min(self._max_model_len - len(token_ids), sequence.sampling.max_tokens - sequence.num_output_tokens) - 1
        least_share = _MIN_SHARE if self._is_auto else 0.0
        shares = sources.propose(token_ids, max(min(self._most, left), 0), least_share, max_grams)
        if shares and sequence.matcher is not None:
            sources.drafted = sources.drafted[: sequence.matcher.num_allowed(sources.drafted)]
        return shares[: len(sources.drafted)]

    def _least_share(self, shares: list[list[float]], num_sampled: int, num_tokens: int, room: int) -> float:
        """The probability from which a drafted token is computed: tokens a second are then the most.

        With k drafted tokens, the likeliest ones, a step gives `num_sampled` + their probabilities' sum.
        """
        likely = sorted((one for ahead in shares for one in ahead), reverse=True)[:room]
        seconds = self._step_time.seconds
        if not likely or seconds(1) <= 0:
            return 2.0
        rates = [num / seconds(num_tokens + k) for k, num in enumerate(accumulate(likely, initial=num_sampled))]
        best = max(range(len(rates)), key=rates.__getitem__)
        return likely[best - 1] if rates[best] > _MIN_GAIN * rates[0] else 2.0


def _is_short(chunks: Seq[ScheduledChunk]) -> bool:
    """Whether a step was made short, so that a prompt to come can soon overtake."""
    return any(chunk.sequence.priority.max_step_tokens and not chunk.sequence.has_first_token for chunk in chunks)


def _may_draft(chunk: ScheduledChunk) -> bool:
    """Whether the tokens before a draft are known, and its grammar is quick and has no mask under way."""
    sequence, matcher = chunk.sequence, chunk.sequence.matcher
    if not chunk.samples or not sequence.has_first_token or sequence.num_pending_tokens:
        return False
    if matcher is not None and not (matcher.may_look_ahead and not sequence.unmatched_ids):
        return False
    return sequence.phase is Phase.WHOLE
