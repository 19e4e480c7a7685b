"""What one request adds to the work of its workers."""

from __future__ import annotations

import msgspec

__all__ = ["RequestLoad"]


class RequestLoad(msgspec.Struct, frozen=True, array_like=True):
    """The work and the memory one request needs, on a prefill and a decode worker or on one that is both."""

    prefill: str  # worker id
    decode: str
    num_new_tokens: int  # of the prompt, to compute
    num_context_tokens: int  # cached ones before them
    num_kv_tokens: int  # length the sequence is expected to reach
