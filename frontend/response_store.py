"""Stored responses that later ones may refer to: bounded in memory, and each only for its own tenant."""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from tandem.frontend.http.json_body import check_brackets, collector_paused
from tandem.protocol.errors import RequestError

MAX_BYTES = 256 << 20
MAX_AGE_S = 24 * 3600.0


class ResponseNotFound(RequestError):
    """There is no such response: it was not stored, it was forgotten, or it is another tenant's."""

    status = 404
    code = "response_not_found"


class _Body(msgspec.Struct):
    """The output of a response; the rest of its body is passed over."""

    output: list[dict[str, Any]]


class StoredResponse(msgspec.Struct, frozen=True, array_like=True):
    """A response, and the conversation that it ends."""

    response_id: str
    tenant: str
    body: bytes  # JSON
    items: bytes  # JSON: those of the conversation without instructions, the output included
    conversation_id: str

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items of its output."""
        return msgspec.json.decode(self.body, type=_Body).output

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The items of the conversation. Raises `RequestError` if they are too many to decode."""
        check_brackets(self.items)
        with collector_paused(self.items):
            items: list[dict[str, Any]] = msgspec.json.decode(self.items)
        return items

    @property
    def input(self) -> list[dict[str, Any]]:
        """The items before its output: those of its input, and of earlier responses."""
        items = self.conversation
        return items[: len(items) - len(self.output)]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return len(self.body) + len(self.items)


class ResponseStore(Protocol):
    """Keeps responses for all processes of a router."""

    async def put(self, stored: StoredResponse) -> None:
        """Keep a response. Raises a `ServingError` if the process that keeps them does not answer."""

    async def get(self, response_id: str, tenant: str, param: str) -> StoredResponse:
        """A tenant's response. Raises `ResponseNotFound` that names the field `param`."""

    async def delete(self, response_id: str, tenant: str, param: str) -> None:
        """Forget a tenant's response. Raises `ResponseNotFound`."""


@dataclass(slots=True)
class _Tenant:
    """What is kept for one tenant."""

    ids: dict[str, None] = field(default_factory=dict)  # oldest first
    num_bytes: int = 0


class LocalResponses:
    """Keeps them in this process. All are forgotten after a day. Beyond `max_bytes`, the oldest ones of the tenant that
    has most are forgotten, so a tenant that stores much does not cost others their conversations.
    """

    def __init__(self, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._responses: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()  # with the time of storing
        self._tenants: defaultdict[str, _Tenant] = defaultdict(_Tenant)
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The size of all of them."""
        return self._num_bytes

    @property
    def response_ids(self) -> list[str]:
        """Ids of the kept responses, oldest first."""
        return list(self._responses)

    async def put(self, stored: StoredResponse) -> None:
        """Keep a response under its id."""
        self._responses[stored.response_id] = (self._clock(), stored)
        tenant = self._tenants[stored.tenant]
        tenant.ids[stored.response_id] = None
        tenant.num_bytes += stored.num_bytes
        self._num_bytes += stored.num_bytes
        while self._is_old(oldest := next(iter(self._responses))):
            self._forget(oldest)
        while self._num_bytes > self._max_bytes:
            largest = max(self._tenants.values(), key=lambda one: one.num_bytes)
            self._forget(next(iter(largest.ids)))

    async def get(self, response_id: str, tenant: str, param: str) -> StoredResponse:
        """A tenant's response. Raises `ResponseNotFound` that names the field `param`."""
        _, stored = self._responses.get(response_id, (0.0, None))
        if stored is None or stored.tenant != tenant or self._is_old(response_id):
            raise ResponseNotFound(
                f"There is no response {response_id[:100]!r}. Responses are kept in memory, for a day at most.",
                param=param,
            )
        return stored

    async def delete(self, response_id: str, tenant: str, param: str) -> None:
        """Forget a tenant's response. Raises `ResponseNotFound`."""
        await self.get(response_id, tenant, param)
        self._forget(response_id)

    def check_integrity(self) -> None:
        """Assert that the accounts of each tenant and of all agree with what is kept."""
        for name, tenant in self._tenants.items():
            mine = {key: stored for key, (_, stored) in self._responses.items() if stored.tenant == name}
            assert list(tenant.ids) == list(mine), f"tenant {name}: {list(tenant.ids)} are not {list(mine)}"
            assert mine, f"tenant {name} has nothing"
            assert tenant.num_bytes == sum(one.num_bytes for one in mine.values()), f"bytes of tenant {name}"
        assert self._num_bytes == sum(one.num_bytes for one in self._tenants.values()), "bytes of all"
        assert len(self._responses) == sum(len(one.ids) for one in self._tenants.values()), "responses of nobody"

    def _forget(self, response_id: str) -> None:
        stored = self._responses.pop(response_id)[1]
        tenant = self._tenants[stored.tenant]
        del tenant.ids[response_id]
        tenant.num_bytes -= stored.num_bytes
        self._num_bytes -= stored.num_bytes
        if not tenant.ids:
            del self._tenants[stored.tenant]

    def _is_old(self, response_id: str) -> bool:
        return self._clock() - self._responses[response_id][0] > MAX_AGE_S
