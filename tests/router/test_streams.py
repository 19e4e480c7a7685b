from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from tandem.frontend.http.metrics import FrontendMetrics, RequestClock
from tandem.frontend.openai.choice_text import ChoiceDelta, ChoicePlan
from tandem.frontend.openai.choices import run_choices
from tandem.protocol.digest import EVERYONE
from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import SequenceDelta
from tandem.protocol.sampling import SamplingParams
from tandem.router.backend import GenerateRequest
from tandem.router.callback_scheduler import CallbackScheduler
from tandem.router.streams import DeltaQueue, QueueStream, Stream
from tandem.text.stop_strings import StopStrings
from tandem.text.tokenizer import Tokenizer
from tests.support.event_loop import iteration
from tests.support.fake_backend import FakeBackend, delta_of

END = -1


class Doubled(QueueStream[int]):
    """Twice each number up to END; counts what is asked of it."""

    def __init__(self, scheduler: CallbackScheduler) -> None:
        self.queue: DeltaQueue[int] = DeltaQueue(scheduler)
        super().__init__(self.queue)
        self.num_begun = self.num_closed = 0

    async def _begin(self) -> None:
        self.num_begun += 1

    def _convert(self, items: list[int]) -> list[int]:
        self._has_ended = END in items
        return [2 * item for item in items if item != END]

    def close(self) -> None:
        self.num_closed += 1


async def iterations() -> None:
    for _ in range(6):
        await iteration()


async def read_all(stream: Stream[int], sink: Callable[[list[int]], bool]) -> int:
    """Read to the end; how many calls of `read_into` it took."""
    num_calls = 1
    while not await stream.read_into(sink):
        num_calls += 1
    return num_calls


# -- the queue


async def test_items_taken_before_their_delivery_is_due_delay_no_other_queue() -> None:
    scheduler = CallbackScheduler(1, 1)
    taken: list[DeltaQueue[int]] = [DeltaQueue(scheduler) for _ in range(100)]
    for queue in taken:
        queue.put(1)
        assert await queue.take() == [1]
        await iteration()
        queue.put(2)  # is scheduled
        assert await queue.take() == [2]
    waiting: DeltaQueue[int] = DeltaQueue(scheduler)
    waiting.put(1)
    await waiting.take()
    await iteration()
    taking = asyncio.create_task(waiting.take())
    await iteration()
    waiting.put(2)
    for _ in range(3):
        await iteration()
    assert taking.done()


async def test_a_first_item_is_not_scheduled_and_later_ones_arrive_together() -> None:
    scheduler = CallbackScheduler(1, 1)
    queues: list[DeltaQueue[str]] = [DeltaQueue(scheduler) for _ in range(3)]
    taken: list[tuple[int, list[str]]] = []

    def read(i: int) -> asyncio.Task[bool]:
        def sink(items: list[str]) -> bool:
            taken.append((i, items))
            return True

        return asyncio.create_task(queues[i].read_into(sink))

    tasks = [read(i) for i in range(3)]
    await iteration()
    for queue in queues:
        queue.put("first")
    await iteration()
    assert taken == [(i, ["first"]) for i in range(3)]
    taken.clear()
    for queue in queues:
        queue.put("second")
    await iteration()  # delivers that of the first queue
    queues[1].put("third")
    for _ in range(4):
        await iteration()
    assert taken == [(0, ["second"]), (1, ["second", "third"]), (2, ["second"])]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_items_before_anyone_reads_and_after_a_cancelled_read_are_kept() -> None:
    queue: DeltaQueue[int] = DeltaQueue(CallbackScheduler())
    queue.put(1)
    queue.put(2)
    assert await queue.take() == [1, 2]
    waiting = asyncio.create_task(queue.take())
    await iteration()
    waiting.cancel()
    queue.put(3)
    await asyncio.gather(waiting, return_exceptions=True)
    for _ in range(3):
        await iteration()
    assert await queue.take() == [3]
    assert queue.num_items == 0


@pytest.mark.parametrize("scheduler", [None, CallbackScheduler()])
async def test_an_error_follows_the_items_and_only_the_first_counts(scheduler: CallbackScheduler | None) -> None:
    queue: DeltaQueue[int] = DeltaQueue(scheduler)
    queue.put(1)
    queue.fail(ValueError("first"))
    queue.fail(ValueError("second"))
    queue.put(2)
    assert await queue.take() == [1, 2]
    with pytest.raises(ValueError, match="first"):
        await queue.take()


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60), st.integers(1, 4))
async def test_every_item_is_delivered_once_and_in_order(puts: list[tuple[int, bool]], num_calls: int) -> None:
    scheduler = CallbackScheduler(num_calls, num_calls)
    queues: list[DeltaQueue[int]] = [DeltaQueue(scheduler) for _ in range(4)]
    taken: list[list[int]] = [[] for _ in queues]

    async def read(i: int) -> None:
        while True:
            taken[i] += await queues[i].take()

    tasks = [asyncio.create_task(read(i)) for i in range(len(queues))]
    for number, (i, then_waits) in enumerate(puts):
        queues[i].put(number)
        if then_waits:
            await iteration()
    for _ in range(2 * len(puts) + 4):
        await iteration()
    assert taken == [[n for n, (to, _) in enumerate(puts) if to == i] for i in range(len(queues))]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# -- the stream


async def test_items_are_pushed_without_the_readers_task() -> None:
    stream = Doubled(CallbackScheduler())
    got: list[tuple[int, asyncio.Task[None] | None]] = []

    def sink(items: list[int]) -> bool:
        got.extend((item, asyncio.current_task()) for item in items)
        return True

    reading = asyncio.create_task(read_all(stream, sink))
    await iterations()
    for number in (1, 2):
        stream.queue.put(number)
        await iterations()
    assert [item for item, _ in got] == [2, 4]
    assert {task for _, task in got} == {None}  # in a callback
    stream.queue.put(3)
    stream.queue.put(END)
    assert await reading == 1
    assert [item for item, _ in got] == [2, 4, 6]
    assert stream.num_begun == 1


@pytest.mark.parametrize("is_pushed", [True, False])
async def test_an_error_follows_the_items_before_it_and_closes(is_pushed: bool) -> None:
    stream = Doubled(CallbackScheduler())
    got: list[int] = []
    stream.queue.put(1)
    stream.queue.fail(ValueError("on purpose"))

    async def read() -> None:
        if is_pushed:
            await stream.read_into(lambda items: got.extend(items) or True)  # type: ignore[func-returns-value]
        while items := await stream.take():
            got.extend(items)

    with pytest.raises(ValueError, match="on purpose"):
        await read()
    assert (got, stream.num_closed) == ([2], 1)


@pytest.mark.parametrize("error", [RuntimeError("the reader's own"), StopIteration()])
async def test_what_a_sink_raises_is_raised_in_its_readers_task(error: Exception) -> None:
    stream = Doubled(CallbackScheduler())

    def sink(_: list[int]) -> bool:
        raise error

    reading = asyncio.create_task(stream.read_into(sink))
    await iterations()
    stream.queue.put(1)
    with pytest.raises(RuntimeError, match=r"the reader|StopIteration"):
        await reading
    assert stream.num_closed == 1


@pytest.mark.parametrize("is_pushed", [True, False])
async def test_a_cancelled_reader_closes_it(is_pushed: bool) -> None:
    stream = Doubled(CallbackScheduler())
    reading = asyncio.ensure_future(stream.read_into(lambda _: True) if is_pushed else stream.take())
    await iterations()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert stream.num_closed == 1
    stream.queue.put(1)  # nobody reads it
    await iterations()


async def test_closed_before_it_began_it_never_begins() -> None:
    stream = Doubled(CallbackScheduler())
    await stream.aclose()
    assert await stream.take() == []
    assert stream.num_begun == 0


@given(st.lists(st.sampled_from(["put", "wait", "push", "take"]), max_size=40), st.integers(1, 5))
async def test_however_it_is_read_everything_arrives_once_and_in_order(steps: list[str], every: int) -> None:
    stream = Doubled(CallbackScheduler(1, 1))
    got: list[int] = []
    num_put = 0

    def sink(items: list[int]) -> bool:
        got.extend(items)
        return len(got) % every != 0

    async def take() -> None:
        got.extend(await stream.take())

    reading: asyncio.Future[object] | None = None
    for step in steps:
        if step == "put":
            stream.queue.put(num_put)
            num_put += 1
        elif step != "wait" and (reading is None or reading.done()):
            reading = asyncio.ensure_future(stream.read_into(sink) if step == "push" else take())
        await iteration()
    stream.queue.put(END)
    if reading is not None:
        await asyncio.gather(reading, return_exceptions=True)
    await read_all(stream, sink)
    assert (got, stream.num_begun) == ([2 * number for number in range(num_put)], 1)
    assert stream.num_closed, "it is closed once it has ended"
    assert await stream.read_into(sink), "it stays at its end"
    assert await stream.take() == []


async def test_an_error_after_what_the_reader_has_taken_is_for_its_next_call() -> None:
    stream = Doubled(CallbackScheduler())
    reading = asyncio.create_task(stream.read_into(lambda _: False))  # a slow reader
    await iterations()
    stream.queue.put(1)
    stream.queue.fail(ValueError("on purpose"))
    assert not await reading
    assert stream.num_closed == 0
    with pytest.raises(ValueError, match="on purpose"):
        await stream.read_into(lambda _: True)


async def test_an_answer_ended_by_a_stop_string_has_no_error_after_it(tokenizer: Tokenizer) -> None:
    class Tokens(QueueStream[SequenceDelta]):
        num_closed = 0

        async def _begin(self) -> None:
            pass

        def _convert(self, items: list[SequenceDelta]) -> list[SequenceDelta]:
            return items

        def close(self) -> None:
            self.num_closed += 1

    queue: DeltaQueue[SequenceDelta] = DeltaQueue(CallbackScheduler())
    tokens = Tokens(queue)
    backend = FakeBackend(tokenizer)
    backend.serve = lambda _: tokens  # type: ignore[method-assign]
    request = GenerateRequest("r", [1], SamplingParams(max_tokens=50), EVERYONE)
    metrics = FrontendMetrics(CollectorRegistry())
    deltas = run_choices(
        backend, [ChoicePlan(0, request, StopStrings(["world"]))], tokenizer, lambda: RequestClock(metrics, 0.0)
    )
    got: list[ChoiceDelta] = []
    reading = asyncio.create_task(deltas.read_into(lambda deltas: got.extend(deltas) or True))  # type: ignore[func-returns-value]
    await iterations()
    queue.put(delta_of(tokenizer.encode("hello world", add_special_tokens=False)))
    queue.fail(WorkerError("dead"))
    assert await reading
    assert (got[-1].finish_reason, got[-1].stop_reason, tokens.num_closed) == ("stop", "world", 1)
    assert await deltas.read_into(lambda _: True)
