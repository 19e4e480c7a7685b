"""Asks the autoscaler of a Ray cluster for nodes while an added worker waits for room.

A request names everything that the cluster should be able to hold, as if it were idle: the places of all workers, not
just that of the new one. Ray keeps one request for a cluster until the next one replaces it, even after the end of the
process that made it. So an empty request withdraws it as soon as nothing waits. If the server dies before that, the
next server of its service withdraws it, or the workers that outlived it do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_exists, _internal_kv_put

logger = logging.getLogger(__name__)

Resources = dict[str, float]

_SEND_TIMEOUT_S = 15.0  # Ray's own is 10 s
_AGAIN_S = 5.0


_NAMESPACE = b"tandem"  # in Ray's key-value store, where a service notes that it has asked for nodes


def _send(service: str, bundles: Sequence[Resources]) -> None:
    if bundles:
        _internal_kv_put(service, b"asked", namespace=_NAMESPACE)
    request_resources(bundles=list(bundles))
    if not bundles:
        _internal_kv_del(service, namespace=_NAMESPACE)


def has_left_request(service: str) -> bool:
    """Whether Ray still has a request of a dead server of this name. Blocks."""
    return bool(_internal_kv_exists(service, namespace=_NAMESPACE))


def withdraw_left_request(service: str) -> None:
    """Withdraw the request that a dead server of this name has left, if there is one. Blocks."""
    if has_left_request(service):
        _send(service, [])


class NodeRequests:
    """The latest request of one server."""

    def __init__(self, service: str, send: Callable[[str, Sequence[Resources]], None] = _send) -> None:
        """`send` tells Ray what this service needs; it may block."""
        self._send = partial(send, service)
        self._wanted: list[Resources] = []
        self._sent: list[Resources] | None = []  # None = not known
        self._is_changed = asyncio.Event()

    def want(self, bundles: Sequence[Resources]) -> None:
        """Ask that the cluster has room for all of these at once from now on; none = ask for nothing."""
        self._wanted = list(bundles)
        self._is_changed.set()

    def forget(self) -> None:
        """Replace the request that Ray has, whatever it is."""
        self._sent = None
        self._is_changed.set()

    async def run(self) -> None:
        """Tell Ray of each change, forever. What did not reach Ray is sent again."""
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
        """Tell Ray what is wanted, unless it knows. Returns whether it knows now."""
        wanted = self._wanted
        if wanted == self._sent:
            return True
        self._sent = None
        try:
            await asyncio.wait_for(asyncio.to_thread(self._send, wanted), _SEND_TIMEOUT_S)
        except (RayError, RuntimeError, OSError, TimeoutError) as exc:
            logger.warning("Ray was not told about the nodes that are needed: %s", str(exc) or type(exc).__name__)
            return False
        self._sent = wanted
        return True
