"""How notifications of a NIXL link are put in order, and transfers that cannot be cancelled.

What NIXL itself does is in test_transport_contract.py.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from typing_extensions import override

from tandem.kv_transfer.transport import nixl_agent
from tandem.kv_transfer.transport.base import PoolShape, TransferState, block_runs
from tandem.kv_transfer.transport.nixl import NixlTransport
from tandem.kv_transfer.transport.nixl_agent import NixlAgent, TransferHandle, ucx_defaults
from tandem.kv_transfer.transport.notification_order import (
    HEADER_BYTES,
    MAX_AHEAD,
    MAX_EARLY,
    NotificationReceiver,
    NotificationSequencer,
    number_notification,
)
from tandem.kv_transfer.transport.shards import piece_ids
from tests.support.waiting import poll_until


def make_message(sequence: int, link: int = 1) -> bytes:
    return number_notification(link, sequence, b"%d" % sequence)


def take(sequencer: NotificationSequencer, *messages: bytes) -> list[int]:
    return [int(payload) for message in messages for payload in sequencer.take(message)]


def test_any_order_becomes_the_senders_order() -> None:
    messages = [make_message(sequence) for sequence in range(20)]
    shuffled = random.Random(0).sample(messages * 2, 40)  # each comes twice
    assert take(NotificationSequencer(), *shuffled) == list(range(20))


@pytest.mark.parametrize("byte", range(HEADER_BYTES))
def test_a_flipped_bit_in_number_or_link_loses_one_notification_only(byte: int) -> None:
    for bit in range(8):
        damaged = bytearray(make_message(2))
        damaged[byte] ^= 1 << bit
        sequencer = NotificationSequencer()
        assert take(sequencer, make_message(0), make_message(1), bytes(damaged)) == [0, 1]
        assert take(sequencer, make_message(4), make_message(3), make_message(5)) == [3, 4, 5]


def test_a_damaged_one_that_overtook_others_takes_the_place_of_one() -> None:
    sequencer = NotificationSequencer()
    assert take(sequencer, make_message(2)[:-1], make_message(0), make_message(1), make_message(3)) == [0, 1, 3]
    assert take(sequencer, b"", make_message(4), make_message(5)) == [4, 5]


def test_the_first_one_of_a_link_may_be_the_damaged_one() -> None:
    assert take(NotificationSequencer(), make_message(0)[1:], make_message(1), make_message(2)) == [1, 2]


def test_a_link_that_was_added_again_counts_from_zero() -> None:
    sequencer = NotificationSequencer()
    assert take(sequencer, make_message(0), make_message(2), make_message(1)[:-1]) == [0, 2]
    assert take(sequencer, make_message(1, link=2), make_message(3), make_message(0, link=2)) == [0, 1]


def test_a_notification_that_never_comes_holds_up_a_bounded_number() -> None:
    sequencer = NotificationSequencer()
    ready = [take(sequencer, make_message(sequence)) for sequence in range(1, MAX_EARLY + 2)]
    assert ready == [[]] * MAX_EARLY + [list(range(1, MAX_EARLY + 2))]
    assert (sequencer.early, sequencer.num_early_bytes, sequencer.num_dropped) == ({}, 0, 1)
    assert take(sequencer, make_message(0), make_message(MAX_EARLY + 2)) == [MAX_EARLY + 2]


def test_early_notifications_are_bounded_in_bytes_and_in_distance() -> None:
    sequencer = NotificationSequencer(max_early_bytes=1000)
    for sequence in random.Random(1).sample(range(1, 10_000), 5000):
        list(sequencer.take(number_notification(1, sequence, b"x" * 100)))
        assert sequencer.num_early_bytes == sum(map(len, sequencer.early.values())) <= 1000
    sequencer = NotificationSequencer()
    assert take(sequencer, make_message(MAX_AHEAD), make_message(2**63), make_message(2**64 - 1)) == []
    assert (sequencer.early, sequencer.num_dropped) == ({}, 3)
    assert take(sequencer, make_message(0)) == [0]


def test_strangers_take_no_memory_and_no_slots_of_known_peers() -> None:
    receiver = NotificationReceiver(max_senders=2)
    arriving: list[dict[str, list[bytes]]] = [
        {"p#1": [make_message(0)], "q#1": [make_message(1)]},
        {f"stranger {number}#1": [make_message(0)] * 2 for number in range(100)} | {"no worker": [b""]},
        {"p#1": [make_message(1)], "q#2": [make_message(0)]},
        {"q#1": [make_message(0)], "q#2": [make_message(1)]},
    ]
    arrived = [[(n.worker_id, n.epoch, n.payload) for n in receiver.take(messages)] for messages in arriving]
    assert arrived == [[("p", 1, b"0")], [], [("p", 1, b"1"), ("q", 2, b"0")], [("q", 2, b"1")]]
    assert receiver.num_dropped == 202
    assert receiver.take({"r#1": [make_message(0)]}) == [], "p and q are still known"


def test_names_of_no_worker_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    receiver = NotificationReceiver()
    names = ("stranger", "a#", "a#x", "#1", "a#-1", "x" * 5000 + "#1")
    assert receiver.take({name: [b"x" * 40] for name in names}) == []
    assert receiver.num_dropped == 6
    assert "dropped notifications" in caplog.text


class StuckAgent(NixlAgent):
    """Its transfers never move, and cannot be cancelled until `can_cancel`."""

    can_cancel = False

    @override
    def prepare(self, *arguments: Any) -> TransferHandle:
        return object()

    @override
    def begin(self, handle: TransferHandle) -> None:
        pass

    @override
    def try_finish(self, handle: TransferHandle) -> bool:
        return False

    @override
    def try_release(self, handle: TransferHandle) -> bool:
        return self.can_cancel


def test_a_read_that_cannot_be_cancelled_is_lost_only_when_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = NixlTransport("a", 1, torch.zeros(4, 64), make_agent=StuckAgent)
    other = NixlTransport("b", 1, torch.zeros(4, 64))
    try:
        transport.add_peer("b", 1, other.local_metadata())
        read, write = transport.read_blocks("b", [0], [1]), transport.write_blocks("b", [2], [3])
        transport.remove_peer("b")
        assert write.state is TransferState.LOST
        assert not read.is_settled, "its blocks are the transport's for as long as bytes may come"
        transport.poll()
        assert not read.is_settled
        monkeypatch.setattr(StuckAgent, "can_cancel", True)
        transport.poll()
        assert read.state is TransferState.LOST
    finally:
        transport.close()
        other.close()


class CountingAgent(NixlAgent):
    """Notes how many descriptors NIXL has made of each transfer."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.num_descriptors: list[int] = []

    @override
    def try_finish(self, handle: TransferHandle) -> bool:
        if self._agent.check_xfer_state(handle) == "DONE":
            self.num_descriptors.append(self._agent.get_xfer_telemetry(handle).descCount)
        return super().try_finish(handle)


UP, DOWN, EVEN = list(range(20)), list(range(19, -1, -1)), list(range(0, 40, 2))


@pytest.mark.parametrize("is_read", [False, True], ids=["write", "read"])
@pytest.mark.parametrize(
    ("num_shards", "local", "remote", "expected"),
    [
        ((1, 1), UP, UP, 1),
        ((1, 1), DOWN, DOWN, 1),
        ((1, 1), UP, DOWN, 20),
        ((1, 1), EVEN, UP, 20),
        ((1, 1), UP, EVEN, 20),
        ((1, 1), [*UP, 30, 31], [5, 6, *range(10, 30)], 3),
        ((2, 2), UP, UP, 2),
        ((1, 2), UP, UP, 40),  # the parts of a block lie side by side here, and in two shards there
        ((2, 1), UP, UP, 40),
    ],
)
def test_neighbours_on_both_sides_are_one_descriptor(
    monkeypatch: pytest.MonkeyPatch,
    num_shards: tuple[int, int],
    local: list[int],
    remote: list[int],
    expected: int,
    is_read: bool,
) -> None:
    with_telemetry = partial(nixl_agent._api.nixl_agent_config, capture_telemetry=True)
    monkeypatch.setattr(nixl_agent._api, "nixl_agent_config", with_telemetry)
    ours, theirs = ([torch.zeros(40, 64 // count) for _ in range(count)] for count in num_shards)
    near = NixlTransport("a", 1, ours, make_agent=CountingAgent)
    far = NixlTransport("b", 1, theirs)
    try:
        near.add_peer("b", 1, far.local_metadata())
        copy = near.read_blocks("b", remote, local) if is_read else near.write_blocks("b", local, remote)
        poll_until(near, lambda: far.poll() or copy.is_settled)
        assert copy.state is TransferState.DONE
        agent = near._agent
        assert isinstance(agent, CountingAgent)
        assert agent.num_descriptors == [expected]
        pieces = max(num_shards)
        ids = (
            piece_ids(ids, PoolShape(40, 256, count), pieces, gap=1)
            for ids, count in zip((local, remote), num_shards, strict=True)
        )
        assert len(block_runs(*ids)) == expected, "`nccl` makes the same runs"
    finally:
        near.close()
        far.close()


@pytest.mark.parametrize(
    ("is_on_gpu", "is_local", "expected"),
    [
        (False, False, {}),
        (False, True, {"UCX_NET_DEVICES": "lo"}),
        (True, False, {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}),
        (True, True, {"UCX_NET_DEVICES": "lo", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}),
    ],
)
def test_ucx_is_told_of_gpus_and_of_loopback(is_on_gpu: bool, is_local: bool, expected: dict[str, str]) -> None:
    assert ucx_defaults(is_on_gpu=is_on_gpu, is_local=is_local) == expected
