"""Decodes bytes from other processes, with one kind of error for everything that can be wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from typing_extensions import Buffer


def safe_decoder(kind: Any) -> Callable[[Buffer], Any]:
    """A decoder of MessagePack into this type. It raises only `msgspec.DecodeError`."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def decode_safely(data: Buffer) -> Any:
        try:
            return decode(data)
        except (UnicodeDecodeError, RecursionError, OverflowError) as exc:  # msgspec lets them through
            raise msgspec.DecodeError(f"{type(exc).__name__}: {exc}") from exc

    return decode_safely
