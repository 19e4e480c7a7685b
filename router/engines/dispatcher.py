"""The seam between relaying a request's bytes and deciding where it goes.

    relaying    body, connections to engines, streams, retries: any number of processes
    deciding    fleet, queues, bookings, what is learned of engines: one process

`LocalDispatcher` decides in this process; `RemoteDispatcher` asks the process that does. All times are of
`time.monotonic`, which is the same clock in all processes of a machine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from tandem.protocol.digest import TOKEN_BYTES, CacheScope
from tandem.router.engines.config import EngineSpec
from tandem.scheduling.request import ServiceClass

__all__ = ["Dispatcher", "EngineListener", "Reservation", "RoutingRequest", "Target"]


class RoutingRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A client's request as the deciding side needs to know it."""

    request_id: str
    model: str
    prompt: bytes  # token ids, as `token_bytes` packs them
    cache_scope: CacheScope  # whose cached blocks it may use
    max_tokens: int
    is_stream: bool
    service_class: ServiceClass
    explains: bool = False  # whether the target shall say why it was chosen

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt) // TOKEN_BYTES


class Target(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Where a request goes: one engine, or a pair of engines that hand KV over. Both are names."""

    prefill: str
    decode: str
    num_expected_cached_tokens: int  # prompt tokens that the prefix index expects to be cached there
    decision: dict[str, Any] | None = None  # why, as JSON, if that was asked for

    @property
    def is_pair(self) -> bool:
        """Whether KV is handed over from one engine to another."""
        return self.prefill != self.decode


class Reservation(Protocol):
    """What one request holds at the deciding side: its place in the queue, then its booking on a target.

    Its owner calls `release` on every path, and tells it what happens to the request.
    """

    async def place(self) -> Target:
        """Wait in the queue if necessary, and book a target. Raises a `ServingError`."""

    async def place_elsewhere(self) -> Target:
        """Give the target up and book another one, without those engines that failed or refused the request.

        It does not wait again. Raises a `ServingError`.
        """

    def answered(self) -> None:
        """The first byte of the answer came: the engines of the target work."""

    def failed(self, engine: str, *, is_absent: bool = False) -> None:
        """The engine failed the request. `is_absent`: nobody listens there."""

    def refused(self, engine: str, retry_after_s: float) -> None:
        """The engine has no room and wants nothing for so long."""

    def prefilled(self, now: float) -> None:
        """The prefill engine of a pair returned; the request goes to the decode engine next."""

    def first_token(self, now: float) -> None:
        """The first token of a stream came."""

    def is_gap_due(self, now: float) -> bool:
        """Whether `gap` has any use now. Cheap, because it is asked at every token."""

    def gap(self, duration_s: float, now: float) -> None:
        """Two tokens of the stream came this far apart, the second of them now."""

    def ended(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """The answer is complete."""

    def release(self) -> None:
        """Give everything back. Later calls change nothing."""


class EngineListener(Protocol):
    """Is told which engines there are."""

    def engine_added(self, spec: EngineSpec, *, is_trusted: bool) -> None:
        """An engine joined the fleet. Only a trusted one may be at an address of this machine."""

    def engine_removed(self, name: str) -> None:
        """An engine left the fleet: what still runs on it is aborted."""


class Dispatcher(Protocol):
    """Decides for the requests of this process."""

    @property
    def models(self) -> list[str]:
        """Names of the models that are served, or would be if their engines were there."""

    @property
    def unknown_engines(self) -> list[str]:
        """Names of engines that have not told their model yet."""

    @property
    def unready(self) -> str | None:
        """Why requests should not be sent here now; None when they should."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """It decides for as long as this context is entered."""

    def max_model_len(self, model: str) -> int | None:
        """Longest context of the model's engines; None while none has told."""

    def now(self) -> float:
        """The clock of all times that reservations are told."""

    def reserve(self, request: RoutingRequest, abort: Callable[[str], None]) -> Reservation:
        """A reservation that holds nothing yet. `abort` is called with a reason when its target is gone."""

    async def explain(self, request: RoutingRequest) -> dict[str, Any]:
        """What would be decided for this request now, as JSON. Raises a `ServingError`."""

    async def decisions(self) -> list[dict[str, Any]]:
        """The latest decisions, newest first, as JSON."""

    async def pools(self) -> dict[str, Any]:
        """Body of `/v1/pools`."""

    async def add_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Take an engine in; returns it as JSON. Raises `RequestError`."""

    async def remove_engine(self, name: str) -> dict[str, Any]:
        """Begin to drain an engine; returns it as JSON. Raises `EngineNotFound`."""
