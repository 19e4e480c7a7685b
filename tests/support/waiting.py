"""Waiting for a condition that no event announces, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, Protocol

DEADLINE_S = 30.0  # generous, as the machine may be busy


class Polled(Protocol):
    def poll(self) -> object: ...


def until(condition: Callable[[], Any], timeout_s: float = DEADLINE_S, explain: Callable[[], str] = str) -> None:
    """Block until the condition is true. Fails after `timeout_s` with what `explain` returns."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s. {explain()}"
        time.sleep(0.02)


async def eventually(
    condition: Callable[[], Any], timeout_s: float = DEADLINE_S, explain: Callable[[], str] = str
) -> None:
    """Wait until the condition, or what it awaits, is true, while the event loop runs. Fails as `until` does."""
    deadline = time.monotonic() + timeout_s
    while not await _is_true(condition):
        assert time.monotonic() < deadline, f"not within {timeout_s} s. {explain()}"
        await asyncio.sleep(0.002)


async def _is_true(condition: Callable[[], Any]) -> bool:
    answer = condition()
    return bool(await answer if inspect.isawaitable(answer) else answer)


def poll_until(polled: Polled, condition: Callable[[], Any], timeout_s: float = DEADLINE_S) -> None:
    """Poll until the condition is true. Fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        polled.poll()
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {polled}"
