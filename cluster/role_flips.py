"""Gives workers other roles while they serve: on the autoscaler's word, or on the supervisor's."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from ray.exceptions import RayError

from tandem.cluster.member import Member
from tandem.protocol.errors import ServingError
from tandem.runtime.background import BackgroundTasks
from tandem.scheduling.autoscaler import AutoscalerState, Flip, decide, observe
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.workers.registry import Registry

__all__ = ["RoleFlips"]

logger = logging.getLogger(__name__)

_NUM_REMEMBERED_FLIPS = 20


class RoleFlips:
    """All flips of one cluster. `status` is what `/v1/pools` shows of the autoscaler."""

    def __init__(
        self, members: Mapping[str, Member], registry: Registry, costs: CostModel, background: BackgroundTasks
    ) -> None:
        self.status: dict[str, object] = {}
        self._members = members
        self._registry = registry
        self._costs = costs
        self._background = background
        self._flips: deque[dict[str, object]] = deque(maxlen=_NUM_REMEMBERED_FLIPS)

    @property
    def latest(self) -> list[dict[str, object]]:
        """The latest flips, oldest first, as `/v1/pools` shows them."""
        return list(self._flips)

    def begin(self, flip: Flip, reason: str) -> None:
        """Start a flip and return."""
        self._background.start(f"the flip of {flip.worker_id}", lambda: self.flip(flip, reason))

    async def flip(self, flip: Flip, reason: str) -> None:
        """Give a worker another role; its cache stays. Returns when it has finished the requests of its old role.

        It gets nothing more of its old role, serves in the new one within milliseconds, and finishes its old requests
        beside that: any worker can do both, and placement counts what it delays there.
        """
        worker = self._registry.get(flip.worker_id)
        if worker is None:
            return
        member, started = self._members[flip.worker_id], time.monotonic()
        record: dict[str, object] = {"worker": flip.worker_id, "from": worker.role, "to": flip.to_role}
        record["reason"] = reason
        self._flips.append(record)
        try:
            left = await member.play(flip.to_role, reason)
        except (RayError, ServingError, TimeoutError, KeyError) as exc:
            logger.warning("%s did not flip to %s: %s", flip.worker_id, flip.to_role, exc)
            record["failed"] = str(exc) or type(exc).__name__
            return
        record["serving_after_s"] = round(time.monotonic() - started, 4)
        try:
            await member.finish(left)
        except (RayError, ServingError, TimeoutError) as exc:
            logger.warning("%s serves as %s, but is not drained: %s", flip.worker_id, flip.to_role, exc)
            record["not_drained"] = str(exc) or type(exc).__name__
        else:
            record["drained_after_s"] = round(time.monotonic() - started, 4)

    async def autoscale(self, interval_s: float, mean_output_tokens: Callable[[], float]) -> None:
        """Let the autoscaler decide every `interval_s`, for ever."""
        state = AutoscalerState()
        while True:
            await asyncio.sleep(interval_s)
            observation = observe(self._registry, self._costs, mean_output_tokens())
            decision, state = decide(observation, time.monotonic(), state)
            self.status = {
                "reason": decision.reason,
                "prefill_wait_s": decision.prefill_wait_s,
                "decode_wait_s": decision.decode_wait_s,
                "flips": self.latest,
            }
            if decision.flip is not None:
                logger.info("%s", decision.reason)
                self.begin(decision.flip, decision.reason)
