"""How notifications of a NIXL link are put in order, and transfers that cannot be cancelled.

What NIXL itself does is in test_transport_contract.py.
"""

from __future__ import annotations

import random

import pytest
import torch

from kv_transfer.checksum import seal
from kv_transfer.transport.base import TransferState
from kv_transfer.transport.nixl import _HEADER, NixlTransport, _bindings, _Copy, _Inbox


def make_message(sequence: int, link: int = 1) -> bytes:
    return seal(_HEADER.pack(link, sequence) + b"%d" % sequence)


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
        read, write = (_Copy("b", 256, b"", is_read=is_read) for is_read in (True, False))
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
