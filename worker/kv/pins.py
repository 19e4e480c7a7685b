"""The blocks that a worker keeps for pins: which ones, where, how many at most, and for how long.

A pin names a chain of blocks and a time. With host memory for KV, pins keep blocks there and in the tiers below;
without it, in the pool. Each place keeps at most its share of blocks, older pins first. If a chain does not fit, its
leading blocks are kept, which are useful without the rest. The worker's own clock ends pins, so a router that dies
leaves nothing behind.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Protocol

from tandem.engine.engine import Engine
from tandem.protocol.messages import POOL_PLACE, Pin, PinLoad, PinReport
from tandem.worker.kv.prefetch import Prefetcher
from tandem.worker.kv.tiered_cache import TieredCache

_MAX_PINS = 4096  # a router may send more; they are not kept
_REVIEW_S = 1.0  # longest delay until blocks that came or went change what is kept


class PinnableCache(Protocol):
    """A cache whose blocks can be pinned by digest: the pool or a tier."""

    def __contains__(self, digest: bytes) -> bool: ...

    def pin(self, digests: Sequence[bytes]) -> None:
        """Keep these blocks of one chain, in its order, from now on or from when they are stored."""

    def unpin(self, digests: Iterable[bytes]) -> None:
        """End the pins of these blocks."""

    def pinned_digests(self) -> set[bytes]:
        """All pinned digests."""


class KeptBlocks:
    """The blocks that pins keep in one place: at most `max_blocks`. All were there when they were chosen."""

    def __init__(self, place: PinnableCache, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._place = place
        self._kept: dict[bytes, None] = {}  # within a chain, parents before children

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def room(self) -> int:
        """Blocks that may still be kept."""
        return self.max_blocks - len(self._kept)

    def review(self, chains: Iterable[Sequence[bytes]]) -> None:
        """Choose again: stored blocks, chain by chain from its beginning, until the bound is reached."""
        chosen: dict[bytes, None] = {}
        for chain in chains:
            of_chain = []
            for digest in chain:
                if digest not in chosen:
                    if digest not in self._place:
                        continue
                    if len(chosen) >= self.max_blocks:
                        break
                    chosen[digest] = None
                of_chain.append(digest)
            self._place.pin(of_chain)
        self._place.unpin([digest for digest in self._kept if digest not in chosen])
        self._kept = chosen

    def changed(self, stored: Sequence[bytes], removed: Sequence[bytes], wanted: Container[bytes]) -> bool:
        """Follow blocks that came and went. Returns whether a review could choose better."""
        gone = [digest for digest in removed if digest in self._kept]
        self._place.unpin(gone)
        for digest in gone:
            del self._kept[digest]
        arrived = [digest for digest in stored if digest in wanted and digest not in self._kept]
        num_chosen = min(len(arrived), self.room)
        self.keep(arrived[:num_chosen])
        return bool(gone) or num_chosen < len(arrived)

    def keep(self, digests: Sequence[bytes]) -> None:
        """Keep these blocks too. Pins want them, and there is room."""
        assert len(digests) <= self.room, f"{len(digests)} blocks, but there is room for {self.room}"
        self._place.pin(digests)
        self._kept.update(dict.fromkeys(digests))

    def check_integrity(self, wanted: Container[bytes]) -> None:
        """Raise AssertionError unless pinned and kept blocks are the same, within the bound, each wanted by a pin."""
        assert self._place.pinned_digests() == self._kept.keys(), "pinned blocks are not those that are kept"
        assert len(self._kept) <= self.max_blocks, f"{len(self._kept)} blocks are kept, the bound is {self.max_blocks}"
        unwanted = [digest.hex() for digest in self._kept if digest not in wanted]
        assert not unwanted, f"{len(unwanted)} blocks are kept for no pin: {unwanted[:5]}"


class WorkerPinTable:
    """The pins of one worker and the blocks kept for them. The time is passed in."""

    def __init__(self, places: Mapping[str, KeptBlocks]) -> None:
        self.places = places
        self._longest = max((kept.max_blocks for kept in places.values()), default=0)
        self.chains: dict[str, tuple[bytes, ...]] = {}  # by pin, oldest first; cut to what could be kept
        self._expiries: dict[str, float] = {}
        self._wanted: dict[bytes, None] = {}
        self._review_at = math.inf
        self._expires_at = math.inf  # when the pin that ends first expires

    def __len__(self) -> int:
        return len(self.chains)

    def wants(self, digests: Iterable[bytes]) -> bool:
        """Whether any of these blocks belongs to a pin."""
        return not self._wanted.keys().isdisjoint(digests)

    def pin(self, pin_id: str, digests: Sequence[bytes], ttl_s: float, now: float) -> None:
        """Keep this chain until `now + ttl_s`, in place of the chain that the pin named before."""
        if ttl_s <= 0 or not self._longest or (pin_id not in self.chains and len(self) >= _MAX_PINS):
            self.unpin(pin_id)
            return
        self.chains[pin_id] = tuple(digests[: self._longest])
        self._expiries[pin_id] = now + ttl_s
        self._pins_changed()

    def unpin(self, pin_id: str) -> None:
        """End a pin; unknown ids are ignored."""
        if self.chains.pop(pin_id, None) is not None:
            del self._expiries[pin_id]
            self._pins_changed()

    def pump(self, now: float) -> None:
        """End pins whose time is over, and review what is kept if that is due."""
        if now >= self._expires_at:
            for pin_id in [pin_id for pin_id, expires_at in self._expiries.items() if expires_at <= now]:
                del self.chains[pin_id], self._expiries[pin_id]
            self._pins_changed()
        elif now >= self._review_at:
            self._review()

    def changed(self, place: str, stored: Sequence[bytes], removed: Sequence[bytes], now: float) -> None:
        """Follow blocks that came to a place or left it."""
        kept = self.places.get(place)
        if self.chains and kept is not None and kept.changed(stored, removed, self._wanted):
            self._review_at = min(self._review_at, now + _REVIEW_S)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every place keeps only blocks that a pin wants, within its bound."""
        for kept in self.places.values():
            kept.check_integrity(self._wanted)

    def _pins_changed(self) -> None:
        self._wanted = dict.fromkeys(itertools.chain(*self.chains.values()))
        self._expires_at = min(self._expiries.values(), default=math.inf)
        self._review()

    def _review(self) -> None:
        self._review_at = math.inf
        for kept in self.places.values():
            kept.review(self.chains.values())


class WorkerPins:
    """The pins of one worker's engine and tiers. Runs in the worker's loop and never waits."""

    def __init__(self, engine: Engine, cache: TieredCache, share: float) -> None:
        self._pool = engine.pool
        self._tiers = {cached.name: cached.tier for cached in cache.tiers}
        places = {name: KeptBlocks(tier, int(tier.capacity_blocks * share)) for name, tier in self._tiers.items()}
        memory = cache.memory_tier
        if memory is None:  # then the pool is the only place that is fast
            places[POOL_PLACE] = KeptBlocks(self._pool, int(self._pool.num_blocks * share))
        self._table = WorkerPinTable(places)
        self._in_memory = None if memory is None else places[memory.name]
        self._prefetcher = Prefetcher(engine, cache)
        self._now = -math.inf

    @property
    def max_blocks(self) -> dict[str, int]:
        """Most blocks that pins may keep, by place."""
        return {name: kept.max_blocks for name, kept in self._table.places.items()}

    @property
    def is_prefetching(self) -> bool:
        """Whether blocks are being loaded for a pin now."""
        return self._prefetcher.is_busy

    def pin(self, message: Pin, now: float) -> None:
        """Keep a chain, and load it to the place that the message names."""
        self._table.pin(message.pin_id, message.digests, message.ttl_s, now)
        if message.pin_id in self._table.chains:
            self._prefetcher.want(message.pin_id, message.prefetch)

    def unpin(self, pin_id: str) -> None:
        """End a pin; unknown ids are ignored."""
        self._table.unpin(pin_id)

    def pump(self, now: float) -> None:
        """End expired pins, and let prefetching go on."""
        self._now = now
        self._table.pump(now)
        self._prefetcher.pump(self._table.chains, self._in_memory, now)

    def changed(self, place: str, stored: list[bytes], removed: list[bytes]) -> None:
        """Follow blocks that came to a place or left it."""
        self._table.changed(place, stored, removed, self._now)
        if self._table.wants(stored) or self._table.wants(removed):
            self._prefetcher.look_again()

    def report(self, query_id: str, pin_ids: Sequence[str]) -> PinReport:
        """How many leading blocks of these pins are in each place."""
        chains = self._table.chains
        return PinReport(
            query_id=query_id,
            held={
                pin_id: {POOL_PLACE: self._pool.count_cached(chains[pin_id])}
                | {name: tier.count_present(chains[pin_id]) for name, tier in self._tiers.items()}
                for pin_id in pin_ids
                if pin_id in chains
            },
        )

    def load(self) -> PinLoad:
        """How many pins there are, and how many blocks they keep."""
        return PinLoad(
            num_pins=len(self._table),
            num_blocks={name: len(kept) for name, kept in self._table.places.items()},
            num_prefetched=dict(self._prefetcher.num_blocks),
        )

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless the books agree; with `idle`, nothing may be loaded without a pin."""
        self._table.check_integrity()
        assert not (idle and not self._table and self._prefetcher.is_busy), "blocks are loaded for no pin"
