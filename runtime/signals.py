"""Waiting for whatever comes first, and for the signals to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Any

__all__ = [
    "defer_keyboard_interrupt",
    "ignore_keyboard_interrupt",
    "restore_child_signals",
    "stop_events",
    "wait_for_any",
]


async def wait_for_any(*awaited: asyncio.Future[Any] | asyncio.Event, timeout_s: float | None = None) -> None:
    """Return when one of these works has ended or events is set, or the time is over. Cancels and raises nothing."""
    works = {one for one in awaited if isinstance(one, asyncio.Future)}
    happened = {asyncio.create_task(one.wait()) for one in awaited if isinstance(one, asyncio.Event)}
    await asyncio.wait(works | happened, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for one in happened:
        one.cancel()


def restore_child_signals() -> None:
    """Let the processes that this one starts from here on react to signals, whatever this one inherited.

    A shell starts a background job of a script with SIGINT and SIGQUIT ignored. The job keeps ignoring them: the user
    pressed Ctrl-C for something else. Its children must not: we stop them ourselves, some with SIGINT. `exec` hands on
    what is ignored and resets what is caught, so an empty handler takes the place of "ignored". SIGHUP stays ignored in
    children too: `nohup` means all of them.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # blocked signals are inherited as well
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, _keep_ignoring)
    for number in (signal.SIGTERM, signal.SIGCHLD):  # the way to stop us, and the way to hear how a child ended
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def defer_keyboard_interrupt() -> Iterator[None]:
    """The first Ctrl-C within the block takes effect at its end, a second one at once.

    Python raises KeyboardInterrupt wherever the main thread is. In what it runs around a fork, the error is dropped
    together with the rest of that: once it was the release of the lock of `logging`, and then everything stood still.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    is_due = False

    def note(number: int, frame: object) -> None:
        nonlocal is_due
        if is_due:
            raise KeyboardInterrupt
        is_due = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if is_due:
        raise KeyboardInterrupt


@contextlib.contextmanager
def ignore_keyboard_interrupt() -> Iterator[None]:
    """Ctrl-C has no effect within the block."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def stop_events(*signals: int) -> tuple[asyncio.Event, asyncio.Event]:
    """Two events: the first of these signals sets one, to let what runs end; a second sets the other, to end now.

    A signal that this process was started to ignore stays ignored.
    """
    stop, stop_now = asyncio.Event(), asyncio.Event()
    for number in signals:
        if signal.getsignal(number) not in (signal.SIG_IGN, _keep_ignoring):
            asyncio.get_running_loop().add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())
    return stop, stop_now


def _keep_ignoring(*_: object) -> None:
    """The handler of a signal that is ignored here and not in children."""
