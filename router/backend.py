"""The seam between the HTTP edge and token generation. The edge knows HTTP and text, a backend knows token ids.

Backends are `RequestFlow`, on our own workers, and `RemoteBackend`, in a frontend process, which asks the deciding one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tandem.protocol.digest import CacheScope
from tandem.protocol.messages import Prefetch, SequenceDelta
from tandem.protocol.sampling import SamplingParams
from tandem.router.operator_api import OperatorApi
from tandem.router.streams import Stream
from tandem.scheduling.request import DEFAULT_CLASS, DEFAULT_TENANT, ServiceClass


class Backend(OperatorApi, Protocol):
    """Generates tokens. It registers its own metrics at its construction."""

    @property
    def model(self) -> str:
        """Name the model is served under."""

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and answer together; None while there is no worker."""

    @property
    def ready(self) -> bool:
        """Whether a request could be placed now."""

    @property
    def cache(self) -> Pins:
        """The pins of the KV cache."""

    def serve(self, request: GenerateRequest) -> Stream[SequenceDelta]:
        """Generate, ending with a delta that has a `finish_reason`.

        The stream raises a `ServingError`. Its `aclose` cancels the request on its workers and does not wait for them.
        """

    async def explain(self, request: GenerateRequest) -> dict[str, Any]:
        """The decision that this request would get now, as JSON; nothing is sent or booked. Raises a `ServingError`."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    cache_scope: CacheScope  # only requests of one scope share cached blocks
    conversation_id: str = ""  # "" = none
    service_class: ServiceClass = DEFAULT_CLASS
    explains: bool = False  # whether the first delta carries the routing decision
    traceparent: str = ""  # the enclosing span in W3C's format; "" = not traced
    is_later_choice: bool = False  # whether another choice may have begun the answer: then this one waits for a worker
    # The request for the first answer to this prompt, which also admits this one; "" = it is that one. Serve it last:
    # those that wait for it begin with it, as forks of its sequence.
    fork_of: str = ""
    call_ids: frozenset[int] = frozenset()  # an answer with one of these tokens calls a tool; empty = none can tell
    is_demoted: bool = False  # when it is complete, its blocks are the first that tiers evict
    adapter: str = ""  # LoRA adapter: only workers that serve it are used, and only its requests share blocks


class HintAction(enum.StrEnum):
    """What a request's cache hint asks for."""

    RETAIN = "retain"
    DEMOTE = "demote"
    PREFETCH = "prefetch"


class HintedPin(NamedTuple):
    """What a cache hint got."""

    ttl_s: float
    num_tokens: int  # in the blocks that are kept
    is_cut: bool  # the quota left room for this beginning only


class Pins(Protocol):
    """Prefixes that clients asked to keep in the cache.

    `tenant` is the caller's: pins of other tenants do not exist for it. None = an operator, or a server without API
    keys.
    """

    async def pin(self, request: PinRequest) -> PinState:
        """Keep a prefix. Raises a `ServingError`."""

    async def hint(self, request: PinRequest, action: HintAction) -> HintedPin:
        """Keep a prefix as far and as long as the quotas allow; for `DEMOTE` only say whether it has an effect.

        Raises a `ServingError` if nothing can be done.
        """

    async def unpin(self, pin_id: str, tenant: str | None) -> None:
        """End a pin now. Raises `PinNotFound`."""

    async def prefetch(self, pin_id: str, prefetch: Prefetch, tenant: str | None) -> PinState:
        """Bring a pin's blocks up now. Raises `PinNotFound`."""

    async def pins(self, tenant: str | None, cache_scope: CacheScope | None) -> list[PinState]:
        """The live pins of one scope, oldest first; None = of all scopes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRequest:
    """A prefix to keep."""

    token_ids: list[int] | None  # None = the whole conversation, which grows with its turns
    cache_scope: CacheScope
    conversation_id: str = ""
    tenant: str = DEFAULT_TENANT
    ttl_s: float | None = None  # None = the default
    key_id: str = ""  # API key; "" = none
    max_pins_of_key: int | None = None  # live pins that the key may have; None = no limit
    prefetch: Prefetch = Prefetch.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class PinState:
    """A live pin."""

    pin_id: str
    tenant: str
    conversation_id: str
    num_blocks: int
    num_tokens: int  # tokens in these blocks
    remaining_s: float
    prefetch: Prefetch
    # By worker: leading blocks of the chain by place ("pool" or a tier); None for a worker that did not answer in time.
    held: dict[str, dict[str, int] | None]
