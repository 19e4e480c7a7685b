"""How notifications of a NIXL link are put in order, and transfers that cannot be cancelled.

What NIXL itself does is in test_transport_contract.py.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from tandem.kv_transfer.checksum import append_checksum
from tandem.kv_transfer.transport import nixl
from tandem.kv_transfer.transport.base import TransferState
from tandem.kv_transfer.transport.nixl import (
    _HEADER,
    _MAX_AHEAD,
    _MAX_EARLY,
    NixlTransport,
    _bindings,
    _Inbox,
    _NixlTransfer,
)


def make_message(sequence: int, link: int = 1) -> bytes:
    return append_checksum(_HEADER.pack(link, sequence) + b"%d" % sequence)


def take(inbox: _Inbox, *messages: bytes) -> list[int]:
    return [int(payload) for message in messages for payload in inbox.take(message)]


def test_any_order_becomes_the_senders_order() -> None:
    messages = [make_message(sequence) for sequence in range(20)]
    shuffled = random.Random(0).sample(messages * 2, 40)  # each comes twice
    assert take(_Inbox(), *shuffled) == list(range(20))


@pytest.mark.parametrize("byte", range(_HEADER.size))
def test_a_flipped_bit_in_number_or_link_loses_one_notification_and_no_more(byte: int) -> None:
    for bit in range(8):
        damaged = bytearray(make_message(2))
        damaged[byte] ^= 1 << bit
        inbox = _Inbox()
        assert take(inbox, make_message(0), make_message(1), bytes(damaged)) == [0, 1]
        assert take(inbox, make_message(4), make_message(3), make_message(5)) == [3, 4, 5]


def test_a_damaged_one_that_overtook_others_takes_the_place_of_one() -> None:
    inbox = _Inbox()
    assert take(inbox, make_message(2)[:-1], make_message(0), make_message(1), make_message(3)) == [0, 1, 3]
    assert take(inbox, b"", make_message(4), make_message(5)) == [4, 5]


def test_the_first_one_of_a_link_may_be_the_damaged_one() -> None:
    assert take(_Inbox(), make_message(0)[1:], make_message(1), make_message(2)) == [1, 2]


def test_a_link_that_was_added_anew_counts_from_the_beginning() -> None:
    inbox = _Inbox()
    assert take(inbox, make_message(0), make_message(2), make_message(1)[:-1]) == [0, 2]
    assert take(inbox, make_message(1, link=2), make_message(3), make_message(0, link=2)) == [0, 1]


def test_a_notification_that_never_comes_holds_up_a_bounded_number_of_others() -> None:
    inbox = _Inbox()
    ready = [take(inbox, make_message(sequence)) for sequence in range(1, _MAX_EARLY + 2)]
    assert ready == [[]] * _MAX_EARLY + [list(range(1, _MAX_EARLY + 2))]
    assert (inbox.early, inbox.num_early_bytes, inbox.num_dropped) == ({}, 0, 1)
    assert take(inbox, make_message(0), make_message(_MAX_EARLY + 2)) == [_MAX_EARLY + 2]


def test_early_notifications_are_bounded_in_bytes_and_in_how_far_ahead_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl, "_MAX_EARLY_BYTES", 1000)
    inbox = _Inbox()
    for sequence in random.Random(1).sample(range(1, 10_000), 5000):
        list(inbox.take(append_checksum(_HEADER.pack(1, sequence) + b"x" * 100)))
        assert inbox.num_early_bytes == sum(map(len, inbox.early.values())) <= 1000
    inbox = _Inbox()
    assert take(inbox, make_message(_MAX_AHEAD), make_message(2**63), make_message(2**64 - 1)) == []
    assert (inbox.early, inbox.num_dropped) == ({}, 3)
    assert take(inbox, make_message(0)) == [0]


def test_strangers_take_no_memory_and_no_place_of_those_who_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_MAX_INBOXES", 2)
    transport = NixlTransport("a", 1, torch.zeros(4, 64))
    try:
        arriving: list[dict[str, list[bytes]]] = [
            {"p#1": [make_message(0)], "q#1": [make_message(1)]},
            {f"stranger {number}#1": [make_message(0)] * 2 for number in range(100)} | {"no worker": [b""]},
            {"p#1": [make_message(1)], "q#2": [make_message(0)]},
            {"q#1": [make_message(0)], "q#2": [make_message(1)]},
        ]
        agent = transport._agent
        transport._agent = SimpleNamespace(get_new_notifs=lambda: arriving.pop(0))
        arrived = [[(n.worker_id, n.epoch, n.payload) for n in transport.poll()] for _ in range(4)]
        transport._agent = agent
        assert arrived == [[("p", 1, b"0")], [], [("p", 1, b"1"), ("q", 2, b"0")], [("q", 2, b"1")]]
        assert sorted(transport._inboxes) == ["p#1", "q#2"]
        assert transport.num_dropped == 202
    finally:
        transport.close()


class Handle:
    """As NIXL's, with an answer of its own."""

    is_stuck = True

    def release(self) -> None:
        if self.is_stuck:
            raise _bindings.nixlBackendError("it is in flight")


def test_a_read_that_cannot_be_cancelled_is_lost_only_when_it_can() -> None:
    transport, other = (NixlTransport(name, 1, torch.zeros(4, 64)) for name in ("a", "b"))
    try:
        transport.add_peer("b", 1, other.local_metadata())
        read, write = (_NixlTransfer("b", 256, b"", is_read=is_read) for is_read in (True, False))
        read.handle, write.handle = handles = Handle(), Handle()
        transport._peers["b"].in_flight += [read, write]
        transport.remove_peer("b")
        assert write.state is TransferState.LOST
        assert not read.is_settled, "its blocks are the transport's for as long as bytes may come"
        transport.poll()
        assert not read.is_settled
        for handle in handles:
            handle.is_stuck = False
        transport.poll()
        assert read.state is TransferState.LOST
        assert transport._stuck == []
    finally:
        transport.close()
        other.close()
