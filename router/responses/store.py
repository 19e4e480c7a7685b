"""The responses that later ones may refer to: bounded in memory, each for its own tenant only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import orjson

from tandem.protocol.errors import RequestError
from tandem.router.openai.schema import ChatMessage

__all__ = ["ResponseNotFound", "ResponseStore", "StoredResponse"]

MAX_BYTES = 256 << 20
MAX_AGE_S = 24 * 3600.0


class ResponseNotFound(RequestError):
    """There is no such response: it was not stored, it was forgotten, or it is another tenant's."""

    status = 404
    code = "response_not_found"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation that it ends."""

    tenant: str
    body: bytes
    messages: bytes  # of the conversation without instructions, the answer included
    conversation_id: str
    stored_s: float

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return len(self.body) + len(self.messages)

    def conversation(self) -> list[ChatMessage]:
        """Its messages."""
        return msgspec.json.decode(self.messages, type=list[ChatMessage])


class ResponseStore:
    """Forgets the oldest responses beyond `max_bytes`, and all after a day."""

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def put(self, tenant: str, body: dict[str, object], messages: list[ChatMessage], conversation_id: str) -> None:
        """Keep a response under its id."""
        stored = StoredResponse(
            tenant, orjson.dumps(body), msgspec.json.encode(messages), conversation_id, self._clock()
        )
        self._responses[str(body["id"])] = stored
        self._num_bytes += stored.num_bytes
        while self._responses and (self._num_bytes > self._max_bytes or self._is_old(self._oldest)):
            self._num_bytes -= self._responses.popitem(last=False)[1].num_bytes

    def get(self, response_id: str, tenant: str, *, param: str) -> StoredResponse:
        """A tenant's response. Raises `ResponseNotFound` that names the field `param`."""
        stored = self._responses.get(response_id)
        if stored is None or stored.tenant != tenant or self._is_old(stored):
            raise ResponseNotFound(
                f"There is no response {response_id[:100]!r}. Responses are kept in memory, for a day at most.",
                param=param,
            )
        return stored

    def delete(self, response_id: str, tenant: str) -> None:
        """Forget a tenant's response. Raises `ResponseNotFound`."""
        self._num_bytes -= self.get(response_id, tenant, param="response_id").num_bytes
        del self._responses[response_id]

    @property
    def _oldest(self) -> StoredResponse:
        return next(iter(self._responses.values()))

    def _is_old(self, stored: StoredResponse) -> bool:
        return self._clock() - stored.stored_s > MAX_AGE_S
