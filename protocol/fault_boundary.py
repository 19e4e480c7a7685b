"""Fault boundaries: the places where any exception is caught, so that one failure does not end everything else.

A request, a message, a listener or a background task may fail because of a bug in our code or in a model's. Its caller
then ends what the failure concerns and goes on. Cancellation and the end of the process pass through.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

T = TypeVar("T")


def outcome_of(function: Callable[..., T], *args: object) -> T | Exception:
    """Call a function; return its result, or the exception it raised."""
    try:
        return function(*args)
    except Exception as exc:  # the purpose of this module
        return exc


def error_of(function: Callable[..., object], *args: object) -> Exception | None:
    """Call a function; return the exception it raised, if any."""
    outcome = outcome_of(function, *args)
    return outcome if isinstance(outcome, Exception) else None


async def async_error_of(work: Awaitable[object]) -> Exception | None:
    """Await; return the exception that was raised, if any."""
    try:
        await work
    except Exception as exc:  # the purpose of this module
        return exc
    return None


@contextmanager
def undone_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` if the block raises anything, a cancellation included, and raise it again."""
    with ExitStack() as stack:
        stack.callback(undo)
        yield
        stack.pop_all()
