"""Messages between edge processes and the hub. Both run the same version: the hub's process starts the others.

    edge -> hub    Join; Open, Notes, Close of a call; Ask; BeginUse, ChargeUse, EndUse of a key
    hub -> edge    Keys, News; Items, Failed of a call; Answered

A call is a request that lasts: the hub sends its items, and the edge process may send notes about it. The types of
requests, notes, items, questions and news depend on the service (`WireFormat`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgspec
from typing_extensions import Buffer

from tandem.frontend.keys.api_key import ApiKey
from tandem.protocol.decoding import safe_decoder
from tandem.protocol.errors import Overloaded, ServingError
from tandem.protocol.fault_boundary import outcome_of

__all__ = [
    "Answered",
    "Ask",
    "Batch",
    "BeginUse",
    "ChargeUse",
    "Close",
    "EndUse",
    "Failed",
    "Items",
    "Join",
    "Keys",
    "News",
    "Notes",
    "Open",
    "WireError",
    "WireFormat",
    "calls_in",
    "encode",
    "error_of",
    "wire_error",
]

T = TypeVar("T")


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# -- to the hub ----------------------------------------------------------------------------------------------------


class Join(_Message, frozen=True):
    """The first message of a connection: the sender is this edge process, and wants news from now on."""

    edge_id: str


class Open(_Message, Generic[T], frozen=True):
    """Begin a call. `call` is a number that the edge process never uses again."""

    call: int
    request: T


class Notes(_Message, Generic[T], frozen=True):
    """What happened to any number of calls: one message for all notes of one turn of the event loop."""

    items: list[tuple[int, T]]


class Close(_Message, frozen=True):
    """The call is over, or nobody waits for it any more."""

    call: int


class Ask(_Message, Generic[T], frozen=True):
    """A question, which gets one answer; `call` as in `Open`."""

    call: int
    question: T


class BeginUse(_Message, frozen=True):
    """A request with an API key that has limits begins; gets one answer, empty or an error. `call` as in `Open`."""

    call: int
    key_id: str


class ChargeUse(_Message, frozen=True):
    """Charge the request that began with `use` for its tokens; gets one answer, empty or an error."""

    call: int
    use: int
    num_prompt_tokens: int
    num_answers: int
    max_tokens: int


class EndUse(_Message, frozen=True):
    """The request that began with `use` is over, and took this many tokens."""

    use: int
    num_prompt_tokens: int
    num_output_tokens: int


# -- to an edge process --------------------------------------------------------------------------------------------


class Keys(_Message, frozen=True):
    """All API keys. Sent before the first news, and when they change."""

    keys: list[ApiKey]


class News(_Message, Generic[T], frozen=True):
    """What every request needs to know. Sent when an edge process joins, when it changes, and at an interval.

    A hub that sends none is dead or hangs.
    """

    news: T


class Items(_Message, Generic[T], frozen=True):
    """What is new of any number of calls: one message for all items of one turn of the event loop."""

    items: list[tuple[int, T]]


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """A `ServingError`."""

    kind: str  # the name of its class
    message: str
    param: str | None
    code: str | None
    retry_after_s: float
    num_computed_tokens: int = 0


class Failed(_Message, frozen=True):
    """A call or a question ended with an error."""

    call: int
    error: WireError


class Answered(_Message, frozen=True):
    """The answer to a question, encoded: its type depends on the question."""

    call: int
    answer: msgspec.Raw


class WireFormat:
    """The decoders of one service's messages. They raise `msgspec.DecodeError`."""

    def __init__(self, *, request: Any, question: Any, item: Any, news: Any, note: Any = None) -> None:
        to_hub = Join | Open[request] | Notes[note] | Close | Ask[question] | BeginUse | ChargeUse | EndUse
        to_edge = Keys | News[news] | Items[item] | Failed | Answered
        self.decode_for_hub: Callable[[Buffer], Any] = safe_decoder(to_hub)
        self.decode_for_edge: Callable[[Buffer], Any] = safe_decoder(to_edge)


_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """The message, or an answer, as bytes."""
    return _encoder.encode(message)


def calls_in(data: bytes) -> list[int]:
    """The hub's calls that a message is about, found even if the message as a whole cannot be decoded."""
    match outcome_of(msgspec.msgpack.decode, data):
        case ["Open" | "Ask" | "Close" | "BeginUse" | "ChargeUse", int(call), *_]:
            return [call]
        case ["Notes", [*notes]]:
            return [note[0] for note in notes]
        case _:
            return []


class Batch(Generic[T]):
    """Collects what is said about calls and sends it as one message at the end of the event loop's turn.

    A worker's step, or one read from a socket, brings many items at once.
    """

    def __init__(
        self,
        send: Callable[[bytes], object],
        kind: type[Items[T]] | type[Notes[T]],
        on_unsendable: Callable[[int, Exception], object],
    ) -> None:
        """`on_unsendable` is called with the call of an item that cannot be encoded."""
        self._send = send
        self._kind = kind
        self._on_unsendable = on_unsendable
        self._items: list[tuple[int, T]] = []

    def add(self, call: int, item: T) -> None:
        """Send this with all others of this turn."""
        if not self._items:
            asyncio.get_running_loop().call_soon(self._flush)
        self._items.append((call, item))

    def send(self, message: Any) -> None:
        """Send another message, after what was added before."""
        self._flush()
        self._send(encode(message))

    def _flush(self) -> None:
        if self._items:
            items, self._items = self._items, []
            data = outcome_of(encode, self._kind(items))
            if isinstance(data, bytes):
                self._send(data)
            else:
                self._send_each(items)

    def _send_each(self, items: list[tuple[int, T]]) -> None:
        """Send the items one by one, so that an item that cannot be sent fails only its own call."""
        for item in items:
            data = outcome_of(encode, self._kind([item]))
            if isinstance(data, bytes):
                self._send(data)
            else:
                self._on_unsendable(item[0], data)


def wire_error(exc: ServingError) -> WireError:
    """The error in the form in which it is sent."""
    retry_after_s = exc.retry_after_s if isinstance(exc, Overloaded) else 0.0
    return WireError(type(exc).__name__, exc.message, exc.param, exc.code, retry_after_s, exc.num_computed_tokens)


def error_of(wire: WireError) -> ServingError:
    """The error in the form in which it was raised: its class decides what a client sees."""
    kind = next((kind for kind in _kinds(ServingError) if kind.__name__ == wire.kind), ServingError)
    error = kind.__new__(kind)  # a subclass's constructor may take other arguments
    ServingError.__init__(error, wire.message, param=wire.param)
    error.code, error.num_computed_tokens = wire.code, wire.num_computed_tokens
    if isinstance(error, Overloaded):
        error.retry_after_s = wire.retry_after_s
    return error


def _kinds(base: type[ServingError]) -> Iterator[type[ServingError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _kinds(kind)
