"""One client request as a set of sequences: from the backend's token deltas to text, choice by choice.

Knows stop strings, held-back text, logprob entries and siblings; knows nothing of JSON shapes or HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import FinishReason, TokenLogprobs
from tandem.router.backend import Backend, GenerateRequest, TokenDelta
from tandem.router.http.metrics import RequestClock
from tandem.router.streams import DeltaQueue, Stream
from tandem.router.text.stop_strings import StopMatcher, StopStrings
from tandem.router.text.tokenizer import Tokenizer

__all__ = ["ChoiceDelta", "ChoicePlan", "ChoiceText", "TokenEntry", "run_choices"]

MIN_LOGPROB = -9999.0  # stands for -inf, which JSON has not
NO_REASON = "The generation ended without a reason."
QUEUED_DELTAS = 64  # of all choices of one request; a client that reads slower than this holds its backend back


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One choice to generate."""

    index: int
    request: GenerateRequest
    stops: StopStrings | None = None
    skip_special_tokens: bool = True
    is_first_sibling: bool = True  # computes the prompt; the others wait for it and share it


class TokenEntry(NamedTuple):
    """Log probabilities of one token, as text. `offset` counts the characters of the answer before it."""

    text: str
    logprob: float
    top: list[tuple[str, float]]
    offset: int


@dataclass(slots=True)
class ChoiceDelta:
    """What one delta of tokens adds to a choice."""

    index: int
    text: str
    num_tokens: int
    num_cached_tokens: int | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    entries: list[TokenEntry] = field(default_factory=list)
    decision: dict[str, Any] | None = None  # with the first token, if asked for

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it to show: all text is held back."""
        return not (self.text or self.finish_reason or self.entries)


class ChoiceText:
    """Turns one sequence's token deltas into what its reader may see. Pure: no I/O, no clock."""

    def __init__(self, plan: ChoicePlan, tokenizer: Tokenizer) -> None:
        self._plan = plan
        self._sampling = plan.request.sampling
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(plan.request.token_ids, skip_special_tokens=plan.skip_special_tokens)
        self._matcher = StopMatcher(plan.stops)
        self._num_tokens = 0
        self._num_decoded_chars = 0
        self._num_shown_chars = 0
        self._held_entries: deque[TokenEntry] = deque()

    def push(self, delta: TokenDelta) -> ChoiceDelta:
        """What this delta adds. With a `finish_reason` it is the last, also where the backend would go on."""
        # The prompt is counted once, and so is what of it was cached.
        num_cached_tokens = delta.num_cached_tokens if self._plan.is_first_sibling else None
        result = ChoiceDelta(self._plan.index, "", len(delta.token_ids), num_cached_tokens)
        shown_ids = delta.token_ids
        if delta.stop_token_id is not None and shown_ids and shown_ids[-1] == delta.stop_token_id:
            shown_ids = shown_ids[:-1]
        stop = self._add_tokens(shown_ids, delta.logprobs, result)
        self._num_tokens += len(delta.token_ids) - len(shown_ids)
        if stop is None and delta.finish_reason is not None:
            stop = self._finish(delta, result)
        if stop is not None:
            result.finish_reason, result.stop_reason = "stop", stop
        self._release_entries(result)
        return result

    def _add_tokens(
        self, token_ids: list[int], logprobs: list[TokenLogprobs] | None, result: ChoiceDelta
    ) -> str | None:
        """Append the tokens' text to `result`; return the stop string that ended it, if any did."""
        one_by_one = logprobs is not None or self._num_tokens < self._sampling.min_tokens
        runs = [[i] for i in token_ids] if one_by_one else [token_ids]
        for position, run in enumerate(runs):
            text = self._detokenizer.push(run)
            if logprobs is not None:
                self._hold_entry(text, logprobs[position])
            self._num_tokens += len(run)
            stop = self._show(text, result)
            if stop is not None:
                return stop
        return None

    def _show(self, text: str, result: ChoiceDelta) -> str | None:
        self._num_decoded_chars += len(text)
        if self._num_tokens <= self._sampling.min_tokens:
            result.text += text  # stop strings count from min_tokens on only
            return None
        match = self._matcher.push(text)
        result.text += match.text
        return match.stop

    def _finish(self, delta: TokenDelta, result: ChoiceDelta) -> str | None:
        """The backend ended the sequence: show what was held back, unless a stop string is in it after all."""
        tail = self._detokenizer.flush()
        if tail and self._held_entries:  # the tokens of a character cut short; their entries wait for its text
            self._held_entries[-1] = self._held_entries[-1]._replace(text=self._held_entries[-1].text + tail)
        stop = self._show(tail, result)
        if stop is None:
            match = self._matcher.flush()
            result.text += match.text
            stop = match.stop
        if stop is None:
            if delta.finish_reason is FinishReason.ABORT:
                raise WorkerError("The generation was aborted.")
            result.finish_reason = str(delta.finish_reason)
            if delta.stop_token_id in self._sampling.stop_token_ids:
                result.stop_reason = delta.stop_token_id
        return stop

    def _hold_entry(self, text: str, logprobs: TokenLogprobs) -> None:
        top = [
            (text if token_id == logprobs.token_id else self._tokenizer.token_text(token_id), max(logprob, MIN_LOGPROB))
            for token_id, logprob in logprobs.top
        ]
        logprob = max(logprobs.logprob, MIN_LOGPROB)
        self._held_entries.append(TokenEntry(text, logprob, top, self._num_decoded_chars))

    def _release_entries(self, result: ChoiceDelta) -> None:
        """Move the entries of shown text to `result`: a token's entry never goes ahead of its text."""
        self._num_shown_chars += len(result.text)
        is_cut = isinstance(result.stop_reason, str)
        releases_all = result.finish_reason is not None and not is_cut
        while self._held_entries and (releases_all or self._held_entries[0].offset < self._num_shown_chars):
            result.entries.append(self._held_entries.popleft())


def run_choices(
    backend: Backend, plans: Sequence[ChoicePlan], tokenizer: Tokenizer, new_clock: Callable[[], RequestClock]
) -> Stream[ChoiceDelta]:
    """Stream the deltas of all choices as they arrive, each choice ending with a `finish_reason`.

    Siblings start after the first token of the first one, so that they find its prompt cached. Closing the stream
    cancels every choice; the first error of any choice ends all.
    """
    choices = [_Choice(backend, plan, tokenizer, new_clock()) for plan in plans]
    return choices[0] if len(choices) == 1 else _Choices(plans, choices)


class _Choice(Stream[ChoiceDelta]):
    """One choice, up to its `finish_reason`. The backend is asked when it is first read."""

    def __init__(self, backend: Backend, plan: ChoicePlan, tokenizer: Tokenizer, clock: RequestClock) -> None:
        self._backend = backend
        self._plan = plan
        self._text = ChoiceText(plan, tokenizer)
        self._clock = clock
        self._deltas: Stream[TokenDelta] | None = None
        self._has_ended = False

    async def read_into(self, sink: Callable[[list[ChoiceDelta]], bool]) -> bool:
        """As for any stream."""

        def convert(deltas: list[TokenDelta]) -> bool:
            return sink(self._converted(deltas)) and not self._has_ended

        if self._plan.request.sampling.max_tokens == 0 and not self._has_ended:  # the prompt is echoed, nothing more
            self._has_ended = True
            sink([ChoiceDelta(self._plan.index, "", 0, finish_reason="length")])
        elif not self._has_ended:
            is_over = await self._open().read_into(convert)
            if is_over and not self._has_ended:
                raise WorkerError(NO_REASON)
        if self._has_ended:
            await self.aclose()
        return self._has_ended

    async def aclose(self) -> None:
        """Cancel the choice if it still runs."""
        self._has_ended = True
        deltas, self._deltas = self._deltas, None
        if deltas is not None:
            self._clock.stop()
            await deltas.aclose()

    def _open(self) -> Stream[TokenDelta]:
        if self._deltas is None:
            self._deltas = self._backend.serve(self._plan.request)
            self._clock.start()
        return self._deltas

    def _converted(self, deltas: list[TokenDelta]) -> list[ChoiceDelta]:
        converted: list[ChoiceDelta] = []
        for delta in deltas:
            result = self._text.push(delta)
            result.decision = delta.decision
            self._clock.record(result.num_tokens, result.num_cached_tokens)
            converted.append(result)
            if result.finish_reason is not None:  # maybe by a stop string: the backend would go on
                self._has_ended = True
                break
        return converted


class _Choices(Stream[ChoiceDelta]):
    """Several choices, each read by a task of its own."""

    def __init__(self, plans: Sequence[ChoicePlan], choices: Sequence[_Choice]) -> None:
        self._plans = plans
        self._choices = choices
        self._num_open = len(choices)
        self._queue: DeltaQueue[ChoiceDelta] = DeltaQueue()
        self._has_room = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def read_into(self, sink: Callable[[list[ChoiceDelta]], bool]) -> bool:
        """As for any stream."""

        def pass_on(deltas: list[ChoiceDelta]) -> bool:
            self._has_room.set()
            self._num_open -= sum(delta.finish_reason is not None for delta in deltas)
            return sink(deltas) and self._num_open > 0

        if not self._tasks:
            self._start()
        if self._num_open:
            await self._queue.read_into(pass_on)
        return not self._num_open

    async def aclose(self) -> None:
        """Cancel the choices that still run."""
        self._num_open = 0
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self) -> None:
        starting = asyncio.Lock()
        first_token = asyncio.Event()
        for plan, choice in zip(self._plans, self._choices, strict=True):
            if plan.is_first_sibling:
                first_token = asyncio.Event()
            run = self._run(choice, starting, first_token, is_first=plan.is_first_sibling)
            self._tasks.append(asyncio.create_task(run))

    async def _run(
        self, choice: _Choice, starting: asyncio.Lock, first_token: asyncio.Event, *, is_first: bool
    ) -> None:
        """Read one choice into the queue. The first sibling sets `first_token`, and the others wait for it."""

        def put(deltas: list[ChoiceDelta]) -> bool:
            for delta in deltas:
                self._queue.put(delta)
                if delta.num_tokens:
                    first_token.set()
            self._queue.deliver()
            return self._queue.num_items < QUEUED_DELTAS

        try:
            if not is_first:
                await first_token.wait()
            async with starting:  # one per iteration of the event loop: placing 2,048 at once would take a second
                await asyncio.sleep(0)
            async with aclosing(choice):
                while not await choice.read_into(put):
                    while self._queue.num_items >= QUEUED_DELTAS:
                        self._has_room.clear()
                        await self._has_room.wait()
        except Exception as exc:  # raised again by the reader of the queue
            self._queue.fail(exc)
        finally:
            first_token.set()  # also after a first sibling that ended without a token
