"""Asks the autoscaler of a Ray cluster for nodes while an added worker waits for room.

A request names everything that the cluster should be able to hold, as if it were idle: the places of all workers, not
just that of the new one. Ray keeps one request for a cluster until the next one replaces it, also after the end of the
process that made it. So it is withdrawn, by an empty one, as soon as nothing waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError

__all__ = ["NodeRequests", "Resources"]

logger = logging.getLogger(__name__)

Resources = dict[str, float]

_SEND_TIMEOUT_S = 15.0  # Ray's own is 10 s
_AGAIN_S = 5.0


def _send(bundles: Sequence[Resources]) -> None:
    request_resources(bundles=list(bundles))


class NodeRequests:
    """The latest request of one server. `send` is what tells Ray; it may block."""

    def __init__(self, send: Callable[[Sequence[Resources]], None] = _send) -> None:
        self._send = send
        self._wanted: list[Resources] = []
        self._sent: list[Resources] | None = []  # None = not known
        self._is_changed = asyncio.Event()

    def want(self, bundles: Sequence[Resources]) -> None:
        """From now on the cluster should have room for all of these at once; for none of them = as it likes."""
        self._wanted = list(bundles)
        self._is_changed.set()

    def forget(self) -> None:
        """Replace the request that Ray has, whatever it is."""
        self._sent = None
        self._is_changed.set()

    async def run(self) -> None:
        """Tell Ray of each change, for ever. What did not reach Ray is sent again."""
        while True:
            await self._is_changed.wait()
            self._is_changed.clear()
            if not await self._told():
                await asyncio.sleep(_AGAIN_S)
                self._is_changed.set()

    async def close(self) -> None:
        """Withdraw the request. Call it when `run` has ended."""
        self._wanted = []
        await self._told()

    async def _told(self) -> bool:
        """Tell Ray what is wanted, unless it knows; whether it knows now."""
        wanted = self._wanted
        if wanted == self._sent:
            return True
        self._sent = None
        try:
            await asyncio.wait_for(asyncio.to_thread(self._send, wanted), _SEND_TIMEOUT_S)
        except (RayError, RuntimeError, OSError, TimeoutError) as exc:
            logger.warning("Ray was not told of the nodes that are needed: %s", str(exc) or type(exc).__name__)
            return False
        self._sent = wanted
        return True
