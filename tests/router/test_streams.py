from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tandem.protocol.digest import EVERYONE
from tandem.protocol.errors import WorkerError
from tandem.protocol.sampling import SamplingParams
from tandem.router.backend import GenerateRequest, TokenDelta
from tandem.router.http.metrics import EdgeMetrics, RequestClock
from tandem.router.inbox import CallbackScheduler, Inbox
from tandem.router.openai.generation import ChoiceDelta, ChoicePlan, run_choices
from tandem.router.streams import GeneratorStream, InboxStream, Stream
from tandem.router.text.detokenizer import StopStrings
from tandem.router.text.tokenizer import Tokenizer
from tests.support.fake_backend import FakeBackend

pytestmark = pytest.mark.anyio

END = -1
FAIL = -2


class Doubled(InboxStream[int, int]):
    """Twice each number, until END ends it or FAIL fails it; notes what is asked of it."""

    def __init__(self, turns: CallbackScheduler) -> None:
        self.inbox: Inbox[int] = Inbox(turns)
        super().__init__(self.inbox)
        self.num_begun = self.num_closed = 0
        self.waits: list[str] = []

    async def _begin(self) -> None:
        self.num_begun += 1

    def _make(self, items: list[int]) -> None:
        for item in items:
            if item == FAIL:
                self._error = ValueError("as told")
            elif item == END:
                self._has_ended = True
            else:
                self._due.append(2 * item)

    def close(self) -> None:
        self.num_closed += 1

    def _begin_wait(self) -> None:
        self.waits.append("begin")

    def _end_wait(self) -> None:
        self.waits.append("end")


async def turns_pass() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def pour_all(stream: Stream[int], into: Callable[[int], bool]) -> int:
    """Pour on until the end; how often it had to be asked."""
    num_asked = 1
    while not await stream.pour(into):
        num_asked += 1
    return num_asked


async def test_items_are_handed_over_without_the_readers_task() -> None:
    stream = Doubled(CallbackScheduler())
    got: list[tuple[int, asyncio.Task[None] | None]] = []

    def into(item: int) -> bool:
        got.append((item, asyncio.current_task()))
        return True

    pouring = asyncio.create_task(pour_all(stream, into))
    await turns_pass()
    for number in (1, 2):
        stream.inbox.put(number)
        await turns_pass()
    assert [item for item, _ in got] == [2, 4]
    assert {task for _, task in got} == {None}  # a callback's
    stream.inbox.put(3)
    stream.inbox.put(END)
    assert await pouring == 1
    assert [item for item, _ in got] == [2, 4, 6]
    assert (stream.num_begun, stream.waits[0], stream.waits[-1]) == (1, "begin", "end")


async def test_a_reader_that_says_no_gets_the_rest_when_it_asks_again() -> None:
    stream = Doubled(CallbackScheduler())
    got: list[int] = []

    def into(item: int) -> bool:
        got.append(item)
        return item != 4

    for number in (1, 2, 3):
        stream.inbox.put(number)
    assert not await stream.pour(into)
    assert got == [2, 4]
    stream.inbox.put(END)
    assert await stream.pour(into)
    assert got == [2, 4, 6]
    assert await stream.pour(into)  # it stays at its end
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


@pytest.mark.parametrize("is_poured", [True, False])
async def test_an_error_comes_behind_what_came_before_it_and_closes(is_poured: bool) -> None:
    stream = Doubled(CallbackScheduler())
    got: list[int] = []
    stream.inbox.put(1)
    stream.inbox.put(FAIL)

    async def read() -> None:
        if is_poured:
            await stream.pour(lambda item: got.append(item) or True)  # type: ignore[func-returns-value]
        async for item in stream:
            got.append(item)

    with pytest.raises(ValueError, match="as told"):
        await read()
    assert got == [2]
    assert stream.num_closed == 1


async def test_what_the_reader_raises_in_the_callback_comes_out_of_its_task() -> None:
    stream = Doubled(CallbackScheduler())

    def into(_: int) -> bool:
        raise RuntimeError("the reader's own")

    pouring = asyncio.create_task(stream.pour(into))
    await turns_pass()
    stream.inbox.put(1)
    with pytest.raises(RuntimeError, match="the reader's own"):
        await pouring
    assert stream.num_closed == 1


@pytest.mark.parametrize("is_poured", [True, False])
async def test_a_cancelled_reader_closes_it(is_poured: bool) -> None:
    stream = Doubled(CallbackScheduler())
    work = stream.pour(lambda _: True) if is_poured else anext(stream)
    reading = asyncio.ensure_future(work)
    await turns_pass()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert stream.num_closed == 1
    stream.inbox.put(1)  # nobody wants it
    await turns_pass()


async def test_closed_before_it_began_it_never_begins() -> None:
    stream = Doubled(CallbackScheduler())
    await stream.aclose()
    assert [item async for item in stream] == []
    assert stream.num_begun == 0


async def test_a_generator_is_a_stream_too() -> None:
    is_closed = False

    async def count() -> AsyncGenerator[int, None]:
        nonlocal is_closed
        try:
            for number in range(4):
                yield number
        finally:
            is_closed = True

    stream = GeneratorStream(count())
    got = [await anext(stream)]
    assert not await stream.pour(lambda item: got.append(item) or item < 2)  # type: ignore[func-returns-value]
    assert got == [0, 1, 2]
    await stream.aclose()
    assert is_closed


@given(st.lists(st.sampled_from(["put", "turn", "pour", "next"]), max_size=40), st.integers(1, 5))
def test_however_it_is_read_all_comes_once_and_in_order(steps: list[str], every: int) -> None:
    async def scenario() -> None:
        stream = Doubled(CallbackScheduler(1, 1))
        got: list[int] = []
        num_put = 0

        def into(item: int) -> bool:
            got.append(item)
            return len(got) % every != 0

        async def one() -> None:
            got.append(await anext(stream))

        reading: asyncio.Future[object] | None = None
        for step in steps:
            if step == "put":
                stream.inbox.put(num_put)
                num_put += 1
            elif step != "turn" and (reading is None or reading.done()):
                reading = asyncio.ensure_future(stream.pour(into) if step == "pour" else one())
            await asyncio.sleep(0)
        stream.inbox.put(END)
        if reading is not None:
            await asyncio.gather(reading, return_exceptions=True)
        await pour_all(stream, into)
        assert got == [2 * number for number in range(num_put)]

    asyncio.run(scenario())


async def test_an_error_behind_what_the_reader_has_taken_is_for_its_next_call() -> None:
    stream = Doubled(CallbackScheduler())
    pouring = asyncio.create_task(stream.pour(lambda _: False))  # a slow reader
    await turns_pass()
    stream.inbox.put(1)
    stream.inbox.put(FAIL)
    assert not await pouring
    assert stream.num_closed == 0
    with pytest.raises(ValueError, match="as told"):
        await stream.pour(lambda _: True)


async def test_read_to_its_end_it_is_closed() -> None:
    stream = Doubled(CallbackScheduler())
    pouring = asyncio.create_task(stream.pour(lambda _: False))
    await turns_pass()
    stream.inbox.put(1)
    stream.inbox.put(END)
    assert await pouring
    assert stream.num_closed == 1


async def test_an_answer_ended_by_a_stop_string_has_no_error_behind_it(tokenizer: Tokenizer) -> None:
    class Tokens(InboxStream[TokenDelta | WorkerError, TokenDelta]):
        num_closed = 0

        async def _begin(self) -> None:
            pass

        def _make(self, items: list[TokenDelta | WorkerError]) -> None:
            for item in items:
                if isinstance(item, WorkerError):
                    self._error = item
                else:
                    self._due.append(item)

        def close(self) -> None:
            self.num_closed += 1

    inbox: Inbox[TokenDelta | WorkerError] = Inbox(CallbackScheduler())
    tokens = Tokens(inbox)
    backend = FakeBackend(tokenizer)
    backend.serve = lambda _: tokens  # type: ignore[method-assign]
    request = GenerateRequest("r", [1], SamplingParams(max_tokens=50), EVERYONE)
    metrics = EdgeMetrics(CollectorRegistry())
    deltas = run_choices(
        backend, [ChoicePlan(0, request, StopStrings(["world"]))], tokenizer, lambda: RequestClock(metrics, 0.0)
    )
    got: list[ChoiceDelta] = []
    pouring = asyncio.create_task(deltas.pour(lambda delta: got.append(delta) or True))  # type: ignore[func-returns-value]
    await turns_pass()
    inbox.put(TokenDelta(tokenizer.encode("hello world", add_special_tokens=False)))
    inbox.put(WorkerError("dead"))
    assert await pouring
    assert (got[-1].finish_reason, got[-1].stop_reason, tokens.num_closed) == ("stop", "world", 1)
    assert await deltas.pour(lambda _: True)
