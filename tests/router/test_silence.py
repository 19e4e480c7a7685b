from __future__ import annotations

import asyncio

from router.silence import SilenceWatch
from tests.router.fake_worker import until


def test_a_wait_that_lasts_too_long_is_told_once() -> None:
    async def scenario() -> None:
        told: list[str] = []
        watch = SilenceWatch(0.02, lambda: told.append("silent"))
        watch.begin()
        await until(lambda: bool(told))
        watch.close()
        assert told == ["silent"]

    asyncio.run(scenario())


def test_short_waits_are_not_silence_however_many() -> None:
    async def scenario() -> None:
        told: list[str] = []
        loop = asyncio.get_running_loop()
        watch = SilenceWatch(0.05, lambda: told.append("silent"))
        end_s = loop.time() + 0.25
        while loop.time() < end_s:
            watch.begin()
            await asyncio.sleep(0)
            watch.end()
        watch.close()
        assert told == []

    asyncio.run(scenario())


def test_who_waits_for_nothing_is_not_told() -> None:
    async def scenario() -> None:
        told: list[str] = []
        watch = SilenceWatch(0.01, lambda: told.append("silent"))
        other = SilenceWatch(0.05, lambda: told.append("waited"))
        other.begin()
        await until(lambda: bool(told))
        watch.close()
        other.close()
        assert told == ["waited"]

    asyncio.run(scenario())
