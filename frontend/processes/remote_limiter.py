"""Limits of API keys in an edge process: the hub counts for all edge processes together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container
from functools import partial
from typing import Any

from tandem.frontend.keys.api_key import ApiKey
from tandem.frontend.processes import wire
from tandem.protocol.fault_boundary import undone_on_error

__all__ = ["RemoteLimiter"]

Ask = Callable[[int, Any], Awaitable[object]]  # sends a message with this number, and waits for its answer


class RemoteLimiter:
    """The `Limiter` of a hub."""

    def __init__(self, next_number: Callable[[], int], ask: Ask, send: Callable[[Any], None]) -> None:
        """`next_number` raises `NoWorker` while the hub is silent. `send` sends a message without an answer."""
        self._next_number = next_number
        self._ask = ask
        self._send = send

    async def begin(self, key: ApiKey) -> _RemoteUse:
        """A request begins. Raises `RateLimitExceeded`, or a `WorkerError` if the hub does not answer."""
        number = self._next_number()
        use = _RemoteUse(number, self._next_number, self._ask, self._send)
        with undone_on_error(partial(use.end, 0, 0)):  # also if the client leaves: the hub may have counted the request
            await self._ask(number, wire.BeginUse(number, key.id))
        return use

    def keep(self, key_ids: Container[str]) -> None:
        """The hub forgets keys by itself."""


class _RemoteUse:
    """As `LimitedUse`."""

    def __init__(self, number: int, next_number: Callable[[], int], ask: Ask, send: Callable[[Any], None]) -> None:
        self._number = number
        self._next_number = next_number
        self._ask = ask
        self._send = send

    async def charge(self, num_prompt_tokens: int, num_answers: int, max_tokens: int) -> None:
        """As `KeyLimiter.charge`."""
        number = self._next_number()
        await self._ask(number, wire.ChargeUse(number, self._number, num_prompt_tokens, num_answers, max_tokens))

    def end(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """As `KeyLimiter.end`."""
        self._send(wire.EndUse(self._number, num_prompt_tokens, num_output_tokens))
