from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.inbox import CallbackScheduler, Inbox

pytestmark = pytest.mark.anyio

T = TypeVar("T")


async def turn() -> None:
    """One turn of the event loop: what is due now is called."""
    await asyncio.sleep(0)


def noting(made: list[T], item: T) -> bool:
    """A call that has something to do."""
    made.append(item)
    return True


async def test_a_few_calls_are_made_in_a_turn_in_the_order_they_were_asked_for() -> None:
    made: list[int] = []
    turns = CallbackScheduler(3, 3)
    for number in range(8):
        turns.add(partial(noting, made, number))
    for expected in (0, 3, 6, 8, 8):
        assert made == list(range(expected))
        await turn()


async def test_what_was_taken_before_its_turn_holds_up_nobody() -> None:
    turns = CallbackScheduler(1, 1)
    ended: list[Inbox[int]] = [Inbox(turns) for _ in range(100)]
    for inbox in ended:
        inbox.put(1)
        inbox.put(2)  # has a turn to come
        assert await inbox.take() == [1, 2]
    waiting: Inbox[int] = Inbox(turns)
    waiting.put(1)
    await waiting.take()
    taking = asyncio.create_task(waiting.take())
    await turn()
    waiting.put(2)
    for _ in range(3):
        await turn()
    assert taking.done()


async def test_the_more_calls_wait_the_more_are_made_in_a_turn() -> None:
    made: list[int] = []
    turns = CallbackScheduler(least=1, most=4)
    for number in range(100):
        turns.add(partial(noting, made, number))
    sizes = []
    while len(made) < 100:
        before = len(made)
        await turn()
        sizes.append(len(made) - before)
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (4, 1)


async def test_calls_may_ask_for_more_and_no_turn_is_lost() -> None:
    made: list[str] = []
    turns = CallbackScheduler(1, 1)

    def again(name: str) -> bool:
        made.append(name)
        if len(name) < 3:
            turns.add(lambda: again(name + "+"))
        return True

    turns.add(lambda: again("a"))
    for _ in range(4):
        await turn()
    assert made == ["a", "a+", "a++"]
    turns.add(lambda: again("b++"))  # after it was empty
    await turn()
    assert made[-1] == "b++"


async def test_a_first_item_waits_for_no_turn_and_later_ones_come_together() -> None:
    turns = CallbackScheduler(1, 1)
    inboxes: list[Inbox[str]] = [Inbox(turns) for _ in range(3)]
    taken: list[tuple[int, list[str]]] = []

    async def read(i: int) -> None:
        while True:
            taken.append((i, await inboxes[i].take()))

    tasks = [asyncio.create_task(read(i)) for i in range(3)]
    await turn()
    for inbox in inboxes:
        inbox.put("first")
    await turn()
    assert taken == [(i, ["first"]) for i in range(3)]
    taken.clear()
    for inbox in inboxes:
        inbox.put("second")
    await turn()  # the first one's task is woken
    inboxes[1].put("third")
    for _ in range(4):
        await turn()
    assert taken == [(0, ["second"]), (1, ["second", "third"]), (2, ["second"])]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_items_before_anyone_waits_and_after_a_cancelled_wait_are_kept() -> None:
    inbox: Inbox[int] = Inbox(CallbackScheduler())
    inbox.put(1)
    inbox.put(2)
    assert await inbox.take() == [1, 2]
    waiting = asyncio.create_task(inbox.take())
    await turn()
    waiting.cancel()
    inbox.put(3)
    await asyncio.gather(waiting, return_exceptions=True)
    for _ in range(3):
        await turn()
    assert await inbox.take() == [3]
    assert inbox._items == []


async def test_a_call_that_raises_stops_nobody_else() -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    made: list[str] = []
    turns = CallbackScheduler(2, 2)

    def fail() -> bool:
        raise RuntimeError("as told")

    for call in (fail, partial(noting, made, "second"), partial(noting, made, "third")):
        turns.add(call)
    for _ in range(4):
        await turn()
    assert made == ["second", "third"]
    assert [str(context["exception"]) for context in told] == ["as told"]


async def test_whatever_a_sink_raises_reaches_its_reader() -> None:
    inbox: Inbox[int] = Inbox(CallbackScheduler())
    pouring = asyncio.create_task(inbox.pour(lambda _: next(iter(()))))
    await turn()
    inbox.put(1)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await pouring


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60), st.integers(1, 4))
def test_every_item_is_taken_once_and_in_order(puts: list[tuple[int, bool]], per_turn: int) -> None:
    async def scenario() -> None:
        turns = CallbackScheduler(per_turn, per_turn)
        inboxes: list[Inbox[int]] = [Inbox(turns) for _ in range(4)]
        taken: list[list[int]] = [[] for _ in inboxes]

        async def read(i: int) -> None:
            while True:
                taken[i] += await inboxes[i].take()

        tasks = [asyncio.create_task(read(i)) for i in range(len(inboxes))]
        for number, (i, then_waits) in enumerate(puts):
            inboxes[i].put(number)
            if then_waits:
                await turn()
        for _ in range(2 * len(puts) + 4):
            await turn()
        assert taken == [[n for n, (to, _) in enumerate(puts) if to == i] for i in range(len(inboxes))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())


def run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner() as runner:
        runner.run(work)
