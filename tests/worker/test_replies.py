"""What a worker says about its cache, however much of it changes at once."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.protocol.digest import split_digests
from tandem.protocol.messages import (
    MAX_RUN_DIGESTS,
    BlockEvents,
    BlockSnapshot,
    Hello,
    Message,
    PeerAddress,
    Role,
    decode_worker_message,
    encode_message,
)
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.worker.replies import RouterReplies
from tests.support.builders import make_card


class Sockets:
    """What each router was sent, as it arrives there."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Message]] = []

    def reply(self, identity: bytes, message: Message) -> None:
        self.sent.append((identity, decode_worker_message(encode_message(message))))

    def take(self, kind: type[Any], identity: bytes) -> list[Any]:
        return [message for to, message in self.sent if to == identity and isinstance(message, kind)]


@pytest.fixture
def sockets() -> Sockets:
    return Sockets()


@pytest.fixture
def replies(sockets: Sockets) -> RouterReplies:
    card = make_card("w", Role.DECODE)
    replies = RouterReplies(PeerAddress("w", 1, "", ""), sockets)  # type: ignore[arg-type]
    for identity in (b"r", b"s"):
        replies.welcome(identity, Hello(router_id=identity.decode()), card)
    return replies


def chain(first: int, num_blocks: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in range(first, first + num_blocks)]


@pytest.mark.parametrize(("num_stored", "num_removed"), [(1, 0), (4096, 4096), (4097, 0), (0, 10_000), (9000, 62_500)])
def test_many_changes_come_in_messages_of_bounded_size_in_order(
    replies: RouterReplies, sockets: Sockets, num_stored: int, num_removed: int
) -> None:
    stored, removed = chain(0, num_stored), chain(100_000, num_removed)
    replies.send_events({"pool": (stored, removed)})
    for identity in (b"r", b"s"):
        events: list[BlockEvents] = sockets.take(BlockEvents, identity)
        assert [digest for one in events for digest in split_digests(one.stored)] == stored
        assert [digest for one in events for digest in split_digests(one.removed)] == removed
        assert [one.sequence for one in events] == list(range(1, len(events) + 1))
        assert len(events) == -(-max(num_stored, num_removed) // MAX_RUN_DIGESTS)


@pytest.mark.parametrize("num_blocks", [0, 1, 4096, 4097, 62_500])
def test_an_index_follows_behind_its_snapshot(replies: RouterReplies, sockets: Sockets, num_blocks: int) -> None:
    blocks = chain(0, num_blocks)
    replies.send_events({"pool": (blocks, []), "host": (chain(0, 1), [])})
    replies.send_snapshot(b"s", "pool", blocks)
    replies.send_events({"pool": (chain(num_blocks, 5000), blocks[-1:])})
    index = PrefixIndex()
    index.add_worker("w", 1)
    parts: list[BlockSnapshot] = sockets.take(BlockSnapshot, b"s")
    assert [index.apply_snapshot(part) for part in parts] == [False] * (len(parts) - 1) + [True]
    assert index.num_blocks("w") == num_blocks
    assert not sockets.take(BlockSnapshot, b"r"), "it has asked for none"
    for events in sockets.take(BlockEvents, b"s"):
        assert events.place != "pool" or not index.apply(events), "there is no gap behind a snapshot"
    assert index.num_blocks("w") == num_blocks + 5000 - min(num_blocks, 1)
