"""Work that begins before anyone awaits it."""

from __future__ import annotations

import asyncio

import pytest

from tandem.frontend.http.response_writer import EagerAwaitable


class Work:
    """Waits for two futures, and notes how far it got."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[str] = loop.create_future()
        self.second: asyncio.Future[str] = loop.create_future()
        self.seen: list[str] = []

    async def run(self) -> None:
        self.seen.append("begun")
        try:
            self.seen.append(await self.first)
            self.seen.append(await self.second)
        except BaseException as exc:
            self.seen.append(type(exc).__name__)
            raise


async def test_what_needs_not_wait_is_done_at_once() -> None:
    async def work() -> None:
        seen.append(1)

    seen: list[int] = []
    started = EagerAwaitable(work())
    assert (started.is_done, seen) == (True, [1])
    await started
    started.close()


async def test_it_begins_at_once_and_goes_on_in_the_task_that_awaits() -> None:
    work = Work()
    started = EagerAwaitable(work.run())
    assert (started.is_done, work.seen) == (False, ["begun"])
    rest = asyncio.ensure_future(started)
    work.first.set_result("a")
    await asyncio.sleep(0)
    work.second.set_result("b")
    await asyncio.wait_for(rest, 5)
    assert (started.is_done, work.seen) == (True, ["begun", "a", "b"])


async def test_it_goes_on_where_what_it_waited_for_is_there_already() -> None:
    work = Work()
    started = EagerAwaitable(work.run())
    work.first.set_result("a")
    work.second.set_result("b")
    await asyncio.wait_for(started, 5)
    assert work.seen == ["begun", "a", "b"]


@pytest.mark.parametrize("at", ["first", "second"])
async def test_errors_and_cancellations_reach_it_where_it_waits(at: str) -> None:
    for is_cancelled in (False, True):
        work = Work()
        rest = asyncio.ensure_future(EagerAwaitable(work.run()))
        if at == "second":
            work.first.set_result("a")
        await asyncio.sleep(0)
        if is_cancelled:
            rest.cancel()
        else:
            getattr(work, at).set_exception(OSError("gone"))
        [error] = await asyncio.gather(rest, return_exceptions=True)
        assert isinstance(error, asyncio.CancelledError if is_cancelled else OSError)
        assert work.seen[-1] == type(error).__name__


async def test_an_early_error_comes_out_at_once_and_what_waits_is_closed() -> None:
    async def broken() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        EagerAwaitable(broken())
    work = Work()
    started = EagerAwaitable(work.run())
    started.close()
    assert work.seen == ["begun", "GeneratorExit"]
    assert started.is_done
