"""Why KV left a worker's pool and tiers lately, for people: what the engine and the tiers count, with times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

import msgspec

from tandem.engine.engine import Engine
from tandem.protocol.messages import MAX_ACTIONS, POOL_PLACE, Eviction, KvActions, Preemption, TierLoad

Action = TypeVar("Action", Preemption, Eviction)
_FULL = "full"  # why a tier evicts


class ActionLog:
    """Looks at the counts from time to time: an action's age is as exact as the looks are frequent."""

    def __init__(self, engine: Engine) -> None:
        self._scheduler, self._pool = engine.scheduler, engine.pool
        self._num_preemptions = 0
        self._num_evicted: dict[tuple[str, str], int] = {}
        self._preemptions: deque[tuple[float, Preemption]] = deque(maxlen=MAX_ACTIONS)
        self._evictions: deque[tuple[float, Eviction]] = deque(maxlen=MAX_ACTIONS)

    def look(self, tiers: Iterable[TierLoad], now: float) -> KvActions:
        """The totals and the latest actions, with those since the last look."""
        scheduler = self._scheduler
        num_new = scheduler.num_preemptions - self._num_preemptions
        latest = list(scheduler.latest_preemptions)
        self._preemptions.extend((now, one) for one in latest[max(len(latest) - num_new, 0) :])
        self._num_preemptions = scheduler.num_preemptions
        totals: dict[str, dict[str, int]] = {}
        for place, reason, total in self._counts(tiers):
            num_blocks = total - self._num_evicted.get((place, reason), 0)
            self._num_evicted[place, reason] = total
            if num_blocks > 0:
                self._evictions.append((now, Eviction(place=place, reason=reason, num_blocks=num_blocks, age_s=0.0)))
            totals.setdefault(place, {})[reason] = total
        return KvActions(
            num_preemptions=dict(scheduler.preemptions_by_reason),
            num_evicted_blocks=totals,
            preemptions=_aged(self._preemptions, now),
            evictions=_aged(self._evictions, now),
        )

    def _counts(self, tiers: Iterable[TierLoad]) -> Iterator[tuple[str, str, int]]:
        """Blocks evicted since the start, by place and reason."""
        for reason, count in self._pool.num_evicted.items():
            yield POOL_PLACE, reason, count
        for tier in tiers:
            yield tier.name, _FULL, tier.num_evictions


def _aged(actions: Iterable[tuple[float, Action]], now: float) -> list[Action]:
    """With their ages, newest first."""
    aged = [msgspec.structs.replace(action, age_s=max(now - seen_s, 0.0)) for seen_s, action in actions]
    return aged[::-1]
