"""The HTTP side of a server, as its launcher sees it, and how it is drained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from tandem.protocol.config import RouterConfig
from tandem.runtime.signals import StopSignals, wait_for_any

_FINAL_EVENTS_S = 2.0  # for clients to read how their answer ended


class HttpFrontend(Protocol):
    """The HTTP server, in this process or in frontend processes."""

    @property
    def has_started(self) -> asyncio.Event:
        """Set once the server serves."""

    @property
    def serving(self) -> asyncio.Future[Any]:
        """Done when the server has ended."""

    @property
    def is_serving(self) -> bool:
        """Whether the server has begun to serve."""

    @property
    def num_running(self) -> int:
        """Requests that are being answered."""

    def leave(self) -> None:
        """Go on, but answer `/ready` with 503, and let no connection be used again."""

    def drain(self) -> None:
        """Accept nothing more, let running answers end, then end the server."""


async def stop_serving(
    frontend: HttpFrontend,
    signals: StopSignals,
    shut_down: Callable[[], None],
    config: RouterConfig,
    progress: Callable[[str], None],
) -> None:
    """Drain as fast as the signal asks for: SIGTERM lets load balancers notice first, and gives answers more time."""
    timeout_s = config.drain_timeout_s
    if signals.is_service:
        timeout_s = config.shutdown_grace_s
        frontend.leave()
        if config.shutdown_delay_s:
            progress(f"SIGTERM: no longer ready, but serving for another {config.shutdown_delay_s:g} s")
            await wait_for_any(frontend.serving, signals.stop_now, timeout_s=config.shutdown_delay_s)
    await drain(frontend, signals.stop_now, shut_down, timeout_s, progress)


async def drain(
    frontend: HttpFrontend,
    stop_now: asyncio.Event,
    shut_down: Callable[[], None],
    timeout_s: float,
    progress: Callable[[str], None],
) -> None:
    """Accept nothing more and let answers end for `timeout_s` or until `stop_now`. `shut_down` ends the rest."""
    frontend.drain()
    if num_running := frontend.num_running:
        answers = "1 answer" if num_running == 1 else f"{num_running} answers"
        progress(f"stopping: waiting up to {timeout_s:g} s for {answers} (a second signal stops now)")
    else:
        progress("stopping")
    # Even if no answer is running: a frontend process may still read a request or send the end of an answer.
    await wait_for_any(frontend.serving, stop_now, timeout_s=timeout_s)
    shut_down()
    await asyncio.wait({frontend.serving}, timeout=_FINAL_EVENTS_S)
