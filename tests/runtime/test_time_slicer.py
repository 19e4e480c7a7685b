from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tandem.runtime.time_slicer import BUDGET_S, TimeSlicer
from tests.support.waiting import eventually


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def work_of(clock: Clock, done: list[int], number: int, took_s: float) -> object:
    clock.now_s += took_s
    return done.append(number)


async def test_an_iteration_ends_with_the_piece_that_exceeds_its_time() -> None:
    clock, done = Clock(), []  # type: tuple[Clock, list[int]]
    slicer = TimeSlicer(clock)
    for number in range(7):
        slicer.add(lambda _, number=number: work_of(clock, done, number, 0.4 * BUDGET_S))
    after = []
    while len(done) < 7:
        await asyncio.sleep(0)
        after.append(len(done))
    assert [count for count in after if count] == [3, 6, 7]
    assert done == list(range(7))


async def test_work_that_comes_again_waits_for_the_next_iteration() -> None:
    slicer, times = TimeSlicer(Clock()), []  # type: tuple[TimeSlicer, list[float]]

    def again(end_s: float) -> None:
        times.append(end_s)
        slicer.add(again)

    slicer.add(again)
    for count in range(1, 4):
        await asyncio.sleep(0)
        assert times == [100.0 + BUDGET_S] * count


async def test_a_piece_that_raises_takes_no_turn_from_the_others() -> None:
    reported: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(str(context["exception"])))
    slicer, done = TimeSlicer(), []  # type: tuple[TimeSlicer, list[float]]

    def fail(_: float) -> None:
        raise ValueError("a bug")

    slicer.add(fail)
    slicer.add(done.append)
    for _ in range(3):
        await asyncio.sleep(0)
    assert reported == ["a bug"]


async def test_clients_take_turns() -> None:
    slicer, done = TimeSlicer(budget_s=0.0), []  # type: tuple[TimeSlicer, list[str]]
    for client, count in (("a", 5), ("b", 1), ("c", 2)):
        for number in range(count):
            slicer.add(lambda _, name=f"{client}{number}": done.append(name), client)
    for _ in range(9):
        await asyncio.sleep(0)
    assert done == ["a0", "b0", "c0", "a1", "c1", "a2", "a3", "a4"]
    slicer.add(lambda _: done.append("a5"), "a")
    await asyncio.sleep(0)
    assert done[-1] == "a5"


async def test_without_a_budget_an_iteration_does_one_piece() -> None:
    slicer, done = TimeSlicer(budget_s=0.0), []  # type: tuple[TimeSlicer, list[float]]
    for _ in range(3):
        slicer.add(done.append)
    for count in range(1, 4):
        await asyncio.sleep(0)
        assert len(done) == count


async def test_others_get_as_much_time_as_the_task_that_was_woken_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rests, loop = Clock(), [], asyncio.get_running_loop()  # type: tuple[Clock, list[float], asyncio.AbstractEventLoop]
    call_later = loop.call_later

    def rest(delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        rests.append(round(delay_s, 6))
        return call_later(0.0, call)

    monkeypatch.setattr(loop, "call_later", rest)
    slicer, woken = TimeSlicer(clock, budget_s=0.0, rests=True), list[int]()

    async def work(number: int) -> None:
        turn = loop.create_future()
        slicer.add(lambda _: turn.set_result(None))
        await turn
        woken.append(number)
        clock.now_s += number

    await asyncio.gather(*map(work, range(1, 4)))
    assert woken == [1, 2, 3]
    await eventually(lambda: len(rests) == 3)
    assert rests == [1, 2, 3]
