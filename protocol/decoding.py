"""Decoding of bytes from elsewhere: whatever is wrong with them is told by one kind of error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from typing_extensions import Buffer

__all__ = ["safe_decoder"]


def safe_decoder(kind: Any) -> Callable[[Buffer], Any]:
    """A decoder of MessagePack into this type that raises `msgspec.DecodeError` alone, for all that is not one."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def decode_safely(data: Buffer) -> Any:
        try:
            return decode(data)
        except (UnicodeDecodeError, RecursionError, OverflowError) as exc:  # msgspec lets them through
            raise msgspec.DecodeError(f"{type(exc).__name__}: {exc}") from exc

    return decode_safely
