"""The stream of snapshots: built once for all viewers, only while somebody watches, and never kept for slow ones."""

from __future__ import annotations

import asyncio

import pytest

from tandem.frontend.dashboard.feed import HEARTBEAT, SnapshotFeed, TooManyViewers
from tandem.protocol.errors import WorkerError


class Source:
    def __init__(self) -> None:
        self.num_built = 0
        self.errors: list[Exception] = []
        self.allowed = asyncio.Semaphore(0)

    async def build(self) -> bytes:
        await self.allowed.acquire()
        self.num_built += 1
        if self.errors:
            raise self.errors.pop()
        return b"%d" % self.num_built

    async def allow(self, number: int = 1) -> None:
        """Let snapshots be built, and wait until they are published."""
        for _ in range(number):
            wanted = self.num_built + 1
            self.allowed.release()
            async with asyncio.timeout(5):
                while self.num_built < wanted:  # noqa: ASYNC110 - the feed has no event for it
                    await asyncio.sleep(0)
            await asyncio.sleep(0)


def feed_of(source: Source, *, heartbeat_s: float = 60.0, max_viewers: int = 32) -> SnapshotFeed:
    return SnapshotFeed(source.build, interval_s=0.0, heartbeat_s=heartbeat_s, max_viewers=max_viewers)


def event(number: int) -> bytes:
    return b"event: snapshot\ndata: %d\n\n" % number


async def test_viewers_get_the_same_snapshots_and_none_is_built_without() -> None:
    source = Source()
    feed = feed_of(source)
    with feed.viewing() as first, feed.viewing() as second:
        await source.allow()
        assert [await anext(first), await anext(second)] == [event(1), event(1)]
        await source.allow()
        assert [await anext(first), await anext(second)] == [event(2), event(2)]
    assert feed.num_viewers == 0
    source.allowed.release()
    for _ in range(20):
        await asyncio.sleep(0)
    assert source.num_built == 2
    with feed.viewing() as third:  # gets nothing that is old
        assert await anext(third) == event(3)


async def test_a_slow_viewer_skips_to_the_latest() -> None:
    source = Source()
    feed = feed_of(source)
    with feed.viewing() as events:
        await source.allow()
        assert await anext(events) == event(1)
        await source.allow(5)
        assert await anext(events) == event(6)


async def test_a_viewer_hears_that_nothing_is_new() -> None:
    feed = feed_of(Source(), heartbeat_s=0.01)
    with feed.viewing() as events:
        assert [await anext(events), await anext(events)] == [HEARTBEAT, HEARTBEAT]


async def test_the_number_of_viewers_is_bounded() -> None:
    feed = feed_of(Source(), max_viewers=2)
    with feed.viewing(), feed.viewing():
        with pytest.raises(TooManyViewers, match="2 dashboards are open") as error, feed.viewing():
            pass
        assert error.value.status == 429
        assert error.value.retry_after_s > 0
    with feed.viewing():
        assert feed.num_viewers == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [(WorkerError("The hub is silent."), b"The hub is silent."), (KeyError("bug"), b"the server's log says why")],
)
async def test_problem_and_end_are_told(error: Exception, message: bytes, caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    source.errors.append(error)
    feed = feed_of(source)
    with feed.viewing() as events:
        await source.allow()
        problem = await anext(events)
        assert problem.startswith(b"event: problem\ndata: {")
        assert message in problem
        await source.allow()
        assert await anext(events) == event(2)
    assert ("could not be built" in caplog.text) == isinstance(error, KeyError)


async def test_streams_end_when_the_server_stops() -> None:
    source = Source()
    feed = feed_of(source)
    with feed.viewing() as events:
        await source.allow()
        await anext(events)
        waiting = asyncio.create_task(anext(events, None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        feed.close()
        async with asyncio.timeout(5):
            assert await waiting is None
    with feed.viewing() as events:
        assert [one async for one in events] == []
