"""Records what workers report in steps and heartbeats, and lets the cost model learn from it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tandem.protocol.messages import Heartbeat, LinkLoad, StepOutput
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.workers.registry import Registry

# Time between two steps of one kind of worker that are learned from. 500 steps a second teach five coefficients as well
# as thousands do, and learning from a step costs more than everything else done with it.
LEARN_INTERVAL_S = 2e-3


class LoadRecorder:
    """Passes workers' reports to a registry and a cost model."""

    def __init__(self, registry: Registry, costs: CostModel) -> None:
        self._registry = registry
        self._costs = costs
        self._learned_s: dict[str, float] = {}  # by kind of worker, when a step was last learned from

    def record_step(self, worker_id: str, kind: str, output: StepOutput, now: float) -> None:
        """Record a step that a worker has done."""
        if now - self._learned_s.get(kind, -math.inf) >= LEARN_INTERVAL_S:
            self._learned_s[kind] = now
            self._costs.learn(worker_id, kind, output.stats)
        self._registry.note_step(worker_id, output.stats)
        self._registry.note_load(worker_id, output.load, now)

    def record_heartbeat(self, heartbeat: Heartbeat, dropped_here: Mapping[str, int], now: float) -> None:
        """Record a heartbeat. `dropped_here`: the worker's messages that the router did not handle, by reason."""
        worker_id = heartbeat.worker_id
        self._registry.note_load(worker_id, heartbeat.load, now, progress_age_s=heartbeat.progress_age_s)
        self._registry.note_tiers(worker_id, heartbeat.tiers, heartbeat.fetches)
        self._registry.note_actions(worker_id, heartbeat.actions)
        self._registry.note_pins(worker_id, heartbeat.pins)
        self._registry.note_quarantines(worker_id, heartbeat.quarantines)
        self._registry.note_dropped(worker_id, heartbeat.num_dropped, dropped_here)
        self._record_links(worker_id, heartbeat.links)

    def _record_links(self, worker_id: str, links: list[LinkLoad]) -> None:
        """Learn what the handoffs since the last heartbeat cost: the mean of each link counts as one measurement."""
        worker = self._registry.get(worker_id)
        if worker is None:
            return
        known = {link.peer_id: link for link in worker.links}
        for link in links:
            before = known.get(link.peer_id, LinkLoad(peer_id=link.peer_id))
            num_handoffs = link.num_handoffs - before.num_handoffs  # negative after the peer was replaced
            peer = self._registry.get(link.peer_id)
            if num_handoffs > 0 and peer is not None:
                num_bytes = (link.exposed_bytes - before.exposed_bytes) / num_handoffs
                exposed_s = (link.exposed_s - before.exposed_s) / num_handoffs
                self._costs.transfer(worker.card.kind, peer.card.kind).observe(num_bytes, exposed_s)
        self._registry.note_links(worker_id, links)
