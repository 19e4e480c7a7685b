from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from tandem.runtime.daemon_threads import in_daemon_thread


def test_the_future_ends_with_the_call_or_its_exception() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def call() -> None:
        has_begun.set()
        may_end.wait(60)

    future = in_daemon_thread(call)
    assert has_begun.wait(60)
    assert not future.done()
    may_end.set()
    assert future.result(60) is None
    with pytest.raises(ZeroDivisionError):
        in_daemon_thread(lambda: 1 / 0).result(60)


async def test_a_wait_that_is_given_up_leaves_the_call_alone() -> None:
    may_end = threading.Event()
    future = in_daemon_thread(may_end.wait)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.wrap_future(future), 0.01)
    assert not future.cancelled()
    may_end.set()
    assert future.result(60) is None


def test_a_process_ends_while_such_a_call_goes_on() -> None:
    code = "import time; from tandem.runtime.daemon_threads import in_daemon_thread as go; go(lambda: time.sleep(600))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
