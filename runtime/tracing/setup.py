"""Switches tracing on. A process without tracing loads nothing else of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import ConfigError

if TYPE_CHECKING:
    from tandem.runtime.tracing.export import SpanExport
    from tandem.runtime.tracing.tracing import Tracing


def check_tracing(*, is_on: bool) -> None:
    """Raise `ConfigError` if tracing could not begin: OpenTelemetry is missing, or its variables cannot be used."""
    asyncio.run(close_tracing(begin_tracing("check", is_on=is_on)))


def begin_tracing(process: str, *, is_on: bool) -> SpanExport | None:
    """The export of this process's spans; None if tracing is off. Raises `ConfigError`.

    `process` is part of the names of its metrics: "router" where HTTP is answered, "decider" where other
    processes do that.
    """
    if not is_on or os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    try:
        from tandem.runtime.tracing.export import SpanExport
    except ImportError as exc:
        raise ConfigError(f"--tracing needs the extra otel ({exc}): pip install 'tandem-serve[otel]'") from exc
    return SpanExport(process)


def begin_decider_tracing(config: RouterConfig) -> SpanExport | None:
    """`begin_tracing` in the process that decides, which answers HTTP too unless others do."""
    return begin_tracing("router" if config.router_processes == 1 else "decider", is_on=config.tracing)


def tracing_of(export: SpanExport | None) -> Tracing | None:
    """The object that makes the spans; None if tracing is off."""
    return None if export is None else export.tracing


async def close_tracing(export: SpanExport | None) -> None:
    """Send the last spans. It takes a bounded time."""
    if export is not None:
        await export.close()


@contextlib.asynccontextmanager
async def closing_tracing(export: SpanExport | None) -> AsyncIterator[None]:
    """`close_tracing` at the end of the block."""
    try:
        yield
    finally:
        await close_tracing(export)
