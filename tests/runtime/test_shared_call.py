from __future__ import annotations

import asyncio

import pytest

from tandem.runtime.shared_call import SharedCall


class Source:
    """Counts its calls. Each ends when the test lets it."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def __call__(self) -> int:
        self.num_calls += 1
        number = self.num_calls
        await self.may_end.wait()
        if number == 13:
            raise OSError("no luck")
        return number


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_all_who_ask_before_a_call_begins_share_it() -> None:
    source = Source()
    shared = SharedCall(source, 0.0)
    assert await asyncio.gather(*(shared() for _ in range(1000))) == [1] * 1000


async def test_callers_during_a_call_get_the_next_one() -> None:
    source = Source()
    shared = SharedCall(source, 0.0)
    source.may_end.clear()
    first = asyncio.create_task(shared())
    await turns()
    later = [asyncio.create_task(shared()) for _ in range(10)]
    await turns()
    assert source.num_calls == 1, "calls do not overlap"
    source.may_end.set()
    assert await first == 1
    assert await asyncio.gather(*later) == [2] * 10


async def test_calls_begin_an_interval_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, slept_s = 100.0, list[float]()

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        if seconds:
            slept_s.append(seconds)
        now_s += seconds
        await really_sleep(0)

    shared = SharedCall(Source(), 0.5, clock=lambda: now_s)
    really_sleep = asyncio.sleep
    monkeypatch.setattr("tandem.runtime.shared_call.asyncio.sleep", sleep)
    assert await shared() == 1
    now_s += 0.2
    assert await shared() == 2
    now_s += 9.0
    assert await shared() == 3
    assert slept_s == pytest.approx([0.3])


async def test_one_who_gives_up_takes_nothing_from_the_others() -> None:
    source = Source()
    shared = SharedCall(source, 0.0)
    source.may_end.clear()
    impatient, patient = asyncio.create_task(shared()), asyncio.create_task(shared())
    await turns()
    impatient.cancel()
    await turns()
    source.may_end.set()
    assert await patient == 1
    assert impatient.cancelled()


async def test_an_error_is_for_all_who_shared_the_call_and_for_nobody_else() -> None:
    source = Source()
    source.num_calls = 12
    shared = SharedCall(source, 0.0)
    results = await asyncio.gather(shared(), shared(), return_exceptions=True)
    assert [str(result) for result in results] == ["no luck"] * 2
    assert await shared() == 14


async def test_those_who_wait_go_on_one_in_each_iteration() -> None:
    went_on, iteration = list[int](), 0

    async def ask() -> None:
        await shared()
        went_on.append(iteration)

    shared = SharedCall(Source(), 0.0)
    asking = [asyncio.create_task(ask()) for _ in range(50)]
    while len(went_on) < 50:
        await asyncio.sleep(0)
        iteration += 1
    assert len(set(went_on)) == 50
    await asyncio.gather(*asking)
