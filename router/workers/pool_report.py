"""State of the workers as JSON, for people."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from tandem.scheduling.cost_model import StepModel
from tandem.scheduling.workers.workers import RegisteredWorker, queue_s


def worker_report(
    worker: RegisteredWorker, steps: StepModel, *, num_cached_blocks: int, now: float
) -> dict[str, object]:
    """One worker: its card, its load as it last reported it, and what the router has booked on it."""
    card, load = worker.card, worker.load
    return {
        "worker_id": worker.worker_id,
        "epoch": card.address.epoch,
        "state": worker.state.value,
        "kind": card.kind,
        "model": card.model,
        "block_size": card.block_size,
        "block_bytes": card.block_bytes,
        "max_num_batched_tokens": card.max_num_batched_tokens,
        "host": urlsplit(card.address.endpoint).hostname,
        "pid": card.pid,
        "num_blocks": card.num_blocks,
        "num_cached_blocks": num_cached_blocks,
        "num_waiting": load.num_waiting,
        "num_running": load.num_running,
        "num_waiting_tokens": load.num_waiting_tokens,
        "num_kv_tokens": load.num_kv_tokens,
        "num_free_blocks": load.num_free_blocks,
        "pool_slots": msgspec.structs.asdict(load.pool_slots),
        "max_num_seqs": card.max_num_seqs,
        "num_free_seats": load.num_free_seats,
        "num_open_leases": load.num_open_leases,
        "num_quarantined_blocks": load.num_quarantined_blocks,
        "num_waiting_for_room": load.num_waiting_for_room,
        "num_preemptions": load.num_preemptions,
        "num_drafted_tokens": load.num_drafted_tokens,
        "num_accepted_tokens": load.num_accepted_tokens,
        "num_errors": load.num_errors,
        "num_recomputed": load.num_recomputed,
        "progress_age_s": worker.progress_age_s,
        "silent_s": max(now - worker.last_seen_s, 0.0),
        "queued_prompt_tokens": worker.uncomputed_tokens,
        "num_booked_seqs": worker.num_booked_seqs,
        "booked_kv_tokens": worker.booked_kv_tokens,
        "queue_s": queue_s(worker, steps),
        "tiers": [msgspec.to_builtins(tier) for tier in worker.tiers],
        "fetches": msgspec.to_builtins(worker.fetches),
        "actions": msgspec.to_builtins(worker.actions),
        "links": [msgspec.to_builtins(link) for link in worker.links],
        "quarantines": [msgspec.to_builtins(quarantine) for quarantine in worker.quarantines],
        "pins": msgspec.to_builtins(worker.pins),
    }
