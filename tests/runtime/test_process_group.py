from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import uvloop

from tandem.protocol.errors import ConfigError
from tandem.runtime import process_group as processes
from tandem.runtime.process_group import ProcessGroup
from tests.support.waiting import eventually

WAIT_S = 30.0
SetupOf = Callable[[int, int], str]  # from the child's number and the number of children started before it


class Group:
    """A running group and a record of what it did."""

    def __init__(self, setup_of: SetupOf, count: int) -> None:
        self.num_started = 0
        self.ended: list[int] = []
        self.stop, self.stop_now, self.ready = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._setup_of = setup_of
        self.group = ProcessGroup(
            "tests.support.small_child",
            self._setup,
            count,
            stop_timeout_s=WAIT_S,
            silence_timeout_s=0.0,  # the group then waits for its minimum, a few beats
            short_life_s=0.0,
            on_ended=self.ended.append,
        )
        self.running = asyncio.create_task(self.group.run(self.stop, self.stop_now, self.ready.set))

    def _setup(self, number: int) -> bytes:
        self.num_started += 1
        return self._setup_of(number, self.num_started - 1).encode()

    async def serves(self) -> list[int]:
        """Wait until all children serve, and return their pids."""
        await eventually(lambda: self.ready.is_set() or self.running.done(), WAIT_S)
        if not self.ready.is_set():
            await self.running  # raises what ended it
        return self.group.pids

    async def end(self) -> None:
        self.stop.set()
        await self.running


def run(scenario: Any) -> None:
    """Run a scenario. It must leave no task behind."""

    async def checked() -> None:
        async with asyncio.timeout(2 * WAIT_S):
            await scenario
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the router uses this loop too
        runner.run(checked())


def test_a_machine_that_has_no_room_for_a_process_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refusals = asyncio.create_subprocess_exec, [OSError(errno.EAGAIN, "no room")]

    async def start_or_refuse(*args: Any, **kwargs: Any) -> Any:
        if here.group.pids == pids[1:] and refusals:
            raise refusals.pop()
        return await start(*args, **kwargs)

    async def scenario() -> None:
        nonlocal here, pids
        here = Group(lambda *_: "serve", 2)
        pids = await here.serves()
        num_ended = len(here.ended)  # before they served, if somebody killed them then
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start_or_refuse)
        os.kill(pids[0], signal.SIGKILL)
        await eventually(lambda: (not refusals and len(here.group.pids) == 2) or here.running.done(), WAIT_S)
        assert pids[0] not in here.group.pids
        assert pids[1] in here.group.pids
        assert len(here.ended) == num_ended + 1
        await here.end()

    here: Group
    pids: list[int] = []
    run(scenario())


def test_children_are_told_to_leave_and_so_are_those_that_replace_them() -> None:
    async def scenario() -> None:
        here = Group(lambda _, before: "leave" if before < 2 else "serve", 1)
        await here.serves()
        here.group.leave()
        await eventually(lambda: here.num_started == 3, WAIT_S)
        await here.end()

    run(scenario())


def test_a_machine_without_room_at_the_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EAGAIN, "no room")

    async def scenario() -> None:
        here = Group(lambda *_: "serve", 2)
        with pytest.raises(ConfigError, match=r"cannot be started.*no room"):
            await here.running

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    run(scenario())


def test_what_one_cannot_do_is_reported_and_ends_the_others() -> None:
    async def scenario() -> None:
        here = Group(lambda number, _: ["refuse", "hang"][number], 2)
        with pytest.raises(ConfigError, match="it does not want to"):
            await here.running
        assert here.group.pids == []

    run(scenario())


def test_the_exit_of_one_that_never_served_is_reported() -> None:
    async def scenario() -> None:
        here = Group(lambda *_: "die", 1)
        with pytest.raises(ConfigError, match=r"process 0 ended before it served, 3 times; the last code is -9"):
            await here.running
        assert here.ended == [0] * 3

    run(scenario())


def test_one_that_is_killed_before_it_serves_is_started_again() -> None:
    async def scenario() -> None:
        here = Group(lambda _, num_started: "die" if num_started == 0 else "serve", 2)
        assert len(await here.serves()) == 2
        assert here.num_started == 3
        await here.end()

    run(scenario())


def test_a_replacement_that_hangs_before_it_serves_is_killed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        here = Group(lambda _, num_started: "hang" if num_started == 1 else "serve", 1)
        (first,) = await here.serves()
        monkeypatch.setattr(processes, "READY_TIMEOUT_S", 0.5)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: here.num_started == 2, WAIT_S)
        monkeypatch.setattr(processes, "READY_TIMEOUT_S", WAIT_S)
        await eventually(lambda: here.num_started == 3 and len(here.group.pids) == 1, WAIT_S)
        assert len(here.ended) == 2
        await here.end()

    run(scenario())


def test_a_replacement_that_is_killed_at_once_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    start, killed = asyncio.create_subprocess_exec, []

    async def start_and_kill_one(*args: Any, **kwargs: Any) -> Any:
        child = await start(*args, **kwargs)
        if not killed:
            killed.append(child.pid)
            child.kill()
            await child.wait()
            await eventually(child.stdin.is_closing, WAIT_S)
        return child

    async def scenario() -> None:
        here = Group(lambda *_: "serve", 1)
        (first,) = await here.serves()
        monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_kill_one)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: (here.num_started == 3 and len(here.group.pids) == 1) or here.running.done(), WAIT_S)
        assert here.ended == [0, 0]
        await here.end()

    run(scenario())


@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_child_that_hangs_is_killed_and_no_other(is_stopping: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        here = Group(lambda *_: "serve", 2)
        hung, living = await here.serves()
        os.kill(hung, signal.SIGSTOP)
        if not is_stopping:
            await eventually(lambda: len(here.group.pids) == 2 and hung not in here.group.pids, WAIT_S)
            assert here.ended == [0]
            assert living in here.group.pids
        await here.end()
        assert set(here.ended) == {0, 1}, "the end of those that were stopped is told too"
        assert not psutil.pid_exists(hung)

    monkeypatch.setattr(processes, "BEAT_INTERVAL_S", 0.25)
    run(scenario())


def test_a_parent_that_hung_itself_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    next_line, num_lines = processes._next_line, Counter[int]()

    async def count_lines(child: Process) -> str:
        line = await next_line(child)
        num_lines[child.pid] += 1
        return line

    async def scenario() -> None:
        here = Group(lambda *_: "serve", 2)
        pids = await here.serves()
        time.sleep(5 * processes.BEAT_INTERVAL_S)  # noqa: ASYNC251 - this event loop must hang
        num_lines.clear()
        # While this loop hung, each child wrote three lines at most. It wrote the fifth one later.
        await eventually(lambda: all(num_lines[pid] >= 5 for pid in pids) or bool(here.ended), WAIT_S)
        assert (here.group.pids, here.ended) == (pids, [])
        await here.end()

    monkeypatch.setattr(processes, "BEAT_INTERVAL_S", 0.25)
    monkeypatch.setattr(processes, "_next_line", count_lines)
    run(scenario())


def test_our_own_fault_leaves_no_child_and_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[object] = []

    async def fail(*args: Any, **kwargs: Any) -> None:
        attempts.append(args)
        raise AssertionError("the fault")

    async def scenario() -> None:
        here = Group(lambda *_: "serve", 2)
        pids = await here.serves()
        monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(AssertionError, match="the fault"):
            await here.running
        assert (here.group.pids, sorted(here.ended)) == ([], [0, 1])
        await asyncio.sleep(0)  # a task that noticed the end of the other child would replace it in this turn
        assert len(attempts) == 1

    run(scenario())
