"""The seam between relaying a request's bytes and deciding where it goes.

    relaying (frontend/relay/)    bodies, connections to engines, streams, retries: any number of processes
    deciding (router/engines/)    fleet, queues, bookings, learned costs: one process

`LocalDispatcher` decides in this process; `RemoteDispatcher` asks the process that does. All times are of
`time.monotonic`, which is the same clock in all processes of a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from tandem.protocol.digest import TOKEN_BYTES, CacheScope
from tandem.router.engines.config import EngineSpec
from tandem.router.operator_api import OperatorApi
from tandem.scheduling.request import ServiceClass

Abort = Callable[[str, str], None]  # ends a request with an error, which names the lost engine and the reason
GAP_INTERVAL_S = 0.1  # the deciding side uses one gap between tokens for each engine and interval


class DispatchRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the deciding side needs to know about a client's request."""

    request_id: str
    model: str  # the base model, if an adapter is asked for
    prompt: bytes  # token ids, as `token_bytes` packs them
    cache_scope: CacheScope  # the scope of cached blocks that it may use
    max_tokens: int
    is_stream: bool
    service_class: ServiceClass
    adapter: str = ""  # LoRA adapter that computes it; "" = none
    can_hand_over: bool = True  # whether one engine may compute the prompt and another one decode
    stored_before: str = ""  # id of an answer that its engine must have kept; "" = none
    is_exact: bool = True  # whether the engine computes these prompt tokens; else they are an estimate
    explains: bool = False  # whether the target says why it was chosen
    traceparent: str = ""  # span that this is part of, as W3C writes it; "" = not traced
    generates: bool = True  # whether the answer is generated; else it is embeddings, tokens of a text, ...

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt) // TOKEN_BYTES


class EngineTarget(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engines that a request goes to: one engine named twice, or a pair."""

    prefill: str
    decode: str
    num_expected_cached_tokens: int  # prompt tokens that the prefix index expects to be cached there
    expected_tier: str = ""  # tier of the engine that has the last of them; "" = they are in its pool
    decision: dict[str, Any] | None = None  # why, as JSON, if the request explains
    gives_token_ids: bool = False  # whether the engine that answers can give the ids of its tokens

    @property
    def is_pair(self) -> bool:
        """Whether KV is handed over from one engine to another."""
        return self.prefill != self.decode


class EngineReservation(Protocol):
    """What one request holds on the deciding side: its place in the queue, then its booking on a target.

    Its owner reports what happens to the request, and calls `release` on every path.
    """

    async def place(self) -> EngineTarget:
        """Wait in the queue if necessary, and book a target. Raises a `ServingError`."""

    async def place_elsewhere(self) -> EngineTarget:
        """Give the target up and book another one, on engines that neither failed nor refused the request.

        It does not wait in the queue again. Raises a `ServingError`.
        """

    async def go_on(self, cause: str, prompt: bytes, num_output_tokens: int) -> EngineTarget:
        """Give the target up and book another one, which goes on with a stream after tokens were shown.

        `prompt` is the prompt and the answer's tokens so far, packed as that of the request. `cause` says why the
        former engine was left. The stream is neither queued nor refused again. Raises a `ServingError`.
        """

    def answered(self) -> None:
        """The first byte of the answer came, so the engines of the target work."""

    def failed(self, engine: str, *, is_absent: bool = False, is_lost: bool = False) -> None:
        """The engine failed the request. `is_absent`: nothing listens there. `is_lost`: it died while it had it."""

    def refused(self, engine: str, retry_after_s: float) -> None:
        """The engine is busy: it gets no requests of this tenant for `retry_after_s`."""

    def prefilled(self, now: float) -> None:
        """The prefill engine of a pair returned; the request goes to the decode engine next."""

    def first_token(self, now: float) -> None:
        """The first token of a stream came."""

    def is_gap_due(self, now: float) -> bool:
        """Whether `gap` would use a gap now (`GAP_INTERVAL_S`). It is cheap, because it is called for every token."""

    def gap(self, duration_s: float, now: float) -> None:
        """Two tokens of the stream came this far apart; the second one came just now."""

    def held(self, *, is_held: bool) -> None:
        """The client has stopped reading its stream, or reads it again. While it does not read, no token is due."""

    def stored(self, answer_id: str) -> None:
        """The engine that answers keeps the answer under this id: later requests for it go there."""

    def ended(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """The answer is complete."""

    def release(self) -> None:
        """Give everything back. Later calls change nothing."""


class EngineListener(Protocol):
    """Gets to know of each engine that joins or leaves the fleet."""

    def engine_added(self, spec: EngineSpec, *, is_trusted: bool) -> None:
        """An engine was added. Only a trusted one may be at an address of this machine."""

    def engine_removed(self, name: str) -> None:
        """An engine left the fleet: what still runs on it is aborted."""


class Dispatcher(OperatorApi, Protocol):
    """Decides where the requests of this process go."""

    @property
    def models(self) -> list[str]:
        """Names of all models of the fleet, whether or not their engines are ready."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """The base model of each LoRA adapter of the fleet, whether or not its engines are ready."""

    @property
    def unknown_engines(self) -> list[str]:
        """Names of engines whose model is not known yet."""

    @property
    def unready(self) -> str | None:
        """Why the router is not ready; None when it is."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """A context in which the dispatcher decides."""

    def max_model_len(self, model: str) -> int | None:
        """Longest context of the model's engines; None while it is not known."""

    def capabilities(self, model: str) -> dict[str, Any] | None:
        """The capabilities that all reporting engines of the model share; None if none reports any."""

    def now(self) -> float:
        """The clock for all times that reservations are given."""

    def reserve(self, request: DispatchRequest, abort: Abort) -> EngineReservation:
        """A reservation that holds nothing yet. `abort` is called when one of its engines is gone."""

    async def explain(self, request: DispatchRequest) -> dict[str, Any]:
        """The decision that the request would get now, as JSON. Raises a `ServingError`."""

    async def answer_owner(self, answer_id: str, tenant: str) -> str:
        """The engine that keeps this answer of the tenant. Raises `AnswerNotFound`."""

    async def add_engine(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Add an engine, or each rank of a server; returns it as JSON. Raises `RequestError`."""

    async def remove_engine(self, name: str) -> dict[str, Any]:
        """Begin to drain an engine, or all ranks of a server; returns it as JSON. Raises `EngineNotFound`."""
