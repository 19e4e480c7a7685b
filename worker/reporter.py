"""What a worker says about itself: its card, its status, and the load in every heartbeat."""

from __future__ import annotations

import logging
import os
import time

import msgspec

from tandem.protocol.messages import (
    FetchStats,
    Heartbeat,
    KvActions,
    LinkLoad,
    PinLoad,
    Quarantine,
    Role,
    TierLoad,
    WorkerCard,
    WorkerLoad,
)
from tandem.worker.assembly import WorkerParts
from tandem.worker.kv.action_log import ActionLog
from tandem.worker.status import WorkerStatus

logger = logging.getLogger(__name__)

_REPORT_S = 0.5  # between two looks at tiers and links


class StatusReporter:
    """Looks at the parts of a worker and changes none.

    The loop calls `publish`; `heartbeat` may be called from another thread, and reads only values that the loop
    replaces whole.
    """

    def __init__(self, parts: WorkerParts) -> None:
        self.role = parts.config.role
        self.num_errors = 0  # errors that ended only a request or a message
        self.step_started = 0.0  # start of the oldest step that is computed; 0 between two steps
        self.turned = time.monotonic()  # when the loop last began a turn
        self._parts = parts
        self._load = parts.engine.load()
        self._live_handoffs: list[tuple[str, int]] = []
        self._links: list[LinkLoad] = []
        self._quarantines: list[Quarantine] = []
        self._tiers: tuple[list[TierLoad], FetchStats | None, PinLoad | None] = ([], None, None)
        self._actions: KvActions | None = None
        self._action_log = ActionLog(parts.engine)
        self._next_report = 0.0

    @property
    def card(self) -> WorkerCard:
        """What this worker tells a router about itself."""
        parts, engine, config = self._parts, self._parts.engine, self._parts.config
        return WorkerCard(
            address=parts.address,
            role=self.role,
            kind=parts.kind,
            model=config.engine.served_model_name or os.path.basename(config.engine.model),
            max_model_len=engine.config.max_model_len,
            block_size=engine.config.block_size,
            num_blocks=engine.pool.num_blocks,
            block_bytes=engine.block_bytes,
            max_num_batched_tokens=engine.config.max_num_batched_tokens,
            max_num_seqs=engine.config.max_num_seqs,
            namespace=engine.namespace,
            kernels=engine.model.kernels,
            pid=os.getpid(),
            tiers={cached.name: cached.store for cached in parts.cache.tiers},
            memory_tier=memory.name if (memory := parts.cache.memory_tier) is not None else "",
            max_pinned_blocks=parts.pins.max_blocks,
        )

    def set_role(self, role: Role) -> None:
        """Tell routers another role from now on."""
        logger.info("worker %s: %s -> %s", self._parts.config.worker_id, self.role, role)
        self.role = role

    def status(self) -> WorkerStatus:
        """Current load and unfinished work: handoffs, leases, reads."""
        parts = self._parts
        return WorkerStatus(
            load=self.load(),
            num_open_handoffs=parts.prefill.num_open + parts.decode.num_open,
            num_open_leases=parts.decode.num_leases,
            num_open_reads=parts.lender.num_open,
            num_used_blocks=parts.engine.pool.num_used,
            request_ids=parts.replies.request_ids,
        )

    def load(self) -> WorkerLoad:
        """Queues and memory now."""
        decode, load = self._parts.decode, self._parts.engine.load()
        num_quarantined_blocks = decode.num_quarantined_blocks + self._parts.reader.num_stuck_blocks
        if not (decode.num_leases or num_quarantined_blocks or self.num_errors or decode.num_recomputed):
            return load
        return msgspec.structs.replace(
            load,
            num_open_leases=decode.num_leases,
            num_quarantined_blocks=num_quarantined_blocks,
            num_errors=self.num_errors,
            num_recomputed=decode.num_recomputed,
        )

    def publish(self) -> None:
        """Choose what heartbeats say from now on."""
        parts = self._parts
        self._live_handoffs = parts.prefill.live_handoffs
        self._load = self.load()
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + _REPORT_S
            self._links = parts.prefill.writes.loads
            self._quarantines = parts.decode.quarantines(now)
            fetches = parts.cache.fetcher.stats(parts.lender.num_lent_blocks, parts.copies.num_blocks)
            self._tiers = (tiers := parts.cache.loads(), fetches, parts.pins.load())
            self._actions = self._action_log.look(tiers, now)

    def heartbeat(self) -> Heartbeat:
        """The heartbeat to send now."""
        (tiers, fetches, pins), now = self._tiers, time.monotonic()
        return Heartbeat(
            worker_id=self._parts.config.worker_id,
            epoch=self._parts.address.epoch,
            progress_age_s=now - min(self.turned, self.step_started or now),
            load=self._load,
            handoffs=self._live_handoffs,
            tiers=tiers,
            fetches=fetches,
            actions=self._actions,
            links=self._links,
            quarantines=self._quarantines,
            pins=pins,
            num_dropped=self._count_dropped(),
        )

    def _count_dropped(self) -> dict[str, int]:
        num_notifications = self._parts.transport.num_dropped
        return dict(self._parts.dropped.counts) | ({"notification": num_notifications} if num_notifications else {})
