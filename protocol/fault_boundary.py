"""Fault boundaries: the places where any exception is caught, so that one failure does not end everything else.

A request, a message, a listener or a background task may fail because of a bug in our code or in a model's. Its caller
then ends what the failure concerns and goes on. Cancellation and the end of the process pass through.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


def outcome_of(function: Callable[..., T], *args: object) -> T | Exception:
    """Call a function; return its result, or the exception it raised."""
    try:
        return function(*args)
    except Exception as exc:  # the purpose of this module
        return exc


def outcome_on_thread(function: Callable[..., T], *args: object) -> T | BaseException:
    """As `outcome_of`, on a thread that nobody cancels: a panic of a Rust library is no `Exception`."""
    try:
        return function(*args)
    except BaseException as exc:  # as above
        return exc


def error_of(function: Callable[..., object], *args: object) -> Exception | None:
    """Call a function; return the exception it raised, if any."""
    outcome = outcome_of(function, *args)
    return outcome if isinstance(outcome, Exception) else None


class _NotedOnError:
    """Calls a function with the exception that ends the block, and lets the exception pass."""

    def __init__(self, note: Callable[[BaseException], object]) -> None:
        self._note = note

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._note(error)


def noted_on_error(note: Callable[[BaseException], object]) -> _NotedOnError:
    """Call `note` with whatever the block raises, a cancellation included, and raise it again."""
    return _NotedOnError(note)


def undone_on_error(undo: Callable[[], object]) -> _NotedOnError:
    """Call `undo` if the block raises anything, a cancellation included, and raise it again."""
    return _NotedOnError(lambda _: undo())
