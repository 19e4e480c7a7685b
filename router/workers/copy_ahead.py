"""Copies the KV of an answer to another worker, while the present one decodes on.

Before a move: the pause that a client sees is then that of the last few tokens, however long the answer's context is.
Now and then, in case the present worker dies: then little is computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tandem.protocol.messages import Generate, PrefillPriority, SequenceDelta
from tandem.protocol.sampling import SamplingParams
from tandem.router.admission_queue import AdmittedRequest
from tandem.router.backend import GenerateRequest
from tandem.router.streams import DeltaQueue
from tandem.router.workers.attempt import kv_holder
from tandem.router.workers.client import WorkerClient
from tandem.scheduling.placement.placement import Placement
from tandem.scheduling.workers.bookings import Booking

__all__ = ["copy_ahead", "copy_kv", "is_worthwhile"]

MakeQueue = Callable[[], DeltaQueue[SequenceDelta]]

_MIN_COPY_S = 0.02  # about one step of decoding: what takes less is no pause that a client would notice
_MAX_STAGES = 3
_FEW_TOKENS = 32  # behind the copy; they are computed in one step
_COPY_TIMEOUT_S = 30.0
LAST = PrefillPriority(order=1e300)  # behind all prompts that a client waits for
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def is_worthwhile(admitted: AdmittedRequest[GenerateRequest, Booking]) -> bool:
    """Whether the next worker would take long to read or to compute what it lacks."""
    terms = admitted.placement.best.terms
    return terms.fetch_s + terms.prefill_s >= _MIN_COPY_S


async def copy_ahead(
    workers: WorkerClient,
    request: GenerateRequest,
    output: Sequence[int],
    admitted: AdmittedRequest[GenerateRequest, Booking],
    make_queue: MakeQueue,
    *,
    name: str,
) -> None:
    """Let the next worker hold all KV but that of the latest tokens. `output` grows meanwhile.

    `name` begins the names of the copies there. Raises a `ServingError` or `TimeoutError`.
    """
    for stage in range(_MAX_STAGES):
        num_tokens = len(output)
        await copy_kv(
            workers,
            request,
            output,
            admitted.placement,
            make_queue,
            name=f"{name}.{stage}",
            priority=admitted.prefill_priority,
        )
        if len(output) - num_tokens <= _FEW_TOKENS:
            return


async def copy_kv(
    workers: WorkerClient,
    request: GenerateRequest,
    output: Sequence[int],
    placement: Placement,
    make_queue: MakeQueue,
    *,
    name: str,
    priority: PrefillPriority = LAST,
) -> None:
    """Let the worker of a placement hold the KV of a request and its answer so far.

    It is asked for one token that nobody reads: it reads or computes what is missing, and leaves it in its prefix
    cache. Raises a `ServingError` or `TimeoutError`.
    """
    part = Generate(
        request_id=name,
        token_ids=[*request.token_ids, *output],
        output_ids=[],
        sampling=_ONE_TOKEN,
        cache_salt=request.cache_scope,
        priority=priority,
        kv_holder=kv_holder(placement),
    )
    queue = make_queue()
    leg = workers.open_leg(placement.best.decode.worker_id, part, queue)
    try:
        async with asyncio.timeout(_COPY_TIMEOUT_S):
            while not any(delta.finish_reason for delta in await queue.take()):
                pass
    finally:
        leg.cancel()
