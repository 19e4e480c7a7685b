"""Copies the KV of a running request to another worker from time to time, in case its own worker dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tandem.protocol.fault_boundary import async_error_of

__all__ = ["StandbyCopies"]

logger = logging.getLogger(__name__)


class StandbyCopies:
    """The copies of one request's KV: one at a time, each after `every` new tokens. 0 = none."""

    def __init__(self, every: int, request_id: str) -> None:
        self._every = every
        self._request_id = request_id
        self._num_copied = 0  # tokens of prompt and answer when the latest copy began
        self._copying: asyncio.Future[None] | None = None

    def is_due(self, num_tokens: int) -> bool:
        """Whether a copy should begin, now that prompt and answer have so many tokens."""
        return self._every > 0 and self._copying is None and num_tokens - self._num_copied >= self._every

    def begin(self, num_tokens: int, copy: Callable[[], Awaitable[None]]) -> None:
        """Begin a copy. If it fails, the answer goes on without it."""
        self._num_copied = num_tokens
        self._copying = asyncio.ensure_future(self._run(copy))

    async def _run(self, copy: Callable[[], Awaitable[None]]) -> None:
        error = await async_error_of(copy())
        self._copying = None
        if error is not None:
            logger.debug("the KV of request %s was not copied: %r", self._request_id, error)

    def stop(self) -> None:
        """Cancel the copy under way."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.cancel()
