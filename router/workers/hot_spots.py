"""Moves answers off decode workers that have too much to do, one at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from weakref import WeakSet

from tandem.router.workers.generation import Generation
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.workers.hot_spots import HotSpot, find_hot_spot
from tandem.scheduling.workers.registry import Registry

logger = logging.getLogger(__name__)

_LOOK_S = 0.5
_MIN_REMAINING_TOKENS = 64  # if fewer tokens may still come, a move is not worth its pause


class HotSpotRelief:
    """Looks for hot spots among the workers of one router."""

    def __init__(self, running: Collection[Generation], registry: Registry, costs: CostModel) -> None:
        self._running = running
        self._registry = registry
        self._costs = costs
        self._moved: WeakSet[Generation] = WeakSet()  # each moves at most once for this: none goes back and forth
        self._latest: Generation | None = None

    async def run(self) -> None:
        """Look repeatedly."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> HotSpot | None:
        """Begin to move one answer, if that is worth it and no other is moving. Returns from where to where."""
        if self._is_moving:
            return None
        spot = find_hot_spot(self._registry, self._costs)
        if spot is None:
            return None
        others = {worker.worker_id for worker in self._registry} - {spot.to}
        for generation in sorted(self._on(spot.worker), key=lambda one: -one.remaining_tokens):
            self._moved.add(generation)
            if generation.move(spot.cause, excluded=others):
                self._latest = generation
                logger.info("request %s goes on at %s: %s is a %s", generation.request_id, spot.to, *spot[::2])
                return spot
        return None

    @property
    def _is_moving(self) -> bool:
        return self._latest is not None and self._latest in self._running and self._latest.is_leaving

    def _on(self, worker_id: str) -> list[Generation]:
        """Answers that may leave this worker."""
        return [
            one
            for one in self._running
            if one not in self._moved
            and one.decode_worker is not None
            and one.decode_worker.worker_id == worker_id
            and one.remaining_tokens >= _MIN_REMAINING_TOKENS
        ]
