"""One choice of an answer: from its token deltas to text, stop strings, and log probabilities as text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.frontend.openai.answer_formats import AnswerParsing, Parser
from tandem.frontend.openai.answer_shapes import EndReason
from tandem.frontend.openai.logprobs import ScoredPrompt, TokenEntry, token_entry
from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import FinishReason, SequenceDelta, TokenLogprobs
from tandem.router.backend import GenerateRequest
from tandem.text.stop_strings import StopMatcher, StopStrings
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_calls.events import Event, content_events, joined_events
from tandem.text.tool_calls.parser import AnswerParser


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One choice to generate."""

    index: int
    request: GenerateRequest
    stops: StopStrings | None = None
    skip_special_tokens: bool = True
    shows_stop: bool = False  # whether the stop string that ends it is shown
    parsing: AnswerParsing | None = None  # None = all text is content
    is_first_sibling: bool = True  # computes the prompt; the other choices are forks of it
    scored_prompt: ScoredPrompt | None = None
    is_prompt_only: bool = False  # `max_tokens` 0: the prompt is computed and maybe scored, nothing is generated
    shows_token_ids: bool = False


@dataclass(slots=True)
class ChoiceDelta:
    """What one delta of tokens adds to a choice."""

    index: int
    text: str
    num_tokens: int
    num_cached_tokens: int | None = None
    num_loaded_tokens: dict[str, int] | None = None  # cached tokens that were not in the pool, by tier
    num_reasoning_tokens: int = 0  # how many of `num_tokens` are reasoning
    num_accepted_tokens: int = 0  # how many of `num_tokens` a step computed because the request predicted them
    num_rejected_tokens: int = 0  # predicted tokens that a step computed for nothing
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None
    entries: list[TokenEntry] = field(default_factory=list)
    events: list[Event] | None = None  # what the text consists of; None = all of it is content
    decision: dict[str, Any] | None = None  # with the first token, if requested
    token_ids: list[int] | None = None  # of the tokens that are counted; None = they are not shown

    @property
    def parts(self) -> list[Event]:
        """What its text consists of, whether it was parsed or not."""
        return content_events(self.text) if self.events is None else self.events

    @property
    def is_empty(self) -> bool:
        """Whether it shows nothing: all its text is held back."""
        shown = self.text if self.events is None else self.events
        return not (shown or self.finish_reason or self.entries or self.token_ids)


class ChoiceText:
    """Turns the token deltas of one sequence into the text that its reader may see. Pure: no I/O, no clock."""

    def __init__(self, plan: ChoicePlan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._sampling = plan.request.sampling
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(
            plan.request.token_ids,
            skip_special_tokens=plan.skip_special_tokens,
            shown_ids=plan.parsing.special_ids if plan.parsing is not None else frozenset(),
        )
        self._parser = plan.parsing.new_parser() if plan.parsing is not None else None
        self._marks = plan.parsing.marks if plan.parsing is not None else {}
        self._mark_positions: list[int] = []  # positions that the parser does not know yet
        self._counts_reasoning = plan.parsing is not None and plan.parsing.has_reasoning
        self._matcher = StopMatcher(plan.stops)
        self._num_tokens = 0
        self._num_decoded_chars = 0
        self._num_shown_chars = 0
        self._held_entries: deque[TokenEntry] = deque()

    def push(self, delta: SequenceDelta) -> ChoiceDelta:
        """What this delta adds. A `finish_reason` ends the choice, even if the backend would go on."""
        # The prompt is counted once, and so are its cached tokens.
        result = ChoiceDelta(self._plan.index, "", len(delta.token_ids))
        if delta.num_cached_tokens is not None and self._plan.is_first_sibling:
            result.num_cached_tokens, result.num_loaded_tokens = delta.num_cached_tokens, delta.num_loaded_tokens
        shown_ids = delta.token_ids
        if delta.stop_token_id is not None and shown_ids and shown_ids[-1] == delta.stop_token_id:
            shown_ids = shown_ids[:-1]
        ends: list[int] | None = [] if self._counts_reasoning else None  # where each token's text ends in the delta's
        stop = self._add_tokens(shown_ids, delta.logprobs, result, ends)
        if stop is None:
            self._num_tokens += len(delta.token_ids) - len(shown_ids)
        else:
            result.num_tokens -= len(delta.token_ids) - len(shown_ids)
        if stop is None and delta.finish_reason is not None:
            stop = self._finish(delta, result)
            if self._plan.scored_prompt is not None and delta.logprobs and len(shown_ids) < len(delta.token_ids):
                # An evaluation harness drops the last score, which should be that of the generated token.
                self._hold_entry("", delta.logprobs[-1])
        if stop is not None:
            result.finish_reason, result.stop_reason = "stop", stop
            if self._plan.shows_stop:
                result.text += stop
        if self._plan.shows_token_ids:
            result.token_ids = delta.token_ids[: result.num_tokens]
        result.num_accepted_tokens = min(delta.num_accepted_tokens, result.num_tokens)  # a stop string may cut some off
        result.num_rejected_tokens = delta.num_rejected_tokens
        self._release_entries(result)
        if self._parser is not None:
            if self._mark_positions:
                assert isinstance(self._parser, AnswerParser), "a response template knows no marks"
                self._parser.add_marks(self._mark_positions)
                self._mark_positions = []
            _parse(self._parser, result, ends or ())
        return result

    def _add_tokens(
        self, token_ids: list[int], logprobs: list[TokenLogprobs] | None, result: ChoiceDelta, ends: list[int] | None
    ) -> str | None:
        """Append the tokens' text to `result`; return the stop string that ended it, or None.

        Where reasoning is counted, `ends` gets the end of each token's text.
        """
        one_by_one = (
            bool(self._plan.stops)  # tokens after the one that completes a stop string do not count
            or logprobs is not None
            or ends is not None
            or bool(self._marks)
            or self._num_tokens < self._sampling.min_tokens
        )
        runs = [[i] for i in token_ids] if one_by_one else [token_ids]
        for position, run in enumerate(runs):
            text = self._detokenizer.push(run)
            if self._marks and (mark := self._marks.get(run[0])) is not None and text.endswith(mark):
                self._mark_positions.append(self._num_decoded_chars + len(text) - len(mark))
            if logprobs is not None:
                self._hold_entry(text, logprobs[position])
            self._num_tokens += len(run)
            stop = self._show(text, result)
            if ends is not None:
                ends.append(len(result.text))
            if stop is not None:
                result.num_tokens -= sum(map(len, runs[position + 1 :]))
                return stop
        return None

    def _show(self, text: str, result: ChoiceDelta) -> str | None:
        self._num_decoded_chars += len(text)
        if self._num_tokens <= self._sampling.min_tokens:
            result.text += text  # stop strings count only after min_tokens
            return None
        match = self._matcher.push(text)
        result.text += match.text
        return match.stop

    def _finish(self, delta: SequenceDelta, result: ChoiceDelta) -> str | None:
        """The backend ended the sequence: show the text held back, unless it contains a stop string after all."""
        tail = self._detokenizer.flush()
        if tail and self._held_entries:  # tokens of an incomplete character, whose entries wait for its text
            self._held_entries[-1] = self._held_entries[-1]._replace(text=self._held_entries[-1].text + tail)
        stop = self._show(tail, result)
        if stop is None:
            match = self._matcher.flush()
            result.text += match.text
            stop = match.stop
        if stop is None:
            if delta.finish_reason is FinishReason.ABORT:
                raise WorkerError("The generation was aborted.")
            result.finish_reason = "stop" if delta.finish_reason is FinishReason.STOP else "length"
            if delta.stop_token_id in self._sampling.stop_token_ids:
                result.stop_reason = delta.stop_token_id
        return stop

    def _hold_entry(self, text: str, logprobs: TokenLogprobs) -> None:
        offset = self._num_decoded_chars
        entry = token_entry(self._tokenizer, text, logprobs.token_id, logprobs.logprob, logprobs.top, offset)
        self._held_entries.append(entry)

    def _release_entries(self, result: ChoiceDelta) -> None:
        """Move the entries of shown text to `result`: a token's entry is never shown before its text."""
        self._num_shown_chars += len(result.text)
        is_cut = isinstance(result.stop_reason, str)
        releases_all = result.finish_reason is not None and not is_cut
        while self._held_entries and (releases_all or self._held_entries[0].offset < self._num_shown_chars):
            result.entries.append(self._held_entries.popleft())


def _parse(parser: Parser, result: ChoiceDelta, ends: Sequence[int]) -> None:
    """Split the text of a delta into content, reasoning and tool calls.

    `ends` are those of its tokens. A token counts as reasoning if the text before or after it is reasoning. So markers
    count too, except for the beginning of a marker of several tokens.
    """
    events: list[Event] = []
    begin = 0
    for end in ends:
        is_within = parser.is_reasoning
        events += parser.feed(result.text[begin:end])
        result.num_reasoning_tokens += is_within or parser.is_reasoning
        begin = end
    events += parser.feed(result.text[begin:])
    result.events = joined_events(events) if len(ends) > 1 else events
    if result.finish_reason is not None:
        result.events += parser.finish()
        if result.finish_reason == "stop" and parser.num_calls:
            result.finish_reason = "tool_calls"
