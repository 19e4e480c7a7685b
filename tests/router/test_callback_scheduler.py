from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, TypeVar

from tandem.router.callback_scheduler import CallbackScheduler
from tests.support.event_loop import iteration

T = TypeVar("T")


def noting(made: list[T], item: T) -> bool:
    """A call that has something to do."""
    made.append(item)
    return True


async def test_a_few_calls_are_made_per_iteration_in_the_order_they_were_added() -> None:
    made: list[int] = []
    scheduler = CallbackScheduler(3, 3)
    for number in range(8):
        scheduler.add(partial(noting, made, number))
    for expected in (0, 3, 6, 8, 8):
        assert made == list(range(expected))
        await iteration()


async def test_the_more_calls_wait_the_more_are_made_per_iteration() -> None:
    made: list[int] = []
    scheduler = CallbackScheduler(min_calls=1, max_calls=4)
    for number in range(100):
        scheduler.add(partial(noting, made, number))
    sizes = []
    while len(made) < 100:
        before = len(made)
        await iteration()
        sizes.append(len(made) - before)
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (4, 1)


async def test_calls_may_add_more_and_none_is_lost() -> None:
    made: list[str] = []
    scheduler = CallbackScheduler(1, 1)

    def again(name: str) -> bool:
        made.append(name)
        if len(name) < 3:
            scheduler.add(lambda: again(name + "+"))
        return True

    scheduler.add(lambda: again("a"))
    for _ in range(4):
        await iteration()
    assert made == ["a", "a+", "a++"]
    scheduler.add(lambda: again("b++"))  # after it was empty
    await iteration()
    assert made[-1] == "b++"


async def test_a_call_that_raises_stops_no_other() -> None:
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    made: list[str] = []
    scheduler = CallbackScheduler(2, 2)

    def fail() -> bool:
        raise RuntimeError("on purpose")

    for call in (fail, partial(noting, made, "second"), partial(noting, made, "third")):
        scheduler.add(call)
    for _ in range(4):
        await iteration()
    assert made == ["second", "third"]
    assert [str(context["exception"]) for context in logged] == ["on purpose"]
