from __future__ import annotations

from typing import Any

import msgspec

from tandem.protocol.digest import join_digests
from tandem.protocol.messages import POOL_PLACE, BlockEvents, BlockSnapshot, Role, SnapshotRequest, decode_message
from tandem.router.workers.index_feed import IndexFeed
from tandem.router.workers.link import Link
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry
from tests.support.builders import add_ready, make_card
from tests.support.fake_worker import digests


class Socket:
    """Records the snapshots that are requested through it."""

    def __init__(self) -> None:
        self.requested: list[list[str]] = []

    def send(self, data: bytes) -> None:
        message = decode_message(data)
        assert isinstance(message, SnapshotRequest)
        self.requested.append(message.places)


class World:
    def __init__(self) -> None:
        self.registry, self.index = Registry(), PrefixIndex()
        self.feed = IndexFeed(self.registry, self.index)
        self.links: dict[str, Link] = {}

    def join(self, worker_id: str, tiers: dict[str, str]) -> Socket:
        """A worker joins, and the feed follows it."""
        card = msgspec.structs.replace(make_card(worker_id, Role.DECODE), tiers=tiers)
        add_ready(self.registry, card)
        socket: Any = Socket()
        link = self.links[worker_id] = Link(card.address, socket, socket)
        link.kind, link.tiers = card.kind, card.tiers
        self.feed.follow(link, 0.0)
        result: Socket = socket
        return result


def events(sequence: int, *names: bytes) -> BlockEvents:
    return BlockEvents(worker_id="a", epoch=1, sequence=sequence, stored=join_digests(digests(names)), removed=b"")


async def test_a_gap_in_the_events_is_closed_by_one_snapshot() -> None:
    world = World()
    socket = world.join("a", {})
    link = world.links["a"]
    assert socket.requested == [[POOL_PLACE]]  # it may have cached blocks before
    world.feed.apply(link, BlockSnapshot(worker_id="a", epoch=1, sequence=0, digests=b""), 0.0)
    world.feed.apply(link, events(1, b"x"), 0.0)
    assert (world.index.num_blocks("a"), len(socket.requested)) == (1, 1)
    world.feed.apply(link, events(3, b"z"), 0.0)
    world.feed.apply(link, events(4, b"zz"), 0.0)
    assert socket.requested[1:] == [[POOL_PLACE]], "requested once for all events after the gap"
    world.feed.apply(
        link, BlockSnapshot(worker_id="a", epoch=1, sequence=4, digests=join_digests(digests([b"x", b"y"]))), 0.0
    )
    assert world.index.num_blocks("a") == 2


async def test_a_snapshot_whose_part_is_lost_is_requested_again() -> None:
    world = World()
    socket = world.join("a", {})
    link, whole = world.links["a"], digests([b"x", b"y", b"z"])

    def part(number: int) -> BlockSnapshot:
        run = join_digests(whole[number : number + 1])
        about = {"worker_id": "a", "epoch": 1, "sequence": 3}
        return BlockSnapshot(**about, digests=run, part=number, is_last=number == 2)  # type: ignore[arg-type]

    for number in (0, 2):
        world.feed.apply(link, part(number), 0.0)
    for now, num_requested in ((1.0, 1), (2.5, 2), (3.0, 2)):
        world.feed.request_overdue(link, now=now, timeout_s=2.0)
        assert socket.requested == [[POOL_PLACE]] * num_requested
    for number in (0, 1, 2):
        world.feed.apply(link, part(number), 4.0)
    world.feed.request_overdue(link, now=9.0, timeout_s=2.0)
    assert (len(socket.requested), world.index.num_blocks("a")) == (2, 3)
