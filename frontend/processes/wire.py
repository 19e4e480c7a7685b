"""Messages between frontend processes and the deciding process. Both run the same version: one starts the others.

    frontend -> deciding    Join; Call, Events, Cancel, Tell
    deciding -> frontend    Keys, StateUpdate; Results, Failed, Answered

A call names a method of a Protocol (`methods.py`). It gets one answer, or it lasts: then it gets results until it ends,
and its caller may send events about it, which are calls of methods themselves. `Tell` is a call without an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from typing_extensions import Buffer

from tandem.frontend.keys.api_key import ApiKey
from tandem.protocol.decoding import safe_decoder
from tandem.protocol.errors import Overloaded, ServingError, error_kinds

T = TypeVar("T")


class Invocation(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """A method and its arguments: a struct when it is sent, `msgspec.Raw` until they are decoded."""

    method: str
    arguments: T


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


# -- to the deciding process ---------------------------------------------------------------------------------------


class Join(_Message, frozen=True):
    """The first message of a connection: the sender is this frontend process, and wants to be told the state."""

    frontend_id: str


class Call(_Message, Generic[T], frozen=True):
    """Call a method. `number` is one that the frontend process never uses again."""

    number: int
    invocation: Invocation[T]


class Events(_Message, Generic[T], frozen=True):
    """What happened to any number of calls: one message for all events of one turn of the event loop."""

    items: list[tuple[int, Invocation[T]]]


class Cancel(_Message, frozen=True):
    """The call is over, or nobody waits for it."""

    number: int


class Tell(_Message, Generic[T], frozen=True):
    """Call a method that has no answer."""

    invocation: Invocation[T]


# -- to a frontend process -----------------------------------------------------------------------------------------


class Keys(_Message, frozen=True):
    """All API keys. Sent before the first state update, and when they change."""

    keys: list[ApiKey]


class StateUpdate(_Message, Generic[T], frozen=True):
    """State of the deciding process; sent when a frontend process joins, on change, and at an interval as a heartbeat.

    A deciding process that sends none is dead or hangs.
    """

    state: T


class Results(_Message, Generic[T], frozen=True):
    """What is new of any number of calls: one message for all results of one turn of the event loop."""

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
    """A call ended with an error."""

    number: int
    error: WireError


class Answered(_Message, frozen=True):
    """The answer to a call, encoded: its type depends on the method."""

    number: int
    answer: msgspec.Raw


encode = msgspec.msgpack.Encoder().encode
# For an unknown type, an integer of more than 64 bits, half a surrogate pair, deep nesting, an unset field.
_ENCODING_ERRORS = (TypeError, ValueError, OverflowError, RecursionError, AttributeError, msgspec.MsgspecError)
decode_call = safe_decoder(Join | Call[msgspec.Raw] | Events[msgspec.Raw] | Cancel | Tell[msgspec.Raw])


def decoder_of(*, results: Any, states: Any) -> Callable[[Buffer], Any]:
    """A decoder of messages to a frontend process, whose calls have these types of results."""
    return safe_decoder(Keys | StateUpdate[states] | Results[results] | Failed | Answered)


class Batch(Generic[T]):
    """Collects what is said about calls and sends it as one message at the end of the event loop's turn.

    A worker's step, or one read from a socket, brings many results at once.
    """

    def __init__(
        self,
        send: Callable[[bytes], object],
        kind: Callable[[list[tuple[int, T]]], Results[T] | Events[Any]],
        on_unsendable: Callable[[int, Exception], object],
    ) -> None:
        """`on_unsendable` is called with the call of an item that cannot be encoded."""
        self._send = send
        self._kind = kind
        self._on_unsendable = on_unsendable
        self._items: list[tuple[int, T]] = []

    def add(self, number: int, item: T) -> None:
        """Send this with all others of this turn."""
        if not self._items:
            asyncio.get_running_loop().call_soon(self._flush)
        self._items.append((number, item))

    def send(self, message: Any) -> None:
        """Send another message, after what was added before."""
        self._flush()
        self._send(encode(message))

    def _flush(self) -> None:
        if self._items:
            items, self._items = self._items, []
            self._send_items(items)

    def _send_items(self, items: list[tuple[int, T]]) -> None:
        """Send the items in one message. If that is impossible, send each alone: a bad item fails only its own call."""
        try:
            data = encode(self._kind(items))
        except _ENCODING_ERRORS as exc:
            if len(items) == 1:
                self._on_unsendable(items[0][0], exc)
            else:
                for item in items:
                    self._send_items([item])
        else:
            self._send(data)


def wire_error(exc: ServingError) -> WireError:
    """The error in the form in which it is sent."""
    retry_after_s = exc.retry_after_s if isinstance(exc, Overloaded) else 0.0
    return WireError(type(exc).__name__, exc.message, exc.param, exc.code, retry_after_s, exc.num_computed_tokens)


def error_of(wire: WireError) -> ServingError:
    """The error in the form in which it was raised: its class decides what a client sees."""
    kind = next((kind for kind in error_kinds() if kind.__name__ == wire.kind), ServingError)
    error = kind.__new__(kind)  # a subclass's constructor may take other arguments
    ServingError.__init__(error, wire.message, param=wire.param)
    error.code, error.num_computed_tokens = wire.code, wire.num_computed_tokens
    if isinstance(error, Overloaded):
        error.retry_after_s = wire.retry_after_s
    return error
