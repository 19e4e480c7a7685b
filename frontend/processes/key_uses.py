"""Limits of API keys with several processes: the deciding process counts for all frontend processes together."""

from __future__ import annotations

import itertools
from collections.abc import Container
from functools import partial
from typing import Protocol

from typing_extensions import override

from tandem.frontend.keys.api_key import ApiKey, InvalidApiKey
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.limiter import LimitedUse, Limiter, LocalLimiter
from tandem.frontend.processes.deciding_client import DecidingClient
from tandem.protocol.fault_boundary import undone_on_error
from tandem.scheduling.admission.key_limits import KeyUsage


class KeyUses(Protocol):
    """The requests of one frontend process whose keys have limits. `use` is a number that it never uses again."""

    async def begin(self, use: int, key_id: str) -> None:
        """A request with this key begins. Raises `RateLimitExceeded`."""

    async def charge(self, use: int, num_prompt_tokens: int, num_answers: int, max_tokens: int) -> None:
        """As `KeyLimiter.charge`."""

    def end(self, use: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """As `KeyLimiter.end`. Does nothing if it has not begun."""


class LocalUses:
    """The `KeyUses` in the deciding process. Its methods do not wait."""

    def __init__(self, api_keys: ApiKeys, limiter: LocalLimiter) -> None:
        self._api_keys = api_keys
        self._limiter = limiter
        self._uses: dict[int, KeyUsage] = {}

    def begin(self, use: int, key_id: str) -> None:
        """As `KeyUses.begin`. Raises `InvalidApiKey` too."""
        key = self._api_keys.get(key_id)
        if key is None:  # the frontend process does not know yet that the key is gone
            raise InvalidApiKey(f"The API key {key_id} was removed.")
        self._uses[use] = self._limiter.limiter.begin(key.id, key.limits, self._limiter.clock())

    def charge(self, use: int, num_prompt_tokens: int, num_answers: int, max_tokens: int) -> None:
        """As `KeyUses.charge`."""
        usage, now = self._uses[use], self._limiter.clock()
        self._limiter.limiter.charge(usage, num_prompt_tokens, num_answers, max_tokens, now)

    def end(self, use: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """As `KeyUses.end`."""
        if (ended := self._uses.pop(use, None)) is not None:
            self._limiter.limiter.end(ended, num_prompt_tokens, num_output_tokens, self._limiter.clock())

    def close(self) -> None:
        """The frontend process has ended, and its requests with it."""
        for use in list(self._uses):
            self.end(use, 0, 0)


class RemoteLimiter(Limiter):
    """The `Limiter` of a frontend process."""

    def __init__(self, client: DecidingClient) -> None:
        self._client = client
        self._numbers = itertools.count()

    @override
    async def begin(self, key: ApiKey) -> _RemoteUse:
        """A request begins. Raises `RateLimitExceeded`, or a `WorkerError` if the deciding process does not answer."""
        use = _RemoteUse(next(self._numbers), self._client)
        with undone_on_error(partial(use.end, 0, 0)):  # also if the client leaves: it may have been counted
            await self._client.ask(KeyUses.begin, use.number, key.id)
        return use

    @override
    def keep(self, key_ids: Container[str]) -> None:
        """Do nothing: the deciding process forgets keys by itself."""


class _RemoteUse(LimitedUse):
    def __init__(self, number: int, client: DecidingClient) -> None:
        self.number = number
        self._client = client

    @override
    async def charge(self, num_prompt_tokens: int, num_answers: int, max_tokens: int) -> None:
        await self._client.ask(KeyUses.charge, self.number, num_prompt_tokens, num_answers, max_tokens)

    @override
    def end(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        self._client.tell(KeyUses.end, self.number, num_prompt_tokens, num_output_tokens)
