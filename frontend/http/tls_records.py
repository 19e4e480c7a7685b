"""Bytes of TLS that have arrived, cut into records: their receiver takes as many at a time as it has time for."""

from __future__ import annotations

__all__ = ["TlsRecords"]

_HEADER_BYTES = 5  # type, version, length
_TYPES = range(20, 25)
_MAX_CONTENT_BYTES = (16 + 2) * 1024  # encrypted; TLS 1.3 allows less


class TlsRecords:
    """Bytes in the order in which they came."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def __len__(self) -> int:
        return len(self._unread)

    def add(self, data: bytes) -> None:
        """More bytes arrived."""
        self._unread += data

    def take(self) -> bytes:
        """The next whole record; b"" if it has not arrived yet. What is no TLS comes as it is, to be refused."""
        unread = self._unread
        if len(unread) < _HEADER_BYTES:
            return b""
        num_content_bytes = int.from_bytes(unread[3:5], "big")
        is_record = unread[0] in _TYPES and unread[1] == 3 and num_content_bytes <= _MAX_CONTENT_BYTES
        num_bytes = _HEADER_BYTES + num_content_bytes if is_record else len(unread)
        if len(unread) < num_bytes:
            return b""
        record = bytes(unread[:num_bytes])
        del unread[:num_bytes]
        return record

    def clear(self) -> None:
        """Forget them."""
        self._unread = bytearray()
