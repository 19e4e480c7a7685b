"""What a worker tells control. Apart from the worker, so that the router's process need not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.messages import Role, WorkerLoad

__all__ = ["WorkerStatus"]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What control wants to know: is it alive, may it flip, is it clean."""

    worker_id: str
    role: Role
    load: WorkerLoad
    num_open_handoffs: int  # sent and received
    num_open_leases: int
    num_used_blocks: int
    num_preemptions: int
    request_ids: frozenset[str]  # of requests this worker still has something to say about
