from __future__ import annotations

import asyncio

import pytest

from tandem.runtime.background import BackgroundTasks
from tandem.runtime.backoff import Backoff


def test_failed_work_is_logged_and_restarted(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        tasks, runs, is_well = BackgroundTasks(Backoff(0.001, 1.0)), 0, asyncio.Event()

        async def work() -> None:
            nonlocal runs
            runs += 1
            if runs < 4:
                raise RuntimeError(f"run {runs}")
            is_well.set()
            await asyncio.Event().wait()

        kept = tasks.keep("the watch", work)
        async with asyncio.timeout(10):
            await is_well.wait()
        assert (tasks.num_failures, kept.done()) == (3, False)
        await tasks.close()
        assert kept.cancelled()

    asyncio.run(run())
    assert [record.getMessage() for record in caplog.records] == [
        f"the watch failed and is restarted in {delay} s" for delay in ("0.001", "0.002", "0.004")
    ]
    assert "run 3" in caplog.text


def test_a_failed_task_notifies_its_owner(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> list[str]:
        tasks, told = BackgroundTasks(), list[str]()

        async def work() -> None:
            raise KeyError("gone")

        await tasks.start("one job", work, lambda exc: told.append(repr(exc)))
        assert tasks.num_failures == 1
        return told

    assert asyncio.run(run()) == ["KeyError('gone')"]
    assert "one job failed" in caplog.text


@pytest.mark.filterwarnings("error")  # a coroutine that was never awaited
async def test_a_task_closed_before_it_started_leaves_no_coroutine() -> None:
    tasks, began = BackgroundTasks(), False

    async def work() -> None:
        nonlocal began
        began = True

    task = tasks.start("late", work)
    task.cancel()
    await tasks.close()
    assert not began
