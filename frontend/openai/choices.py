"""The choices of one client request: asks the backend for each, and streams their text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import accumulate, count

from typing_extensions import override

from tandem.frontend.http.metrics import RequestClock
from tandem.frontend.openai.choice_text import ChoiceDelta, ChoicePlan, ChoiceText
from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import SequenceDelta
from tandem.router.backend import Backend
from tandem.router.streams import DeltaQueue, Stream
from tandem.runtime.background import task_error
from tandem.text.tokenizer import Tokenizer

NO_REASON = "The generation ended without a reason."
MAX_QUEUED_DELTAS = 64  # for all choices of one request: a client that reads slower holds its backend back


def run_choices(
    backend: Backend, plans: Sequence[ChoicePlan], tokenizer: Tokenizer, new_clock: Callable[[], RequestClock]
) -> Stream[ChoiceDelta]:
    """Stream the deltas of all choices as they arrive, each choice ending with a `finish_reason`.

    Siblings wait in the backend for the first one, which computes their prompt. Closing the stream cancels every
    choice; the first error of any choice ends all.
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
        self.begins_after: asyncio.Event | None = None  # of a sibling: the first one has given a token, or has ended
        self._deltas: Stream[SequenceDelta] | None = None
        self._has_ended = False

    @override
    async def read_into(self, sink: Callable[[list[ChoiceDelta]], bool]) -> bool:
        def convert(deltas: list[SequenceDelta]) -> bool:
            return sink(self._converted(deltas)) and not self._has_ended

        plan, wants_more = self._plan, True
        is_known = plan.request.sampling.max_tokens == 0 or (plan.is_prompt_only and not plan.is_first_sibling)
        if is_known and not self._has_ended:  # so far only the prompt is echoed
            if self.begins_after is not None:
                await self.begins_after.wait()
            self._has_ended = True
            sink([self._end_of_prompt()])
        elif self._is_new and (plan.scored_prompt is not None or self.begins_after is not None):
            wants_more = sink(await self._take_first())
        if wants_more and not self._has_ended:
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

    @property
    def _is_new(self) -> bool:
        return self._deltas is None and not self._has_ended

    async def _take_first(self) -> list[ChoiceDelta]:
        """The first deltas, once the scores that came with them, or with those of the first sibling, are text."""
        deltas = await self._open().take()
        if not deltas:
            raise WorkerError(NO_REASON)
        if self.begins_after is not None:
            await self.begins_after.wait()
        elif self._plan.scored_prompt is not None:
            await self._plan.scored_prompt.fill(deltas[0].prompt_logprobs)
        return self._converted(deltas)

    def _open(self) -> Stream[SequenceDelta]:
        if self._deltas is None:
            self._deltas = self._backend.serve(self._plan.request)
            self._clock.start()
        return self._deltas

    def _end_of_prompt(
        self, num_cached_tokens: int | None = None, num_loaded_tokens: dict[str, int] | None = None
    ) -> ChoiceDelta:
        """The only delta of a choice that consists of its prompt."""
        token_ids: list[int] | None = [] if self._plan.shows_token_ids else None
        cached = (num_cached_tokens, num_loaded_tokens)
        self._clock.finish("length")
        return ChoiceDelta(self._plan.index, "", 0, *cached, finish_reason="length", token_ids=token_ids)

    def _converted(self, deltas: list[SequenceDelta]) -> list[ChoiceDelta]:
        first = deltas[0]
        if first.num_cached_tokens is not None and self._plan.is_first_sibling:
            self._clock.note_prompt(len(self._plan.request.token_ids), first.num_cached_tokens)
        if self._plan.is_prompt_only:  # the engine was asked for one token
            self._has_ended = True
            return [self._end_of_prompt(first.num_cached_tokens, first.num_loaded_tokens)]
        converted: list[ChoiceDelta] = []
        for delta in deltas:
            result = self._text.push(delta)
            result.decision = delta.decision
            self._clock.record(result.num_tokens)
            converted.append(result)
            if result.finish_reason is not None:  # maybe by a stop string: the backend would go on
                self._has_ended = True
                self._clock.finish(result.finish_reason)
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

    @override
    async def read_into(self, sink: Callable[[list[ChoiceDelta]], bool]) -> bool:
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
        are_first = [plan.is_first_sibling for plan in self._plans]
        prompts = accumulate(are_first)
        first_token = asyncio.Event()
        # The first sibling of a prompt is last: the backend takes those along that wait for it by then.
        for *_, number in sorted(zip(prompts, are_first, count(), strict=False)):
            choice = self._choices[number]
            choice.begins_after = None if are_first[number] else first_token
            task = asyncio.create_task(self._run(choice, starting, first_token))
            task.add_done_callback(partial(self._ended, first_token))
            self._tasks.append(task)
            if are_first[number]:
                first_token = asyncio.Event()

    def _ended(self, first_token: asyncio.Event, task: asyncio.Task[None]) -> None:
        """A choice has been read, or could not be: raise its error to the reader."""
        if (error := task_error(task)) is not None:
            self._queue.fail(error)
        first_token.set()  # also after a first sibling that ended without a token

    async def _run(self, choice: _Choice, starting: asyncio.Lock, first_token: asyncio.Event) -> None:
        """Read one choice into the queue. The tokens of siblings follow the first token of the first one."""

        def put(deltas: list[ChoiceDelta]) -> bool:
            for delta in deltas:
                self._queue.put(delta)
                if delta.num_tokens:
                    first_token.set()
            self._queue.deliver()
            return self._queue.num_items < MAX_QUEUED_DELTAS

        async with starting:  # one per iteration of the event loop: placing 2,048 at once would take a second
            await asyncio.sleep(0)
        async with aclosing(choice):
            while not await choice.read_into(put):
                while self._queue.num_items >= MAX_QUEUED_DELTAS:
                    self._has_room.clear()
                    await self._has_room.wait()
