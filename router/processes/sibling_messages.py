"""What the processes of one router say to each other, as frozen msgspec structs in one tagged union.

    process -> all    Opened, FirstToken, Released, EngineSet    changes, counted by `sequence`
    process -> all    Beat, Left                                 signs of life and its end
    process -> all    SnapshotWanted, Snapshot                   after a gap, and for who joins; all hear both
    process -> all    Question, Answer                           for what is shown of all together

Every message carries its sender, the epoch of that process and the number of changes it has made so far: who misses one
sees the gap at the next message, whatever it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from typing_extensions import Buffer

from tandem.protocol.decoding import safe_decoder
from tandem.scheduling.load import RequestLoad

__all__ = [
    "Answer",
    "Beat",
    "EngineEntry",
    "EngineSet",
    "FirstToken",
    "Left",
    "OpenRequest",
    "Opened",
    "Question",
    "Released",
    "SiblingMessage",
    "Snapshot",
    "SnapshotWanted",
    "Stamp",
    "Waiting",
    "decode_sibling_message",
    "encode_sibling_message",
]


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """Who sends, in which life of its process, and after how many changes."""

    sender: str
    epoch: int
    sequence: int


class OpenRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that has begun and not ended."""

    booking_id: int
    load: RequestLoad
    has_first_token: bool = False


class EngineEntry(msgspec.Struct, frozen=True, array_like=True):
    """The latest word on one engine. Of two, the one with the larger (version, author) counts, wherever it is read."""

    name: str
    version: int
    author: str
    spec: dict[str, Any] | None  # None = removed

    @property
    def order(self) -> tuple[int, str]:
        """What decides between two entries of one name."""
        return self.version, self.author


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """What the requests in one queue are predicted to take, as `tandem.scheduling.fair_queue.Work`."""

    num_requests: int
    worker_s: float
    pair_s: float
    alone_s: float
    new_tokens: int
    kv_tokens: int


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    stamp: Stamp


class Opened(_Message, frozen=True, array_like=True, tag="o"):
    """A request was booked. `digests` are its prompt's blocks, which its workers will have cached."""

    request: OpenRequest
    digests: list[bytes]


class FirstToken(_Message, frozen=True, array_like=True, tag="f"):
    """A booked prompt is computed. `wait_s`: from its sending to its first token; None where that was not seen."""

    booking_id: int
    wait_s: float | None


class Released(_Message, frozen=True, array_like=True, tag="r"):
    """A request has ended. The lengths are 0 unless it came to its end."""

    booking_id: int
    num_prompt_tokens: int
    num_output_tokens: int


class EngineSet(_Message, frozen=True, array_like=True, tag="e"):
    """An engine was added, changed or removed."""

    entry: EngineEntry


class Beat(_Message, frozen=True, array_like=True, tag="b"):
    """The sender lives, and hears these (name, epoch).

    `engines_sum` is the same for all who have the same latest words on engines. `waiting` is what waits in the sender's
    own queues, by queue.
    """

    engines_sum: int
    heard: list[tuple[str, int]]
    waiting: dict[str, Waiting] = {}


class Left(_Message, frozen=True, array_like=True, tag="l"):
    """The sender ends, and everything of it with it."""


class SnapshotWanted(_Message, frozen=True, array_like=True, tag="w"):
    """The sender asks `of` for all it has open."""

    of: str


class Snapshot(_Message, frozen=True, array_like=True, tag="s"):
    """All the sender has open, and all it knows of engines. Whoever hears it may use it, asked or not."""

    requests: list[OpenRequest]
    engines: list[EngineEntry]


class Question(_Message, frozen=True, array_like=True, tag="q"):
    """What the sender wants to know of everyone."""

    number: int
    topic: str


class Answer(_Message, frozen=True, array_like=True, tag="a"):
    """To question `number` of `to`; all hear it."""

    to: str
    number: int
    topic: str
    content: bytes


SiblingMessage = (
    Opened | FirstToken | Released | EngineSet | Beat | Left | SnapshotWanted | Snapshot | Question | Answer
)

_ENCODER = msgspec.msgpack.Encoder()


def encode_sibling_message(message: SiblingMessage) -> bytes:
    """The message as MessagePack."""
    return _ENCODER.encode(message)


# Raises `msgspec.DecodeError` for all that is no message.
decode_sibling_message: Callable[[Buffer], SiblingMessage] = safe_decoder(SiblingMessage)
