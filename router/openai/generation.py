"""One client request as a set of sequences: from the backend's token deltas to text, choice by choice.

Knows stop strings, held-back text, logprob entries and siblings; knows nothing of JSON shapes or HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import FinishReason, TokenLogprobs
from tandem.router.backend import Backend, GenerateRequest, TokenDelta
from tandem.router.http.metrics import RequestClock
from tandem.router.streams import GeneratorStream, Stream
from tandem.router.text.detokenizer import StopMatcher, StopStrings
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
    """Deltas of all choices as they come, each choice ending with a `finish_reason`.

    Siblings start once the first one has its first token, so that they find its prompt cached. Closing the stream
    cancels every choice; the first error of any ends all.
    """
    if len(plans) == 1:
        return _choice(backend, plans[0], tokenizer, new_clock())
    return GeneratorStream(_run_many(backend, plans, tokenizer, new_clock))


def _choice(backend: Backend, plan: ChoicePlan, tokenizer: Tokenizer, clock: RequestClock) -> Stream[ChoiceDelta]:
    if plan.request.sampling.max_tokens == 0:
        return GeneratorStream(_no_tokens(plan))
    return _Choice(backend, plan, tokenizer, clock)


async def _no_tokens(plan: ChoicePlan) -> AsyncGenerator[ChoiceDelta, None]:
    """The prompt is to be repeated, and nothing more."""
    yield ChoiceDelta(plan.index, "", 0, finish_reason="length")


class _Choice(Stream[ChoiceDelta]):
    """One choice, up to its `finish_reason`. Nothing is asked of the backend before it is read."""

    def __init__(self, backend: Backend, plan: ChoicePlan, tokenizer: Tokenizer, clock: RequestClock) -> None:
        self._backend = backend
        self._plan = plan
        self._text = ChoiceText(plan, tokenizer)
        self._clock = clock
        self._deltas: Stream[TokenDelta] | None = None
        self._has_ended = False

    async def __anext__(self) -> ChoiceDelta:
        if self._has_ended:
            raise StopAsyncIteration
        try:
            return self._seen(await anext(self._opened()))
        except StopAsyncIteration:
            raise WorkerError(NO_REASON) from None

    async def pour(self, into: Callable[[ChoiceDelta], bool]) -> bool:
        """As the backend's stream does."""
        if not self._has_ended:
            is_over = await self._opened().pour(lambda delta: into(self._seen(delta)) and not self._has_ended)
            if is_over and not self._has_ended:
                raise WorkerError(NO_REASON)
        if self._has_ended:
            await self.aclose()
        return self._has_ended

    async def aclose(self) -> None:
        """Cancel what still runs of it."""
        self._has_ended = True
        deltas, self._deltas = self._deltas, None
        if deltas is not None:
            self._clock.stop()
            await deltas.aclose()

    def _opened(self) -> Stream[TokenDelta]:
        if self._deltas is None:
            self._deltas = self._backend.serve(self._plan.request)
            self._clock.start()
        return self._deltas

    def _seen(self, delta: TokenDelta) -> ChoiceDelta:
        result = self._text.push(delta)
        result.decision = delta.decision
        self._clock.record(result.num_tokens, result.num_cached_tokens)
        self._has_ended = result.finish_reason is not None
        return result


async def _run_many(
    backend: Backend, plans: Sequence[ChoicePlan], tokenizer: Tokenizer, new_clock: Callable[[], RequestClock]
) -> AsyncGenerator[ChoiceDelta, None]:
    queue: asyncio.Queue[ChoiceDelta | Exception] = asyncio.Queue(QUEUED_DELTAS)
    tasks: list[asyncio.Task[None]] = []
    turns = asyncio.Lock()
    started = asyncio.Event()
    for plan in plans:
        if plan.is_first_sibling:
            started = asyncio.Event()
        choice = _choice(backend, plan, tokenizer, new_clock())
        wait_for = None if plan.is_first_sibling else started
        tasks.append(asyncio.create_task(_pump(choice, wait_for, started, turns, queue)))
    num_open = len(plans)
    try:
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            num_open -= item.finish_reason is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    choice: Stream[ChoiceDelta],
    wait_for: asyncio.Event | None,
    started: asyncio.Event,
    turns: asyncio.Lock,
    queue: asyncio.Queue[ChoiceDelta | Exception],
) -> None:
    """Run one of several choices into the queue they share, and set `started` at its first token."""
    try:
        if wait_for is not None:
            await wait_for.wait()
        async with turns:  # each begins in a turn of the event loop: to place 2,048 at once would stop it for a second
            await asyncio.sleep(0)
        async with aclosing(choice) as deltas:
            async for delta in deltas:
                if delta.num_tokens:
                    started.set()
                await queue.put(delta)
    except Exception as exc:  # raised again by the reader of the queue
        await queue.put(exc)
    finally:
        started.set()  # a first sibling that ends without a token must not leave the others waiting
