"""Long prompts: unpacked, checked and hashed in a thread before the worker's loop takes their requests.

In the loop a million tokens would take a tenth of a second, in which no stream gets a token. The digests come from the
tokens, never from a message: KV that is found under another prompt's digest would give another prompt's answer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from tandem.protocol.digest import packed_digests, root_digest
from tandem.protocol.errors import RequestError
from tandem.protocol.fault_boundary import outcome_of
from tandem.protocol.messages import Decode, Generate, Prefill

_PIECE_TOKENS = 1 << 14  # made into ints at a time, in half a ms: between two pieces the loop can have the GIL


class UnpackedRequest(NamedTuple):
    """A request with its tokens, all of which the model knows, and the digests of the prompt's full blocks."""

    request: Generate | Prefill | Decode
    digests: list[bytes]


@dataclass(eq=False, slots=True)
class LongRequest:
    """A request as it came, and what the thread makes of it: an `UnpackedRequest`, or why there is none."""

    request: Generate | Prefill | Decode
    outcome: Future[UnpackedRequest | Exception]
    cancelled: set[str] = field(default_factory=set)  # the names of answers that are no longer wanted


class LongPrompts:
    """The requests whose prompts are in the thread. Belongs to the worker's loop."""

    def __init__(self, namespace: bytes, block_size: int, vocab_size: int, wake: Callable[[], None]) -> None:
        """`wake` is called in the thread whenever a request is ready."""
        self._namespace = namespace
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._wake = wake
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-prompts")
        self._requests: list[LongRequest] = []  # in order of arrival, in which the thread takes them

    def has(self, name: str) -> bool:
        """Whether a request with an answer of this name is here."""
        return any(name in one.request.request_ids for one in self._requests)

    def begin(self, request: Generate | Prefill | Decode) -> None:
        """Take a request with a packed prompt."""
        outcome = self._thread.submit(outcome_of, self._unpack, request)
        self._requests.append(LongRequest(request, outcome))
        outcome.add_done_callback(lambda _: self._wake())

    def cancel(self, name: str) -> None:
        """Note that this answer is no longer wanted; unknown names are ignored."""
        for one in self._requests:
            if name in one.request.request_ids:
                one.cancelled.add(name)

    def take_ready(self) -> list[LongRequest]:
        """The requests that have become ready, in order of arrival. Cancelled answers are among them."""
        ready = []
        while self._requests and self._requests[0].outcome.done():
            ready.append(self._requests.pop(0))
        return ready

    def close(self) -> None:
        """End the thread. What it has not begun is dropped."""
        self._thread.shutdown(cancel_futures=True)

    def check_integrity(self, *, idle: bool = False) -> None:
        """With `idle`, raise AssertionError if a prompt is in the thread."""
        assert not (idle and self._requests), f"{len(self._requests)} long prompts are being hashed"

    def _unpack(self, request: Generate | Prefill | Decode) -> UnpackedRequest:
        root = root_digest(self._namespace, cache_salt=request.cache_salt)
        digests = packed_digests(root, request.packed_ids, self._block_size)
        token_ids = unpacked(request.packed_ids, self._vocab_size)
        return UnpackedRequest(msgspec.structs.replace(request, token_ids=token_ids, packed_ids=b""), digests)


def unpacked(packed_ids: bytes, vocab_size: int) -> list[int]:
    """Token ids that `token_bytes` packed. Raises RequestError for one outside the vocabulary."""
    packed = np.frombuffer(packed_ids, dtype="<u4")
    if packed.max(initial=0) >= vocab_size:
        raise RequestError(f"token id {packed.max()}: this model's are 0 to {vocab_size - 1}")
    token_ids: list[int] = []
    for first in range(0, len(packed), _PIECE_TOKENS):
        token_ids += packed[first : first + _PIECE_TOKENS].tolist()
    return token_ids
