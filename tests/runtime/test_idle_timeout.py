from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from tandem.runtime.idle_timeout import CHECKS, LATE_SHARE, IdleClock, IdleTimeout, answered_in_time
from tests.support.event_loop import iteration


class LoopClock:
    """The event loop's time, which moves only when the test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: self.now_s)

    async def move(self, seconds: float) -> None:
        """Let time pass at once, as if the loop had stalled; then let the loop do what is due."""
        self.now_s += seconds
        for _ in range(5):
            await iteration()


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LoopClock]:
    with monkeypatch.context() as patch:
        yield LoopClock(patch)


async def test_many_short_waits_do_not_time_out(clock: LoopClock) -> None:
    told: list[str] = []
    watch = IdleTimeout(0.5, lambda: told.append("silent"))
    for _ in range(100):
        watch.begin()
        await clock.move(0.1)
        watch.end()
    for _ in range(20):  # nobody waits any more
        await clock.move(0.1)
    watch.close()
    assert told == []


async def test_without_a_wait_nothing_times_out(clock: LoopClock) -> None:
    told: list[str] = []
    watch = IdleTimeout(0.5, lambda: told.append("silent"))
    other = IdleTimeout(0.5, lambda: told.append("waited"))
    other.begin()
    for _ in range(20):
        await clock.move(0.1)
    watch.close()
    other.close()
    assert told == ["waited"]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_pauses_a_dead_peer_is_found_and_a_talking_one_not(seed: int) -> None:
    """The process may stand still at any time, for any time. Messages wait, and are read before its next check."""
    rng = random.Random(seed)
    timeout_s, now = 8.0, 0.0
    interval_s = timeout_s / CHECKS
    clock = IdleClock(timeout_s)
    heard_s = {"speaks": 0.0, "dead": 0.0}
    dead_from_s = rng.uniform(0, 50)
    num_sleeps, looked_s, awake_since_s, found_s = 0, now, now, None
    clock.check(now, interval_s)
    while now < 400:
        slept_s = 0.0
        if now < 300 and rng.random() < 0.1:
            slept_s = rng.choice([0.1, 1, timeout_s * LATE_SHARE * 1.01, timeout_s, 5 * timeout_s])
            num_sleeps += 1
        now += interval_s + slept_s
        if now - looked_s > interval_s + timeout_s * LATE_SHARE:
            awake_since_s = now
        looked_s = now
        clock.check(now, interval_s)
        assert not clock.is_idle(heard_s["speaks"], now), f"at {now:.1f} s"
        if clock.is_idle(heard_s["dead"], now):
            assert now - heard_s["dead"] > timeout_s
            found_s = found_s or now
        else:
            assert now - awake_since_s <= timeout_s or now - heard_s["dead"] <= timeout_s
        now += rng.uniform(0, 0.2)  # only then are sockets read
        heard_s["speaks"] = now
        if now < dead_from_s:
            heard_s["dead"] = now
    assert num_sleeps > 5
    assert found_s is not None


def test_a_little_late_is_on_time() -> None:
    clock = IdleClock(8.0)
    clock.check(0.0, 1.0)
    clock.check(1.0 + 8.0 * LATE_SHARE, 1.0)
    assert clock.idle_s(0.0, 3.0) == 3.0
    clock.check(3.0 + 1.01 + 8.0 * LATE_SHARE, 1.0)
    assert clock.idle_s(0.0, 7.0) == pytest.approx(7.0 - 6.01)


async def test_an_answer_that_arrived_while_the_loop_stood_still_counts(clock: LoopClock) -> None:
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    waiting = asyncio.create_task(answered_in_time(answer, 1.0))
    await clock.move(0)
    loop.call_later(2.5, answer.set_result, None)  # sent meanwhile, read a little later
    await clock.move(2.0)
    assert not waiting.done()
    await clock.move(0.5)
    assert await waiting


async def test_a_missing_answer_is_noticed_in_time_and_not_before(clock: LoopClock) -> None:
    answer = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(answered_in_time(answer, 8.0))
    await clock.move(0)
    for _ in range(8):
        await clock.move(1.0)
        assert not waiting.done()
    await clock.move(1.0)
    assert waiting.done()
    assert not await waiting
    assert not answer.done()


async def test_a_wait_during_which_the_loop_stood_still_starts_again(clock: LoopClock) -> None:
    told: list[str] = []
    watch = IdleTimeout(1.0, lambda: told.append("silent"))
    watch.begin()
    await clock.move(3.0)
    await clock.move(0.9)
    assert told == []
    await clock.move(0.1)
    watch.close()
    assert told == ["silent"]
