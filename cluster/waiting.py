"""Waiting for whatever comes first, and for the signals to stop."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["first_of", "stop_events"]


async def first_of(work: asyncio.Future[Any], *events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Return when `work` has ended, an event is set or the time is over. Cancels nothing, and raises nothing of it."""
    happened = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait({work, *happened}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for one in happened:
        one.cancel()


def stop_events(*signals: int) -> tuple[asyncio.Event, asyncio.Event]:
    """Two events: the first of these signals sets one, to let what runs end; a second sets the other, to end now."""
    stop, stop_now = asyncio.Event(), asyncio.Event()
    for number in signals:
        asyncio.get_running_loop().add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())
    return stop, stop_now
