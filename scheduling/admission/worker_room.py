"""Whether workers have room for more prompts, or enough to do until they report again."""

from __future__ import annotations

import math

from tandem.protocol.config import RouterConfig
from tandem.protocol.messages import Role, WorkerState
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.placement import Placement
from tandem.scheduling.workers.worker_table import Workers
from tandem.scheduling.workers.workers import RegisteredWorker, can_prefill, queue_s

# Full prompt steps up to which a worker is still given requests: short prompts fill a step together, and
# the worker does not run dry. Other tenants' requests overtake what is queued there.
ROOM_STEPS = 2.0
# More urgent requests of the same tenant do not overtake those there, and late decisions keep deadlines best. So while
# urgencies differ, a worker gets only what it computes while its report and the router's answer are on their way.
ROOM_STEPS_URGENT = 0.5


class WorkerRoom:
    """Answers for all workers. `are_urgencies_mixed` is set by the owner before it asks."""

    def __init__(self, workers: Workers, costs: CostModel, config: RouterConfig) -> None:
        self.are_urgencies_mixed = False
        self._workers = workers
        self._costs = costs
        self._config = config

    def full_step_s(self, worker: RegisteredWorker) -> float:
        """Duration of a step of this worker that is full of prompt."""
        chunk = worker.card.max_num_batched_tokens
        model = self._costs.steps(worker.card.kind)
        return model.prefill_s(
            chunk, 0, chunk, num_decode_seqs=worker.num_booked_seqs, num_kv_tokens=worker.booked_kv_tokens
        )

    def has_room(self, worker: RegisteredWorker, order: float) -> bool:
        """Whether the worker will soon have computed the prompts that precede one of this order."""
        if worker.state is WorkerState.DEAD:
            return False
        waits_s = queue_s(worker, self._costs.steps(worker.card.kind), order)
        return not waits_s or waits_s < self._limit_s(worker)

    def fits(self, placement: Placement, tenant: str, order: float) -> bool:
        """Whether the workers of this placement have room for it, or take it from other tenants."""
        prefill, decode, terms = placement.best.prefill, placement.best.decode, placement.best.terms
        if not self.has_room(prefill, order):
            return False
        return (
            not terms.memory_s
            or terms.memory_s < self._limit_s(prefill)
            or decode.gives_way_to(tenant, placement.num_kv_tokens)
        )

    def is_anywhere(self, order: float = math.inf) -> bool:
        """Whether any worker that prompts may be sent to has room for a prompt of this order."""
        workers = [worker for worker in self._workers if worker.state is WorkerState.READY]
        if not self._config.local_prefill and any(can_prefill(worker) for worker in workers):
            workers = [worker for worker in workers if worker.role is not Role.DECODE]
        return any(self.has_room(worker, order) for worker in workers)

    def _limit_s(self, worker: RegisteredWorker) -> float:
        """Predicted queue, in seconds, up to which a worker is given more."""
        num_steps = ROOM_STEPS_URGENT if self.are_urgencies_mixed else ROOM_STEPS
        return self._config.max_worker_queue_s or num_steps * self.full_step_s(worker)
