"""Waiting for whatever comes first."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["first_of"]


async def first_of(work: asyncio.Future[Any], *events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Return when `work` has ended, an event is set or the time is over. Cancels nothing, and raises nothing of it."""
    happened = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait({work, *happened}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for one in happened:
        one.cancel()
