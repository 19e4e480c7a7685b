"""The load that one request puts on its workers."""

from __future__ import annotations

import msgspec


class RequestLoad(msgspec.Struct, frozen=True, array_like=True):
    """Work and memory that one request needs, on a prefill and a decode worker, or on one worker that does both."""

    prefill: str  # worker id
    decode: str
    num_new_tokens: int  # prompt tokens to compute
    num_context_tokens: int  # cached prompt tokens before them
    num_kv_tokens: int  # expected final length of the sequence
