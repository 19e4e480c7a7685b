"""The seam between the HTTP edge and whatever generates tokens: the edge speaks text, a backend token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from tandem.protocol.digest import CacheScope
from tandem.protocol.messages import FinishReason, Prefetch, TokenLogprobs
from tandem.protocol.sampling import SamplingParams
from tandem.router.streams import Stream
from tandem.scheduling.request import DEFAULT_CLASS, ServiceClass
from tandem.scheduling.tenants import DEFAULT_TENANT

__all__ = ["Backend", "GenerateRequest", "PinRequest", "PinState", "Pins", "TokenDelta"]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    cache_scope: CacheScope  # whose cached blocks it may use
    conversation_id: str = ""  # "" = of none
    service_class: ServiceClass = DEFAULT_CLASS
    explains: bool = False  # whether the first delta is to bring the decision
    adapter: str = ""  # LoRA adapter: goes to workers that serve it, and shares blocks with its like only


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request, in order.

    The stop token, where one ended the sequence, may be the last of `token_ids`: it is counted, not shown.
    """

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int | None = None  # with the first token: prompt tokens not computed
    logprobs: list[TokenLogprobs] | None = None  # one for each of `token_ids`, if asked for
    decision: dict[str, Any] | None = None  # with the first token: why the request went where it went, if asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRequest:
    """A prefix to keep: these tokens, or (None) what the conversation consists of, now and from turn to turn."""

    token_ids: list[int] | None
    cache_scope: CacheScope
    conversation_id: str = ""
    tenant: str = DEFAULT_TENANT
    ttl_s: float | None = None  # None = the default
    prefetch: Prefetch = Prefetch.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class PinState:
    """A live pin."""

    pin_id: str
    tenant: str
    conversation_id: str
    num_blocks: int
    num_tokens: int  # of these blocks
    remaining_s: float
    prefetch: Prefetch
    # By worker, leading blocks of the chain by place ("pool" or a tier); None for a worker that did not answer in time.
    held: dict[str, dict[str, int] | None]


class Pins(Protocol):
    """Prefixes that clients ask to be kept. `tenant` is the one who asks: others' pins do not exist for it; None = an
    operator, or whoever asks where there are no API keys.
    """

    async def pin(self, request: PinRequest) -> PinState:
        """Keep a prefix. Raises a `ServingError`."""

    async def unpin(self, pin_id: str, tenant: str | None) -> None:
        """End a pin now. Raises `PinNotFound`."""

    async def prefetch(self, pin_id: str, prefetch: Prefetch, tenant: str | None) -> PinState:
        """Bring a pin's blocks up now. Raises `PinNotFound`."""

    async def pins(self, tenant: str | None, cache_scope: CacheScope | None) -> list[PinState]:
        """The live pins, oldest first; of one scope, or (None) of all."""


class Backend(Protocol):
    """What the edge needs of a cluster, or of the fake that stands for it in tests.

    A backend registers metrics of its own in the Prometheus registry given to it at construction.
    """

    @property
    def model(self) -> str:
        """Name the model is served under."""

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and answer together; None while no worker has told."""

    @property
    def ready(self) -> bool:
        """Whether workers are there that could serve a request now."""

    @property
    def cache(self) -> Pins:
        """What clients may say about the KV cache."""

    def serve(self, request: GenerateRequest) -> Stream[TokenDelta]:
        """Generate, ending with a delta that has a `finish_reason`.

        The stream raises a `ServingError`. Its `aclose` cancels the request wherever it runs; it must not wait for
        workers.
        """

    async def explain(self, request: GenerateRequest) -> dict[str, Any]:
        """What would be decided for this request now, as JSON; nothing is sent or booked. Raises a `ServingError`."""

    async def decisions(self) -> list[dict[str, Any]]:
        """The latest decisions, newest first, as JSON."""

    async def pools(self) -> dict[str, Any]:
        """State of the worker pools, as JSON."""

    async def check(self) -> dict[str, str]:
        """What is wrong with, or held by, each worker that should be idle; "" where nothing is."""
