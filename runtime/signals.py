"""Stop signals, what child processes inherit from them, and waiting for the first of several events."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple


async def wait_for_any(*awaited: asyncio.Future[Any] | asyncio.Event, timeout_s: float | None = None) -> None:
    """Return when a future is done, an event is set, or the time is over. Cancels and raises nothing."""
    futures = {one for one in awaited if isinstance(one, asyncio.Future)}
    waits = {asyncio.create_task(one.wait()) for one in awaited if isinstance(one, asyncio.Event)}
    try:
        await asyncio.wait(futures | waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for one in waits:
            one.cancel()


async def unless(stop: asyncio.Event, work: Awaitable[object], on_stop: Callable[[], object] | None = None) -> bool:
    """Await the work until `stop` is set: then call `on_stop` and cancel the work. Returns whether it was finished.

    Raises what the work raises, unless `stop` is set by then: what stops us may have ended what it needs.
    """
    working = asyncio.ensure_future(work)
    try:
        await wait_for_any(working, stop)
        if not stop.is_set():
            working.result()
            return True
        if on_stop is not None:
            on_stop()
        return False
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def restore_child_signals() -> None:
    """Let child processes started from here on react to signals, whatever this process inherited.

    A shell starts a background job of a script with SIGINT and SIGQUIT ignored. The job keeps ignoring them: the user
    pressed Ctrl-C for something else. Its children must not ignore them: we stop some of them with SIGINT. `exec`
    passes ignored signals on and resets caught ones, so here an empty handler replaces "ignored". SIGHUP stays ignored
    in children too, because `nohup` means all processes.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # blocked signals are inherited as well
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _keep_ignoring)
    for number in (signal.SIGTERM, signal.SIGCHLD):  # these stop us, and report how a child ended
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def exit_on_sigterm() -> None:
    """From now on SIGTERM raises SystemExit, as Ctrl-C raises KeyboardInterrupt; until an event loop listens to it."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit)


@contextlib.contextmanager
def defer_stop(on_deferred: Callable[[], None]) -> Iterator[None]:
    """Within the block, a first Ctrl-C or SIGTERM calls `on_deferred` and takes effect only at the block's end.

    A second one takes effect at once. SIGTERM counts after `exit_on_sigterm`.

    Python raises the exception of a signal wherever the main thread is. In the hooks that it runs around a fork, the
    exception is dropped and the rest of the hook skipped. Once that was the release of the lock of `logging`: a
    deadlock. And a SIGTERM that is dropped stops nothing.
    """
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    raising = [number for number, handler in handlers.items() if handler in (signal.default_int_handler, _exit)]
    deferred: list[int] = []

    def note(number: int, frame: object) -> None:
        deferred.append(number)
        if len(deferred) > 1:
            handlers[number](number, frame)
        on_deferred()

    for number in raising:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in raising:
            signal.signal(number, handlers[number])
    if deferred:
        handlers[deferred[0]](deferred[0], None)


@contextlib.contextmanager
def ignore_keyboard_interrupt() -> Iterator[None]:
    """Ctrl-C has no effect within the block. (Outside of the main thread it never has any.)"""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class ServingOrders(NamedTuple):
    """What a process that serves may be asked for, in this order. The first may be left out."""

    leave: asyncio.Event  # go on, but be ready no more
    stop: asyncio.Event  # accept nothing more, and finish what runs
    stop_now: asyncio.Event


class StopSignals:
    """What signals have asked this process for."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()  # the first signal has come: drain
        self.stop_now = asyncio.Event()  # a second one has come: end now
        self.is_service = False  # the first was SIGTERM: a service manager stops us, and it gives us time

    def note(self, number: int) -> None:
        """A signal has come."""
        if self.stop.is_set():
            self.stop_now.set()
        else:
            self.is_service = number == signal.SIGTERM
            self.stop.set()


def stop_signals(*numbers: int) -> StopSignals:
    """Listen to these signals. Those that this process inherited as ignored stay ignored."""
    signals = StopSignals()
    for number in numbers:
        if signal.getsignal(number) not in (signal.SIG_IGN, _keep_ignoring):
            asyncio.get_running_loop().add_signal_handler(number, signals.note, number)
    return signals


def _keep_ignoring(*_: object) -> None:
    """The handler of a signal that this process ignores, but its children do not."""


def _exit(*_: object) -> None:
    raise SystemExit(0)
