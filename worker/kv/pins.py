"""What a worker keeps for pins, whatever the router says: which blocks, where, how many at most, and for how long.

A pin names a chain of blocks and a time. Where there is host memory for KV, pins keep blocks there and in the tiers
below; where there is none, in the pool. Each place keeps at most its share of blocks, older pins first, and of a chain
that does not fit its leading blocks, which are useful without the rest. Time is the worker's own, so a router that dies
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

__all__ = ["KeptBlocks", "Place", "WorkerPinTable", "WorkerPins"]

_MAX_PINS = 4096  # however many a router sends
_REVIEW_S = 1.0  # blocks that came or went change what is kept this late at most, if there was no room for them at once


class Place(Protocol):
    """Where blocks are cached and can be pinned by digest: the pool or a tier."""

    def __contains__(self, digest: bytes) -> bool: ...

    def pin(self, digests: Sequence[bytes]) -> None:
        """Keep these blocks of one chain, in its order, now or once they are there."""

    def unpin(self, digests: Iterable[bytes]) -> None:
        """End the pins of these blocks."""

    def pinned_digests(self) -> set[bytes]:
        """All pinned digests."""


class KeptBlocks:
    """The blocks that pins keep in one place: at most `max_blocks`, all of them there when they were chosen."""

    def __init__(self, place: Place, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._place = place
        self._kept: dict[bytes, None] = {}  # parents before what hangs from them, within a chain

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def room(self) -> int:
        """Blocks that may still be kept."""
        return self.max_blocks - len(self._kept)

    def review(self, chains: Iterable[Sequence[bytes]]) -> None:
        """Choose anew: blocks that are there, chain by chain, each from its beginning, until the bound is reached."""
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
        """Follow blocks that came and went. Whether a review could choose better."""
        gone = [digest for digest in removed if digest in self._kept]
        self._place.unpin(gone)
        for digest in gone:
            del self._kept[digest]
        arrived = [digest for digest in stored if digest in wanted and digest not in self._kept]
        num_chosen = min(len(arrived), self.room)
        self.keep(arrived[:num_chosen])
        return bool(gone) or num_chosen < len(arrived)

    def keep(self, digests: Sequence[bytes]) -> None:
        """Keep these as well, which pins want and there is room for."""
        assert len(digests) <= self.room, f"{len(digests)} blocks, but there is room for {self.room}"
        self._place.pin(digests)
        self._kept.update(dict.fromkeys(digests))

    def check_integrity(self, wanted: Container[bytes]) -> None:
        """Raise AssertionError unless what is pinned there is what is kept, within the bound, and wanted by a pin."""
        assert self._place.pinned_digests() == self._kept.keys(), "pinned blocks are not those that are kept"
        assert len(self._kept) <= self.max_blocks, f"{len(self._kept)} blocks are kept, the bound is {self.max_blocks}"
        unwanted = [digest.hex() for digest in self._kept if digest not in wanted]
        assert not unwanted, f"{len(unwanted)} blocks are kept for no pin: {unwanted[:5]}"


class WorkerPinTable:
    """The pins of one worker and what is kept for them. No clock: the time is passed in."""

    def __init__(self, places: Mapping[str, KeptBlocks]) -> None:
        self.places = places
        self._longest = max((kept.max_blocks for kept in places.values()), default=0)
        self.chains: dict[str, tuple[bytes, ...]] = {}  # by pin, oldest first; of each only what could be kept at all
        self._expiries: dict[str, float] = {}
        self._wanted: dict[bytes, None] = {}
        self._review_at = math.inf
        self._expires_at = math.inf  # the first pin to do so

    def __len__(self) -> int:
        return len(self.chains)

    def wants(self, digests: Iterable[bytes]) -> bool:
        """Whether any of these blocks belongs to a pin."""
        return any(digest in self._wanted for digest in digests)

    def pin(self, pin_id: str, digests: Sequence[bytes], ttl_s: float, now: float) -> None:
        """Keep this chain until `now + ttl_s`, in place of what the pin named before."""
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
        """End pins whose time is over, and choose anew where that is due."""
        if now >= self._expires_at:
            for pin_id in [pin_id for pin_id, expires_at in self._expiries.items() if expires_at <= now]:
                del self.chains[pin_id], self._expiries[pin_id]
            self._pins_changed()
        elif now >= self._review_at:
            self._review()

    def changed(self, place: str, stored: Sequence[bytes], removed: Sequence[bytes], now: float) -> None:
        """Blocks came to a place and left it."""
        kept = self.places.get(place)
        if self.chains and kept is not None and kept.changed(stored, removed, self._wanted):
            self._review_at = min(self._review_at, now + _REVIEW_S)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every place keeps what it says, for a pin, within its bound."""
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
        if "host" not in places:  # then the pool is the only place that is fast
            places[POOL_PLACE] = KeptBlocks(self._pool, int(self._pool.num_blocks * share))
        self._table = WorkerPinTable(places)
        self._prefetcher = Prefetcher(engine, cache)
        self._now = -math.inf

    @property
    def max_blocks(self) -> dict[str, int]:
        """What pins may keep, by place."""
        return {name: kept.max_blocks for name, kept in self._table.places.items()}

    @property
    def is_prefetching(self) -> bool:
        """Whether blocks are being brought up now."""
        return self._prefetcher.is_busy

    def pin(self, message: Pin, now: float) -> None:
        """Keep a chain, and bring it up as far as the message says."""
        self._table.pin(message.pin_id, message.digests, message.ttl_s, now)
        if message.pin_id in self._table.chains:
            self._prefetcher.want(message.pin_id, message.prefetch)

    def unpin(self, pin_id: str) -> None:
        """End a pin; unknown ids are ignored."""
        self._table.unpin(pin_id)

    def pump(self, now: float) -> None:
        """Let pins expire and blocks come up."""
        self._now = now
        self._table.pump(now)
        self._prefetcher.pump(self._table.chains, self._table.places.get("host"), now)

    def changed(self, place: str, stored: list[bytes], removed: list[bytes]) -> None:
        """Follow blocks that came to a place or left it."""
        self._table.changed(place, stored, removed, self._now)
        if self._table.wants(stored) or self._table.wants(removed):
            self._prefetcher.look_again()

    def report(self, query_id: str, pin_ids: Sequence[str]) -> PinReport:
        """How many leading blocks of these pins are where."""
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
        """What is kept now."""
        return PinLoad(
            num_pins=len(self._table),
            num_blocks={name: len(kept) for name, kept in self._table.places.items()},
            num_prefetched=dict(self._prefetcher.num_blocks),
        )

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless the books agree. Pins that live are no leak; others may hold nothing."""
        self._table.check_integrity()
        assert not (idle and not self._table and self._prefetcher.is_busy), "blocks come up for no pin"
