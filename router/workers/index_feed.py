"""Keeps the prefix index in step with the workers' caches, from their events and, after a gap, their snapshots."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tandem.protocol.messages import POOL_PLACE, BlockEvents, BlockSnapshot, SnapshotRequest, holder_name
from tandem.router.workers.link import Link
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry


class IndexFeed:
    """Feeds an index. A store that several workers share is reported by one of them, which the registry names."""

    def __init__(self, registry: Registry, index: PrefixIndex) -> None:
        self._registry = registry
        self._index = index

    def follow(self, link: Link, now: float) -> None:
        """Follow a worker's pool, its own tiers, and shared stores that no other worker reports."""
        new = {POOL_PLACE, *link.tiers} - link.places if link.kind else set()
        for place in list(new):
            store = link.tiers.get(place, "")
            if store and not self._registry.is_reporter(store, link.worker_id):
                new.discard(place)
            else:
                self._index.add_worker(holder_name(link.worker_id, place), link.address.epoch)
        link.places |= new
        self._request_snapshots(link, new, now)  # it may have cached blocks before we joined it

    def forget(self, link: Link, others: Iterable[Link], now: float) -> None:
        """Remove a worker that has left, and hand its shared stores to another reporter."""
        self._index.remove_worker(*(holder_name(link.worker_id, place) for place in (POOL_PLACE, *link.tiers)))
        for other in others:
            self.follow(other, now)

    def apply(self, link: Link, message: BlockEvents | BlockSnapshot, now: float) -> None:
        """Apply what a worker says about its cache. After a gap in its events, request a snapshot."""
        if isinstance(message, BlockSnapshot):
            if self._index.apply_snapshot(message):
                link.snapshots_due.discard(message.place)
        elif self._index.apply(message):
            self._request_snapshots(link, {message.place}, now)

    def request_overdue(self, link: Link, now: float, timeout_s: float) -> None:
        """Request snapshots again that did not arrive in time."""
        if link.snapshots_due and now - link.snapshot_requested_s > timeout_s:
            overdue, link.snapshots_due = link.snapshots_due, set()
            self._request_snapshots(link, overdue, now)

    def _request_snapshots(self, link: Link, places: Collection[str], now: float) -> None:
        due = set(places) - link.snapshots_due
        if due:
            link.snapshots_due |= due
            link.snapshot_requested_s = now
            link.send(SnapshotRequest(places=sorted(due)))
