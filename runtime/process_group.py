"""Several equal processes under one parent: they are started, replaced when they die, and stopped together.

Each child reads its setup from its standard input, writes "ready" or "error: why" to its standard output, and obeys
the commands that follow: "leave" (be ready no more), "stop" (finish what runs) and "now". The input ends when the
parent does, however that happened, so no child is ever left over. Twice a second the child's event loop writes "alive".
A silent child is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from tandem.protocol.errors import ConfigError
from tandem.protocol.python_module import module_command, module_environment
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.backoff import Backoff
from tandem.runtime.idle_timeout import answered_in_time
from tandem.runtime.signals import ServingOrders, stop_signals, unless, wait_for_any

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 60.0
BEAT_INTERVAL_S = 0.5
KILL_AFTER_S = 2.0  # a child that was told to end now has this long
_BACKOFF = Backoff(0.5, 5.0)
_MAX_STARTS = 3  # of a child that ends without a word
_START_AGAIN_S = 0.2
_ALIVE = "alive"


def _ignore(_: int) -> None:
    """The end of a child needs no further work."""


class ProcessGroup:
    """`count` children that run `module`. `make_setup` makes the setup of a child, one line, whenever it is started."""

    def __init__(
        self,
        module: str,
        make_setup: Callable[[int], bytes],
        count: int,
        *,
        stop_timeout_s: float,
        silence_timeout_s: float,
        short_life_s: float = 10.0,
        on_ended: Callable[[int], None] = _ignore,
    ) -> None:
        """`on_ended` is called with the number of each child that has ended.

        A child that has served and is then silent for `silence_timeout_s`, but at least for four beats, is killed and
        replaced. One that lived shorter than `short_life_s` is replaced after a growing pause.
        """
        self._module = module
        self._on_ended = on_ended
        self._make_setup = make_setup
        self._count = count
        self._stop_timeout_s = stop_timeout_s
        self._silence_timeout_s = max(silence_timeout_s, 4 * BEAT_INTERVAL_S)
        self._short_life_s = short_life_s
        self._children: dict[int, Process] = {}
        self._is_leaving = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the children that run."""
        return [child.pid for child in self._children.values() if child.returncode is None]

    def leave(self) -> None:
        """Tell all children, and those that will replace them, that they are to be stopped soon."""
        self._is_leaving = True
        self._tell("leave")

    async def run(self, stop: asyncio.Event, stop_now: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Start all, call `on_ready` once all serve, replace those that end until `stop` is set, and stop all.

        `stop_now` ends them without delay. Raises `ConfigError` when a child cannot begin to serve.
        """
        try:
            if await unless(stop, self._for_each(self._start)):
                on_ready()
                await unless(stop, self._for_each(self._keep))
        finally:
            await self._stop_all(stop_now)

    async def _for_each(self, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Do the work for all children at the same time. The first error cancels the rest and is raised."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._count):
                    tasks.create_task(work(number))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _start(self, number: int) -> None:
        """Start one child and wait until it serves. Raises `ConfigError` with the reason if it does not.

        One that ends without a word may have been killed by somebody, and is started again a few times.
        """
        code = 0
        for _ in range(_MAX_STARTS):
            if (word := await self._first_word(number)) == "ready":
                return
            if word:
                raise ConfigError(word.removeprefix("error: "))
            code = await self._end_of(number)
            logger.warning("process %d of %d ended with code %d before it served", number, self._count, code)
            await asyncio.sleep(_START_AGAIN_S)
        raise ConfigError(f"process {number} ended before it served, {_MAX_STARTS} times; the last code is {code}")

    async def _first_word(self, number: int) -> str:
        """Start one child and wait for what it says first; "" if it ends before. Raises `ConfigError`."""
        try:
            child = self._children[number] = await self._new_process()
        except OSError as exc:
            raise ConfigError(f"process {number} cannot be started: {exc}") from exc
        _write(child, self._make_setup(number))
        if self._is_leaving:
            _write(child, b"leave")
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while (word := await _next_line(child)) == _ALIVE:
                    pass
                return word
        except TimeoutError as exc:
            _kill(child)
            raise ConfigError(f"process {number} did not serve within {READY_TIMEOUT_S:g} s") from exc

    async def _new_process(self) -> Process:
        # A session of its own keeps Ctrl-C at the terminal from the child: the parent tells it to stop.
        return await asyncio.create_subprocess_exec(
            *module_command(self._module),
            env=module_environment(),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
        )

    async def _keep(self, number: int) -> None:
        """Replace the child whenever it ends. Never returns."""
        num_short = 0  # short lives in a row
        while True:
            started_s = time.monotonic()
            if number in self._children:
                code = await self._end_of(number)
                logger.warning("process %d of %d ended with code %d and is replaced", number, self._count, code)
            is_short = time.monotonic() - started_s < self._short_life_s
            num_short = num_short + 1 if is_short else 0
            await asyncio.sleep(_BACKOFF.pause_s(num_short))
            try:
                await self._start(number)
            except ConfigError as exc:
                logger.error("process %d cannot be replaced yet: %s", number, exc)

    async def _end_of(self, number: int) -> int:
        """Wait for the end of a child, killing it if it falls silent; returns its exit code."""
        child = self._children[number]
        if await self._falls_silent(child):
            logger.warning(
                "process %d of %d has been silent for %g s and is killed", number, self._count, self._silence_timeout_s
            )
            _kill(child)
        code = await _exit_code(child)
        del self._children[number]
        self._on_ended(number)
        return code

    async def _falls_silent(self, child: Process) -> bool:
        """Read what the child writes until it is silent for too long (True) or has closed its output (False)."""
        while True:
            line = asyncio.create_task(_next_line(child))
            try:
                if not await answered_in_time(line, self._silence_timeout_s):
                    return True
                if not await line:
                    return False
            finally:
                line.cancel()

    async def _stop_all(self, stop_now: asyncio.Event) -> None:
        """Let all children finish what runs; end them after `stop_timeout_s`, or when `stop_now` is set."""
        self._tell("stop")
        ended = asyncio.create_task(self._all_ended())
        await wait_for_any(ended, stop_now, timeout_s=self._stop_timeout_s)
        self._tell("now")
        await asyncio.wait((ended,), timeout=KILL_AFTER_S)
        for child in self._children.values():
            _kill(child)
        await asyncio.gather(ended, return_exceptions=True)

    async def _all_ended(self) -> None:
        await asyncio.gather(*map(self._end_of, list(self._children)))

    def _tell(self, command: str) -> None:
        for child in self._children.values():
            _write(child, command.encode())


def _write(child: Process, line: bytes) -> None:
    """Write a line to the child, unless it has ended, even just now: uvloop raises for a closed pipe."""
    assert child.stdin is not None, "its input is a pipe"
    if child.returncode is None and not child.stdin.is_closing():
        child.stdin.write(line + b"\n")


async def _next_line(child: Process) -> str:
    """The next line that the child writes; "" at the end."""
    assert child.stdout is not None, "its output is a pipe"
    return (await child.stdout.readline()).decode(errors="replace").strip()


async def _exit_code(child: Process) -> int:
    """The exit code of a child that has closed its output. One that goes on nevertheless is killed."""
    try:
        return await asyncio.wait_for(child.wait(), KILL_AFTER_S)
    except TimeoutError:
        _kill(child)
        return await child.wait()


def _kill(child: Process) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            child.kill()


class ParentPipe:
    """The child's end of the pipes: its setup, and the parent's commands. Make it before standard output is used."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)  # what this process prints must not reach the parent as a message
        self._input = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - unbuffered: commands are read later
        self.setup = self._input.readline()

    def say(self, line: str) -> None:
        """Write a line to the parent, if it is still there."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._out, line.replace("\n", " ").encode() + b"\n")

    @contextlib.asynccontextmanager
    async def obeying(self) -> AsyncIterator[ServingOrders]:
        """What the parent's commands ask for. SIGTERM asks too, for `stop` and then for `stop_now`.

        The end of the parent counts as "now". While the block runs the parent is shown that this process lives.
        """
        signals, tasks = stop_signals(signal.SIGTERM), BackgroundTasks()
        orders = ServingOrders(asyncio.Event(), signals.stop, signals.stop_now)
        tasks.start("commands of the parent", lambda: self._obey(orders), lambda _: orders.stop_now.set())
        try:
            yield orders
        finally:
            await tasks.close()

    async def _obey(self, orders: ServingOrders) -> None:
        events = {b"leave": orders.leave, b"stop": orders.stop, b"now": orders.stop_now}
        loop = asyncio.get_running_loop()
        beating = asyncio.create_task(self._beat())
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._input)
        try:
            while command := await reader.readline():
                events[command.strip()].set()
            orders.stop_now.set()
        finally:
            beating.cancel()
            transport.close()

    async def _beat(self) -> None:
        while True:
            self.say(_ALIVE)
            await asyncio.sleep(BEAT_INTERVAL_S)
