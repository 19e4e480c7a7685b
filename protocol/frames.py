"""Messages in a stream of bytes: 4 bytes with the length, least significant first, then the message."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from asyncio import StreamReader

_HEAD_BYTES = 4
_MAX_BYTES = 2**32 - 1  # what a head can tell


class FrameTooLong(ValueError):
    """A message was announced that is longer than any that the other end may send."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"a message of {num_bytes} bytes was announced")


def framed(message: bytes) -> bytes:
    """The message as it is sent."""
    return len(message).to_bytes(_HEAD_BYTES, "little") + message


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next message, for which this blocks; None at the end."""
    head = stream.read(_HEAD_BYTES)
    return stream.read(_length(head)) if len(head) == _HEAD_BYTES else None


async def next_frame(stream: StreamReader) -> bytes:
    """The next message. Raises `asyncio.IncompleteReadError` at the end."""
    return await stream.readexactly(_length(await stream.readexactly(_HEAD_BYTES)))


class Frames:
    """The messages in what has arrived."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._unread = bytearray()

    def add(self, data: bytes) -> list[bytes]:
        """The messages that these bytes complete, oldest first. Raises `FrameTooLong`, in later calls too."""
        self._unread += data
        messages: list[bytes] = []
        start = 0
        while len(self._unread) - start >= _HEAD_BYTES:
            begin = start + _HEAD_BYTES
            length = _length(self._unread[start:begin])
            if length > self._max_bytes:
                raise FrameTooLong(length)
            if len(self._unread) < begin + length:
                break
            messages.append(bytes(self._unread[begin : begin + length]))
            start = begin + length
        del self._unread[:start]
        return messages


def _length(head: bytes | bytearray) -> int:
    return int.from_bytes(head, "little")
