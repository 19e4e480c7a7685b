"""Builders with defaults, shared by the router's tests."""

from __future__ import annotations

from tandem.protocol.messages import PeerAddress, Role, WorkerCard, WorkerState
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import RegisteredWorker

NAMESPACE = b"n" * 16


def make_card(
    worker_id: str = "w0",
    role: Role = Role.DECODE,
    *,
    epoch: int = 1,
    endpoint: str = "tcp://127.0.0.1:1",
    heartbeat_endpoint: str = "tcp://127.0.0.1:2",
    kind: str = "cpu-1",
    num_blocks: int = 4096,
    max_model_len: int = 32768,
    max_num_batched_tokens: int = 512,
    max_num_seqs: int = 0,
    namespace: bytes = NAMESPACE,
    adapters: list[str] | None = None,
    max_pinned_blocks: dict[str, int] | None = None,
    tiers: dict[str, str] | None = None,
    loads_all: bool = False,
) -> WorkerCard:
    return WorkerCard(
        address=PeerAddress(worker_id=worker_id, epoch=epoch, endpoint=endpoint, heartbeat_endpoint=heartbeat_endpoint),
        role=role,
        kind=kind,
        model="toy",
        max_model_len=max_model_len,
        block_size=16,
        num_blocks=num_blocks,
        block_bytes=16 * 23_040,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        namespace=namespace,
        pid=1,
        adapters=adapters or [],
        max_pinned_blocks=max_pinned_blocks or {},
        tiers=tiers or {},
        loads_all=loads_all,
    )


def add_ready(registry: Registry, card: WorkerCard) -> RegisteredWorker:
    worker = registry.add(card, now=0.0)
    registry.set_state(worker.worker_id, WorkerState.READY, "test")
    return worker


def make_registry(*worker_ids: str) -> Registry:
    """A registry of ready workers."""
    registry = Registry()
    for worker_id in worker_ids:
        add_ready(registry, make_card(worker_id))
    return registry
