"""What a worker tells its supervisor. It is a separate module so that the supervisor need not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.messages import WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """Current load and unfinished work of one worker, for the supervisor and for tests."""

    load: WorkerLoad
    num_open_handoffs: int  # sent and received
    num_open_leases: int
    num_open_reads: int  # reads of its blocks by peers
    num_used_blocks: int
    request_ids: frozenset[str]  # of requests this worker still has something to say about
