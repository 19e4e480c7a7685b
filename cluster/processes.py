"""Several equal processes under one parent: started, replaced when they die, stopped together.

Each child reads its setup from its standard input, writes "ready" or "error: why" to its standard output, and obeys
the words that follow: "stop" (finish what runs) and "now". The end of its input is the end of its parent, however that
came, so no child is ever left over. Twice a second its event loop says "alive": one that is silent is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from tandem.protocol.errors import ConfigError
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.idle_timeout import answered_in_time
from tandem.runtime.signals import stop_events

__all__ = ["ParentPipe", "ProcessGroup"]

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 60.0
BEAT_INTERVAL_S = 0.5
KILL_AFTER_S = 2.0  # of a child that was told to end now
_SHORT_LIFE_S = 10.0  # a child that lives shorter is replaced later and later
_MAX_DELAY_S = 5.0
_ALIVE = "alive"


def _nothing(*_: int) -> None:
    """Where nobody wants to know."""


class ProcessGroup:
    """`count` children that run `module`. `make_setup` gives the setup of each at each of its starts: one line."""

    def __init__(
        self,
        module: str,
        make_setup: Callable[[int], bytes],
        count: int,
        *,
        stop_timeout_s: float,
        silence_timeout_s: float,
        on_ended: Callable[[int, int], None] = _nothing,
    ) -> None:
        """`on_ended` is called with number and pid of each child that has ended.

        One that serves and then says nothing for `silence_timeout_s`, and some beats at least, is killed and replaced.
        """
        self._module = module
        self._on_ended = on_ended
        self._make_setup = make_setup
        self._count = count
        self._stop_timeout_s = stop_timeout_s
        self._silence_timeout_s = max(silence_timeout_s, 4 * BEAT_INTERVAL_S)
        self._children: dict[int, Process] = {}

    @property
    def pids(self) -> list[int]:
        """Of the children that run."""
        return [child.pid for child in self._children.values() if child.returncode is None]

    async def run(self, stop: asyncio.Event, stop_now: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Start all, call `on_ready` once all serve, keep them until `stop` is set and return when all have ended.

        `stop_now` ends them without delay. Raises `ConfigError` when one cannot begin to serve.
        """
        try:
            await self._until(stop, self._for_each(self._start))
            if not stop.is_set():
                on_ready()
                await self._until(stop, self._for_each(self._keep))
        finally:
            await self._stop_all(stop_now)

    async def _until(self, stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
        """Do the work unless it is time to stop before it is done. Raises what the work raises."""
        stopping, working = asyncio.create_task(stop.wait()), asyncio.create_task(work)
        try:
            await asyncio.wait((stopping, working), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
        finally:
            stopping.cancel()
            working.cancel()
            await asyncio.gather(stopping, working, return_exceptions=True)

    async def _for_each(self, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
        """Do it for each child at once. What one of them raises ends the others, and is raised."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._count):
                    tasks.create_task(work(number))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _start(self, number: int) -> None:
        """Start one child and wait until it serves. Raises `ConfigError` with what it says, or why it cannot be."""
        try:
            child = self._children[number] = await self._new_process()
        except OSError as exc:
            raise ConfigError(f"process {number} cannot be started: {exc}") from exc
        assert child.stdin is not None, "its input is a pipe"
        child.stdin.write(self._make_setup(number) + b"\n")
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while (word := await _next_word(child)) == _ALIVE:
                    pass
        except TimeoutError as exc:
            _kill(child)
            raise ConfigError(f"process {number} did not serve within {READY_TIMEOUT_S:g} s") from exc
        if word != "ready":
            raise ConfigError(word.removeprefix("error: ") or f"process {number} ended before it served")

    async def _new_process(self) -> Process:
        # In a session of its own: Ctrl-C at the terminal is for the parent, which tells the children.
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", self._module),  # with our own path, and without whatever folder we were started in
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
        )

    async def _keep(self, number: int) -> None:
        """Replace the child whenever it ends."""
        delay_s = 0.0
        while True:
            started_s = time.monotonic()
            if number in self._children:
                code = await self._end_of(number)
                logger.warning("process %d of %d ended with code %d and is replaced", number, self._count, code)
            is_short = time.monotonic() - started_s < _SHORT_LIFE_S
            delay_s = min(2 * delay_s + 0.5, _MAX_DELAY_S) if is_short else 0.0
            await asyncio.sleep(delay_s)
            try:
                await self._start(number)
            except ConfigError as exc:
                logger.error("process %d cannot be replaced yet: %s", number, exc)

    async def _end_of(self, number: int) -> int:
        """The code that a child ends with. One that falls silent is killed."""
        child = self._children[number]
        if await self._falls_silent(child):
            logger.warning(
                "process %d of %d has been silent for %g s and is killed", number, self._count, self._silence_timeout_s
            )
            _kill(child)
        code = await child.wait()
        del self._children[number]
        self._on_ended(number, child.pid)
        return code

    async def _falls_silent(self, child: Process) -> bool:
        """Wait until it says no more; whether it has not ended."""
        while True:
            word = asyncio.create_task(_next_word(child))
            try:
                if not await answered_in_time(word, self._silence_timeout_s):
                    return True
                if not await word:
                    return False
            finally:
                word.cancel()

    async def _stop_all(self, stop_now: asyncio.Event) -> None:
        """Let all finish what runs, for `stop_timeout_s` at most; then, or on `stop_now`, end them."""
        self._tell("stop")
        ended, hurry = asyncio.create_task(self._all_ended()), asyncio.create_task(stop_now.wait())
        await asyncio.wait((ended, hurry), timeout=self._stop_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        self._tell("now")
        await asyncio.wait((ended,), timeout=KILL_AFTER_S)
        for child in self._children.values():
            _kill(child)
        await asyncio.gather(ended, hurry, return_exceptions=True)

    async def _all_ended(self) -> None:
        await asyncio.gather(*map(self._end_of, list(self._children)))

    def _tell(self, word: str) -> None:
        for child in self._children.values():
            if child.returncode is None and child.stdin is not None and not child.stdin.is_closing():
                child.stdin.write(word.encode() + b"\n")


async def _next_word(child: Process) -> str:
    """What it says next; "" at its end."""
    assert child.stdout is not None, "its output is a pipe"
    return (await child.stdout.readline()).decode(errors="replace").strip()


def _kill(child: Process) -> None:
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            child.kill()


class ParentPipe:
    """The child's end: its setup, and the words of its parent. Make it before anything else uses standard output."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)  # whatever is printed here is no word to the parent
        self._input = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - unbuffered: the words are read later
        self.setup = self._input.readline()

    def say(self, word: str) -> None:
        """Tell the parent; one that is gone does not matter."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._out, word.replace("\n", " ").encode() + b"\n")

    @contextlib.asynccontextmanager
    async def obeying(self) -> AsyncIterator[tuple[asyncio.Event, asyncio.Event]]:
        """Events that the parent's words set, `stop` and `stop_now`, for as long as the block runs; SIGTERM does too.

        A parent that is gone says "now". Shows it meanwhile that we live.
        """
        stop, stop_now = stop_events(signal.SIGTERM)
        tasks = BackgroundTasks()
        tasks.start("hearing the parent", lambda: self._obey(stop, stop_now), lambda _: stop_now.set())
        try:
            yield stop, stop_now
        finally:
            await tasks.close()

    async def _obey(self, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        beating = asyncio.create_task(self._beat())
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._input)
        try:
            while word := await reader.readline():
                (stop_now if word.strip() == b"now" else stop).set()
            stop_now.set()
        finally:
            beating.cancel()
            transport.close()

    async def _beat(self) -> None:
        while True:
            self.say(_ALIVE)
            await asyncio.sleep(BEAT_INTERVAL_S)
