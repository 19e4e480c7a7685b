"""The one place where errors of the connection to an engine become errors of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tandem.router.engines.errors import AnswerRefused, EngineFailed
from tandem.router.engines.upstream import AnswerTooLarge, Unreachable

__all__ = ["engine_errors"]


@contextmanager
def engine_errors(engine: str) -> Iterator[None]:
    """Translate errors of an HTTP request into `EngineFailed` with the engine's name."""
    try:
        yield
    except AnswerTooLarge as exc:
        raise AnswerRefused(f"engine {engine}: {exc}") from exc
    except Unreachable as exc:
        raise EngineFailed(engine, f"cannot be reached ({_text(exc)})", is_absent=True) from exc
    except OSError as exc:
        raise EngineFailed(engine, f"broke the connection ({_text(exc)})", is_lost=True) from exc


def _text(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
