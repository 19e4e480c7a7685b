"""What edge processes and the hub say to each other. Both are of one version: the hub's process starts the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from tandem.protocol.decoding import safe_decoder
from tandem.protocol.digest import CacheScope
from tandem.protocol.errors import Overloaded, ServingError
from tandem.protocol.messages import Prefetch
from tandem.router.backend import GenerateRequest, PinRequest, PinState, TokenDelta

__all__ = [
    "Answered",
    "Ask",
    "Check",
    "Close",
    "Decisions",
    "Deltas",
    "EndPin",
    "Explain",
    "Failed",
    "FetchPin",
    "Join",
    "ListPins",
    "MakePin",
    "Open",
    "Pools",
    "Question",
    "Scrape",
    "Status",
    "WireError",
    "decode_for_edge",
    "decode_for_hub",
    "encode",
    "error_of",
    "wire_error",
]


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# -- questions of an edge process, each with one answer ------------------------------------------------------------


class Explain(_Message, frozen=True):
    """`Backend.explain`."""

    request: GenerateRequest


class Decisions(_Message, frozen=True):
    """`Backend.decisions`."""


class Pools(_Message, frozen=True):
    """`Backend.pools`."""


class Check(_Message, frozen=True):
    """`Backend.check`."""


class Scrape(_Message, frozen=True):
    """The metrics of the hub's process, as Prometheus reads them."""


class MakePin(_Message, frozen=True):
    """`Pins.pin`."""

    request: PinRequest


class EndPin(_Message, frozen=True):
    """`Pins.unpin`."""

    pin_id: str
    tenant: str | None


class FetchPin(_Message, frozen=True):
    """`Pins.prefetch`."""

    pin_id: str
    prefetch: Prefetch
    tenant: str | None


class ListPins(_Message, frozen=True):
    """`Pins.pins`."""

    tenant: str | None
    cache_scope: CacheScope | None


Question = Explain | Decisions | Pools | Check | Scrape | MakePin | EndPin | FetchPin | ListPins
Answer = dict[str, Any] | list[Any] | str | PinState | list[PinState] | None


# -- to the hub ----------------------------------------------------------------------------------------------------


class Join(_Message, frozen=True):
    """The first message: asks for `Status` from now on."""


class Open(_Message, frozen=True):
    """Generate. `call` is a number of the edge process' own, never used again."""

    call: int
    request: GenerateRequest


class Close(_Message, frozen=True):
    """The client is gone."""

    call: int


class Ask(_Message, frozen=True):
    """A question; `call` as in `Open`."""

    call: int
    question: Question


# -- to an edge process --------------------------------------------------------------------------------------------


class Status(_Message, frozen=True):
    """What every request needs to know. Sent at once to a new edge process, then at an interval: silence is death."""

    model: str
    max_model_len: int | None
    unready: str | None  # why requests should not be sent here now
    can_serve: bool  # whether workers are there at all


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """A `ServingError`."""

    kind: str  # name of its class
    message: str
    param: str | None
    code: str | None
    retry_after_s: float


class Deltas(_Message, frozen=True):
    """New tokens of any number of calls: one message for all that came at once."""

    items: list[tuple[int, TokenDelta]]


class Failed(_Message, frozen=True):
    """The end of a call."""

    call: int
    error: WireError


class Answered(_Message, frozen=True):
    """The answer to a question, encoded: its type is the question's matter."""

    call: int
    answer: msgspec.Raw


ToHub = Join | Open | Close | Ask
ToEdge = Status | Deltas | Failed | Answered

_encoder = msgspec.msgpack.Encoder()


def encode(message: ToHub | ToEdge | Answer) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


# Of an edge process and of the hub. Both raise `msgspec.DecodeError`.
decode_for_hub: Callable[[bytes], ToHub] = safe_decoder(ToHub)
decode_for_edge: Callable[[bytes], ToEdge] = safe_decoder(ToEdge)


def wire_error(exc: ServingError) -> WireError:
    """The error as it travels."""
    retry_after_s = exc.retry_after_s if isinstance(exc, Overloaded) else 0.0
    return WireError(type(exc).__name__, exc.message, exc.param, exc.code, retry_after_s)


def error_of(wire: WireError) -> ServingError:
    """The error as it was raised: its class decides how a client sees it."""
    kind = next((kind for kind in _kinds(ServingError) if kind.__name__ == wire.kind), ServingError)
    error = kind.__new__(kind)  # a subclass may be made of other things than a message
    ServingError.__init__(error, wire.message, param=wire.param)
    error.code = wire.code
    if isinstance(error, Overloaded):
        error.retry_after_s = wire.retry_after_s
    return error


def _kinds(base: type[ServingError]) -> Iterator[type[ServingError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)
