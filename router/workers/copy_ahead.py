"""Brings the KV of an answer to the worker that will take it over, while the present one decodes on.

The pause that a client sees is then that of the last few tokens, however long the answer's context is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tandem.protocol.messages import Generate, SequenceDelta
from tandem.protocol.sampling import SamplingParams
from tandem.router.admission_queue import AdmittedRequest
from tandem.router.backend import GenerateRequest
from tandem.router.streams import DeltaQueue
from tandem.router.workers.attempt import kv_holder
from tandem.router.workers.client import WorkerClient
from tandem.scheduling.workers.bookings import Booking

__all__ = ["copy_ahead", "is_worthwhile"]

_MIN_COPY_S = 0.02  # about one step of decoding: what takes less is no pause that a client would notice
_MAX_STAGES = 3
_FEW_TOKENS = 32  # behind the copy; they are computed in one step
_STAGE_TIMEOUT_S = 30.0
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
    make_queue: Callable[[], DeltaQueue[SequenceDelta]],
    *,
    name: str,
) -> None:
    """Let the next worker hold all KV but that of the latest tokens. `output` grows meanwhile.

    Each stage is a request for one token that nobody reads: it reads or computes what is missing, and leaves it in the
    prefix cache. `name` begins its ids there. Raises a `ServingError` or `TimeoutError`.
    """
    worker_id = admitted.placement.best.decode.worker_id
    for stage in range(_MAX_STAGES):
        num_tokens = len(output)
        part = Generate(
            request_id=f"{name}.{stage}",
            token_ids=[*request.token_ids, *output],
            output_ids=[],
            sampling=_ONE_TOKEN,
            cache_salt=request.cache_scope,
            priority=admitted.prefill_priority,
            kv_holder=kv_holder(admitted.placement),
        )
        queue = make_queue()
        leg = workers.open_leg(worker_id, part, queue)
        try:
            async with asyncio.timeout(_STAGE_TIMEOUT_S):
                while not any(delta.finish_reason for delta in await queue.take()):
                    pass
        finally:
            leg.cancel()
        if len(output) - num_tokens <= _FEW_TOKENS:
            return
