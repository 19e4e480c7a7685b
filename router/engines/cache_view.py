"""What one engine has cached, kept up to date in the prefix index: by its KV events, or by simulating its cache."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zmq.asyncio import Context

from tandem.protocol.digest import join_digests
from tandem.protocol.messages import POOL_PLACE, BlockEvents, WorkerCard
from tandem.router.engines.config import EngineSpec
from tandem.router.engines.digests import digest_root
from tandem.router.engines.engine_tiers import EngineTiers, ExpectedLoad, TierListener
from tandem.router.engines.kv_events import BlockTranslator, KvEventFeed, PlaceChange
from tandem.router.engines.simulated_cache import SimulatedCache
from tandem.runtime.background import BackgroundTasks
from tandem.scheduling.placement.prefix_index import PrefixIndex


class CacheView:
    """The router's view of one engine's prefix cache. Empty between `stop` and the next `start`."""

    def __init__(
        self,
        engine: str,
        index: PrefixIndex,
        context: Context,
        on_malformed: Callable[[str], None],
        on_tiers: TierListener,
    ) -> None:
        """`on_malformed` is called with the reason why events cannot be used, `on_tiers` with the engine's tiers."""
        self._name = engine
        self._index = index
        self._context = context
        self._on_malformed = on_malformed
        self._on_tiers = on_tiers
        self._epoch = 0
        self._sequences: Counter[str] = Counter()  # by place: changes passed to the index in this epoch
        self._simulated: SimulatedCache | None = None
        self._translator: BlockTranslator | None = None
        self._tiers: EngineTiers | None = None
        self._feed: KvEventFeed | None = None
        self._feed_task: asyncio.Task[None] | None = None
        self._background = BackgroundTasks()

    @property
    def num_event_gaps(self) -> int:
        """Gaps in the engine's events that no replay filled."""
        return self._feed.num_gaps if self._feed else 0

    def start(self, spec: EngineSpec, card: WorkerCard, num_simulated_blocks: int) -> None:
        """Begin with an empty cache. `num_simulated_blocks` is its capacity where it is simulated."""
        self._epoch, self._sequences = card.address.epoch, Counter()
        self._index.add_worker(self._name, self._epoch)
        if not spec.kv_events:
            self._simulated = SimulatedCache(num_simulated_blocks, spec.cache_ttl_s)
            return
        self._tiers = EngineTiers(card, self._index, self._on_tiers, host_bytes=round(spec.host_cache_gb * 1e9))
        self._translator = BlockTranslator(digest_root(card.model, card.block_size), card.block_size)
        self._feed = KvEventFeed(self._context, spec.kv_events, spec.kv_replay, self._apply)
        self._feed_task = self._background.keep(f"KV events of engine {self._name}", self._feed.run)

    def stop(self) -> None:
        """Forget everything: the engine is gone, or its cache is."""
        self._index.remove_worker(self._name, *(self._tiers.holders if self._tiers is not None else ()))
        if self._feed_task is not None:
            self._feed_task.cancel()
        self._feed_task = self._simulated = self._translator = self._tiers = None

    async def close(self) -> None:
        """Close its sockets."""
        await self._background.close()

    def expect(self, digests: Sequence[bytes], now: float, *, is_exact: bool = True) -> None:
        """A prompt is being sent to the engine: count it as cached for a while, or until events say more.

        No event will ever mention tokens that are only an estimate.
        """
        if self._simulated is None:
            if is_exact:
                self._index.speculate([self._name], digests, now)
        else:
            self._publish(PlaceChange(*self._simulated.touch(digests, now)))

    def expected_load(self, digests: Sequence[bytes]) -> ExpectedLoad | None:
        """What the engine should load from a tier of its own for this prompt."""
        return self._tiers.expected(digests) if self._tiers is not None else None

    def learn_load(self, load: ExpectedLoad, seconds: float) -> None:
        """A load seems to have taken this long."""
        if self._tiers is not None:
            self._tiers.learn(load, seconds)

    def refresh(self, loaded_tokens: Mapping[str, int], now: float) -> None:
        """Drop blocks that have not been used for long, and report what the tiers hold. Called regularly.

        `loaded_tokens`: prompt tokens that came from each tier, as the engine says.
        """
        if self._simulated is not None and (removed := self._simulated.expire(now)):
            self._publish(PlaceChange([], removed))
        if self._tiers is not None:
            self._tiers.report(loaded_tokens)

    def _apply(self, events: list[dict[str, Any]], is_lost: bool) -> None:
        translator, tiers = self._translator, self._tiers
        if translator is None or tiers is None:
            return
        change = translator.apply([{"type": "AllBlocksCleared"}, *events] if is_lost else events)
        if change.flaw:
            self._on_malformed(f"its KV events are malformed: {change.flaw}")
        new = [place for place in change.places if place != POOL_PLACE and place not in tiers]
        for tier in new:
            tiers.add(tier)
        for place, changed in change.places.items():
            self._publish(changed, place)
        if new:
            tiers.report()

    def _publish(self, change: PlaceChange, place: str = POOL_PLACE) -> None:
        if change.stored or change.removed:
            self._sequences[place] += 1
            self._index.apply(
                BlockEvents(
                    worker_id=self._name,
                    epoch=self._epoch,
                    sequence=self._sequences[place],
                    place=place,
                    stored=join_digests(change.stored),
                    removed=join_digests(change.removed),
                )
            )
