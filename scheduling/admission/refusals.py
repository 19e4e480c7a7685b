"""Which requests are refused, why, and after how long a retry will succeed."""

from __future__ import annotations

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import DeadlineUnmet, Overloaded, ServingError
from tandem.scheduling.admission.fair_queue import FairQueue
from tandem.scheduling.admission.forecast import Forecast
from tandem.scheduling.admission.queued_request import QueuedRequest
from tandem.scheduling.admission.worker_room import WorkerRoom
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.workers.worker_table import Workers
from tandem.scheduling.workers.workers import queue_s

MAX_QUEUED_REQUESTS = 16_384  # each holds a connection and its prompt, even if few of its tokens are new


class Refusals:
    """Checks a forecast against the limits of the queue, the tenant's share of it, and the request's TTFT SLO."""

    def __init__(
        self,
        workers: Workers,
        costs: CostModel,
        config: RouterConfig,
        queue: FairQueue[QueuedRequest],
        room: WorkerRoom,
    ) -> None:
        self._workers = workers
        self._costs = costs
        self._config = config
        self._queue = queue
        self._room = room

    def refusal(self, tenant: str, forecast: Forecast, max_share: float) -> ServingError | None:
        """Why the request is refused; None if it is admitted."""
        waiting = self._queue.total
        num_new, limit = forecast.work.new_tokens, self._config.max_queued_prompt_tokens
        queued = self._workers.queued_prompt_tokens + waiting.new_tokens
        # NOTE: with nothing queued a prompt larger than the limit is admitted: waiting would not help it.
        if queued and queued + num_new > limit:
            retry_s = self._drain_s(min(queued + num_new - limit, queued), forecast)
            return Overloaded(
                f"{queued} prompt tokens are queued and this request adds {num_new}; "
                f"max_queued_prompt_tokens={limit}. Retry in {retry_s:.1f} s",
                retry_after_s=retry_s,
                code="queue_full",
            )
        own = self._queue.work_of(tenant).new_tokens
        if own and own + num_new > max_share * limit:
            retry_s = self._drain_s(min(own + num_new - max_share * limit, own), forecast)
            return Overloaded(
                f"{own} prompt tokens of tenant '{tenant}' are queued and this request adds {num_new}; "
                f"max_queue_share={max_share:g} of max_queued_prompt_tokens={limit}. Retry in {retry_s:.1f} s",
                retry_after_s=retry_s,
                code="tenant_queue_full",
            )
        if waiting.num_requests >= MAX_QUEUED_REQUESTS:
            retry_s = self._drain_s(1, forecast)
            message = f"{waiting.num_requests} requests wait. Retry in {retry_s:.1f} s"
            return Overloaded(message, retry_after_s=retry_s, code="queue_full")
        return None if forecast.is_hopeful else self._deadline_refusal(forecast)

    def _deadline_refusal(self, forecast: Forecast) -> DeadlineUnmet:
        ttft_s, slo_s = forecast.ttft_s, forecast.slo_s
        # The work ahead shrinks by a second each second, or more slowly if the model has been wrong lately. The next
        # report of a step tells. With nothing ahead the request is admitted.
        worker = forecast.placement.best.prefill
        error = self._costs.steps(worker.card.kind).relative_error
        retry_s = min(ttft_s - slo_s, forecast.start_s) * (1 + error) + self._room.full_step_s(worker)
        return DeadlineUnmet(
            f"The first token is predicted in {ttft_s * 1e3:.0f} ms; the TTFT SLO is {slo_s * 1e3:.0f} ms. "
            f"Retry in {retry_s:.1f} s",
            retry_after_s=retry_s,
        )

    def _drain_s(self, num_tokens: float, forecast: Forecast) -> float:
        """Seconds until the workers that are busy now have computed this number of queued prompt tokens."""
        rate = 0.0
        for worker in self._workers:
            if (waits_s := queue_s(worker, self._costs.steps(worker.card.kind))) > 0:
                rate += worker.uncomputed_tokens / waits_s
        if not rate:  # everything waits for memory
            return forecast.start_s
        return num_tokens / rate + self._room.full_step_s(forecast.placement.best.prefill)


def too_late(queued: QueuedRequest, now: float) -> DeadlineUnmet:
    """The error for a waiting request whose first token can no longer come in time."""
    terms = queued.placement.best.terms
    ttft_s = now - queued.arrived_s + terms.ttft_s
    slo_s = queued.deadline_s - queued.arrived_s
    # The queue turned out to be longer than predicted by this much.
    retry_s = max(ttft_s - slo_s, queued.forecast.start_s)
    return DeadlineUnmet(
        f"After {(now - queued.arrived_s) * 1e3:.0f} ms in the queue the first token is predicted at "
        f"{ttft_s * 1e3:.0f} ms; the TTFT SLO is {slo_s * 1e3:.0f} ms. Retry in {retry_s:.1f} s",
        retry_after_s=retry_s,
    )
