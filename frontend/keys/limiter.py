"""Limits of API keys, as the HTTP side sees them. Of several router processes the deciding one has the only limiter."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Protocol

from typing_extensions import override

from tandem.frontend.keys.api_key import ApiKey
from tandem.scheduling.admission.key_limits import KeyLimiter, KeyUsage

# What work on requests that are not served costs. A served token takes a thousandth of a second of a worker, or more.
TEXT_BYTES_PER_TOKEN = 128  # encoding them takes a tenth of a millisecond
TOKENS_PER_CPU_S = 1000


class LimitedUse(Protocol):
    """One request that a limiter counts."""

    async def charge(self, num_prompt_tokens: int, num_answers: int, max_tokens: int) -> None:
        """Charge the prompt and the most that all answers together may be. Raises `RateLimitExceeded`."""

    def end(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """The request is over: it is charged for the tokens that were computed."""


class Limiter(Protocol):
    """Counts what keys use."""

    async def begin(self, key: ApiKey) -> LimitedUse:
        """A request begins. Raises `RateLimitExceeded`."""

    def keep(self, key_ids: Container[str]) -> None:
        """Forget all other keys."""


class LocalLimiter(Limiter):
    """The `Limiter` that counts in this process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.limiter = KeyLimiter()
        self.clock = clock

    @override
    async def begin(self, key: ApiKey) -> LocalUse:
        return LocalUse(self, self.limiter.begin(key.id, key.limits, self.clock()))

    @override
    def keep(self, key_ids: Container[str]) -> None:
        self.limiter.keep(key_ids)


class LocalUse(LimitedUse):
    """A request that is counted in this process."""

    def __init__(self, owner: LocalLimiter, usage: KeyUsage) -> None:
        self._owner = owner
        self._usage = usage

    @override
    async def charge(self, num_prompt_tokens: int, num_answers: int, max_tokens: int) -> None:
        self._owner.limiter.charge(self._usage, num_prompt_tokens, num_answers, max_tokens, self._owner.clock())

    @override
    def end(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._owner.limiter.end(self._usage, num_prompt_tokens, num_output_tokens, self._owner.clock())


class KeyUse:
    """Counts one request against its key's limits. The middleware ends it on every path."""

    def __init__(self, use: LimitedUse, *, is_charged: bool) -> None:
        """`is_charged`: the key has a limit of tokens."""
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_worked_tokens = 0  # what the router's own work on it counts, in tokens
        self._use = use
        self._is_charged = is_charged

    async def charge(self, num_prompt_tokens: int, num_answers: int, max_tokens: int) -> None:
        """Charge the prompt and the most that all answers together may be. Raises `RateLimitExceeded`."""
        if self._is_charged:
            await self._use.charge(num_prompt_tokens, num_answers, max_tokens)
            self.num_prompt_tokens = num_prompt_tokens

    def note_text(self, num_bytes: int) -> None:
        """A text of this size is encoded. That counts only as far as its tokens, if it is served, count less."""
        self.num_worked_tokens += num_bytes // TEXT_BYTES_PER_TOKEN

    def note_cpu(self, cpu_s: float) -> None:
        """The router worked on the request for this long, beside encoding its text. It counts as a text does."""
        self.num_worked_tokens += round(cpu_s * TOKENS_PER_CPU_S)

    def end(self, *, is_refused: bool, num_computed_tokens: int = 0) -> None:
        """The request is over. It takes the tokens that were computed, whatever its status.

        `num_computed_tokens`: of its prompt, before it was refused without an answer.
        """
        num_outputs = self.num_output_tokens
        num_prompt = num_computed_tokens if is_refused and not num_outputs else self.num_prompt_tokens
        self._use.end(max(num_prompt, self.num_worked_tokens - num_outputs), num_outputs)
