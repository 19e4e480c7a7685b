"""Copies the KV of an answer to another worker while its present worker continues to decode it.

A copy before a move keeps the pause that the client sees short, however long the context is. Standby copies, made from
time to time, leave little to compute again if the present worker dies.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from tandem.protocol.messages import CopyKv, PeerAddress, SequenceDelta
from tandem.router.admission_queue import AdmittedRequest
from tandem.router.streams import DeltaQueue
from tandem.router.workers.client import WorkerClient
from tandem.runtime.background import task_error
from tandem.scheduling.workers.bookings import Booking

logger = logging.getLogger(__name__)

MakeQueue = Callable[[], DeltaQueue[SequenceDelta]]

_MIN_COPY_S = 0.02  # about one step of decoding: a client would not notice a shorter pause
_MAX_STAGES = 3
_FEW_TOKENS = 32  # tokens that the copy may lack; they are computed in one step
_COPY_TIMEOUT_S = 30.0


def is_worthwhile(admitted: AdmittedRequest[Booking]) -> bool:
    """Whether the next worker would take long to read or to compute what it lacks."""
    terms = admitted.placement.best.terms
    return terms.fetch_s + terms.prefill_s >= _MIN_COPY_S


async def copy_ahead(
    workers: WorkerClient,
    digests: Callable[[], list[bytes]],
    output: Sequence[int],
    *,
    source: PeerAddress,
    worker_id: str,
    make_queue: MakeQueue,
    name: str,
) -> None:
    """Copy the KV to the next worker, except that of the latest tokens of `output`, which grows meanwhile.

    `digests` returns the digests of all full blocks so far. Each stage copies what has come since the one before, as a
    request whose id begins with `name`. Raises a `ServingError` or `TimeoutError`.
    """
    for stage in range(_MAX_STAGES):
        num_tokens = len(output)
        await copy_kv(
            workers, digests(), source=source, worker_id=worker_id, make_queue=make_queue, name=f"{name}.{stage}"
        )
        if len(output) - num_tokens <= _FEW_TOKENS:
            return


async def copy_kv(
    workers: WorkerClient,
    digests: list[bytes],
    *,
    source: PeerAddress,
    worker_id: str,
    make_queue: MakeQueue,
    name: str,
) -> None:
    """Copy these blocks, the beginning of a chain, to a worker, as far as it has room and `source` has them.

    Raises a `ServingError` or `TimeoutError`.
    """
    queue = make_queue()
    sub_request = workers.open_sub_request(worker_id, CopyKv(request_id=name, digests=digests, source=source), queue)
    try:
        async with asyncio.timeout(_COPY_TIMEOUT_S):
            while not any(delta.finish_reason for delta in await queue.take()):
                pass
    finally:
        sub_request.cancel()


class StandbyCopies:
    """Copies one request's KV in case its worker dies: one copy at a time, after each `every` new tokens. 0 = none."""

    def __init__(self, every: int, request_id: str) -> None:
        self._every = every
        self._request_id = request_id
        self._num_copied = 0  # tokens of prompt and answer when the latest copy began
        self._copying: asyncio.Future[None] | None = None

    def is_due(self, num_tokens: int) -> bool:
        """Whether a copy should begin. `num_tokens`: of prompt and answer together."""
        return self._every > 0 and self._copying is None and num_tokens - self._num_copied >= self._every

    def begin(self, num_tokens: int, copy: Callable[[], Awaitable[None]]) -> None:
        """Begin a copy. If it fails, the answer continues without it."""
        self._num_copied = num_tokens
        self._copying = asyncio.ensure_future(copy())
        self._copying.add_done_callback(self._ended)

    def _ended(self, copying: asyncio.Future[None]) -> None:
        if self._copying is copying:  # not stopped meanwhile
            self._copying = None
        if (error := task_error(copying)) is not None:
            logger.debug("the KV of request %s was not copied: %r", self._request_id, error)

    def stop(self) -> None:
        """Cancel the copy in progress."""
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.cancel()
