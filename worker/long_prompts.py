"""Long prompts: unpacked, checked and hashed in a thread before the worker's loop takes their requests.

In the loop a million tokens would take a tenth of a second, in which no stream gets a token. The digests come from the
tokens, never from a message: KV that is found under another prompt's digest would give another prompt's answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from tandem.engine.sequence_factory import CheckedPrompt
from tandem.engine.token_array import token_array
from tandem.protocol.digest import packed_digests, root_digest
from tandem.protocol.errors import RequestError
from tandem.protocol.fault_boundary import outcome_of
from tandem.protocol.messages import Decode, Generate, Prefill


@dataclass(eq=False, slots=True)
class LongRequest:
    """A request as it came, and what the thread makes of its prompt, or why it cannot be taken."""

    request: Generate | Prefill | Decode
    outcome: Future[CheckedPrompt | Exception]
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
        outcome = self._thread.submit(outcome_of, self._check, request)
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

    def _check(self, request: Generate | Prefill | Decode) -> CheckedPrompt:
        root = root_digest(self._namespace, cache_salt=request.cache_salt)
        digests = packed_digests(root, request.packed_ids, self._block_size)
        return CheckedPrompt(unpacked(request.packed_ids, self._vocab_size), digests)


def unpacked(packed_ids: bytes, vocab_size: int) -> array[int]:
    """Token ids that `token_bytes` packed. Raises RequestError for one outside the vocabulary."""
    packed = np.frombuffer(packed_ids, dtype="<u4")
    if packed.max(initial=0) >= vocab_size:
        raise RequestError(f"token id {packed.max()}: this model's are 0 to {vocab_size - 1}")
    token_ids = token_array()
    token_ids.frombytes(packed.astype(np.int32).tobytes())
    return token_ids
