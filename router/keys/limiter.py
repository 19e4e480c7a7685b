"""Limits of API keys, as the HTTP side sees them. The hub has the only limiter of several router processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Protocol

from tandem.router.keys.api_key import ApiKey
from tandem.scheduling.admission.key_limits import KeyLimiter, KeyUsage

__all__ = ["KeyUse", "LimitedUse", "Limiter", "LocalLimiter"]


class LimitedUse(Protocol):
    """One request that a limiter counts."""

    async def charge(self, num_prompt_tokens: int, num_answers: int, max_tokens: int) -> None:
        """As `KeyLimiter.charge`."""

    def end(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """As `KeyLimiter.end`."""


class Limiter(Protocol):
    """Counts what keys use."""

    async def begin(self, key: ApiKey) -> LimitedUse:
        """A request begins. Raises `RateLimitExceeded`."""

    def keep(self, key_ids: Container[str]) -> None:
        """Forget all other keys."""


class LocalLimiter:
    """The `Limiter` that counts in this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.limiter = KeyLimiter()
        self.clock = clock

    async def begin(self, key: ApiKey) -> LocalUse:
        """A request begins. Raises `RateLimitExceeded`."""
        return self.begin_now(key)

    def begin_now(self, key: ApiKey) -> LocalUse:
        """`begin` without `await`."""
        return LocalUse(self, self.limiter.begin(key.id, key.limits, self.clock()))

    def keep(self, key_ids: Container[str]) -> None:
        """Forget all other keys."""
        self.limiter.keep(key_ids)


class LocalUse:
    """As `LimitedUse`."""

    def __init__(self, owner: LocalLimiter, usage: KeyUsage) -> None:
        self._owner = owner
        self._usage = usage

    async def charge(self, num_prompt_tokens: int, num_answers: int, max_tokens: int) -> None:
        """As `KeyLimiter.charge`."""
        self.charge_now(num_prompt_tokens, num_answers, max_tokens)

    def charge_now(self, num_prompt_tokens: int, num_answers: int, max_tokens: int) -> None:
        """`charge` without `await`."""
        self._owner.limiter.charge(self._usage, num_prompt_tokens, num_answers, max_tokens, self._owner.clock())

    def end(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """As `KeyLimiter.end`."""
        self._owner.limiter.end(self._usage, num_prompt_tokens, num_output_tokens, self._owner.clock())


class KeyUse:
    """Counts one request against its key's limits. The middleware ends it on every path."""

    def __init__(self, use: LimitedUse, *, is_charged: bool) -> None:
        """`is_charged`: the key has a limit of tokens."""
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._use = use
        self._is_charged = is_charged

    async def charge(self, num_prompt_tokens: int, num_answers: int, max_tokens: int) -> None:
        """Charge the prompt and the most that all answers together may be. Raises `RateLimitExceeded`."""
        if self._is_charged:
            await self._use.charge(num_prompt_tokens, num_answers, max_tokens)
            self.num_prompt_tokens = num_prompt_tokens

    def end(self, *, is_refused: bool) -> None:
        """The request is over. One that was refused takes no tokens."""
        if is_refused:
            self._use.end(0, 0)
        else:
            self._use.end(self.num_prompt_tokens, self.num_output_tokens)
