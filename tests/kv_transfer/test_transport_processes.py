"""Transports between real processes: bytes, restarts, and peers killed or stopped in the middle of a transfer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tandem.kv_transfer.transport.base import Notification, Transfer, TransferState, Transport
from tandem.kv_transfer.transport.factory import create_transport
from tandem.kv_transfer.transport.one_machine import MailboxSender
from tandem.protocol.errors import PeerLost
from tests.support.addresses import has_ipv6_loopback
from tests.support.waiting import poll_until

pytestmark = pytest.mark.cluster

NUM_BLOCKS = 32
ONE_MACHINE = "nixl on one machine"  # without a port of UCX
BLOCK_SHAPE = (30, 2, 16, 3, 64)  # 360 KB in bfloat16
DEADLINE_S = 30.0
LOSS_BOUND_S = 5.0  # from a peer's death to a settled write
NEEDS_IPV6 = pytest.mark.skipif(not has_ipv6_loopback(), reason="this machine has no ::1")
AT_IPV6 = [pytest.param(f"{one} at ::1", marks=NEEDS_IPV6) for one in ("nccl", "nixl")]


def zero_pool() -> torch.Tensor:
    return torch.zeros(NUM_BLOCKS, *BLOCK_SHAPE, dtype=torch.bfloat16)


def make_transport(name: str, folder: str, worker_id: str, epoch: int, pool: torch.Tensor) -> Transport:
    mailbox = f"ipc://{folder}/{worker_id}-{epoch}" if name == ONE_MACHINE else ""
    host = name.partition(" at ")[2] or "127.0.0.1"
    return create_transport(name.split()[0], worker_id=worker_id, epoch=epoch, pool=pool, host=host, mailbox=mailbox)


def run_peer(connection: Connection, name: str, folder: str, epoch: int) -> None:
    """A worker "d" that polls its transport and follows the test's commands."""
    torch.set_num_threads(1)
    pool = zero_pool()
    transport = make_transport(name, folder, "d", epoch, pool)
    connection.send(transport.local_metadata())
    arrived: list[Notification] = []
    while True:
        arrived += transport.poll()
        if not connection.poll(0.0005):
            continue
        match connection.recv():
            case ("block", block_id):
                connection.send(pool[block_id].float().numpy())
            case ("fill", value):
                connection.send(bool((pool.fill_(value) == value).all()))
            case ("arrived",):
                connection.send(arrived)
            case ("write", metadata, count):
                transport.add_peer("p", 1, metadata)
                pool.fill_(7)
                for number in range(count):
                    blocks = [number % NUM_BLOCKS]
                    transport.write_blocks("p", blocks, blocks, b"%d" % number)
            case ("close",):
                transport.close()
                connection.send("closed")
                return


class Peer:
    """The other process, held by its own handle."""

    def __init__(self, name: str, folder: str, epoch: int = 1) -> None:
        context = multiprocessing.get_context("forkserver")  # fork without our threads
        context.set_forkserver_preload(["tandem.kv_transfer.transport.collective", "tandem.kv_transfer.transport.nixl"])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=run_peer, args=(theirs, name, folder, epoch), daemon=True)
        self.process.start()
        theirs.close()
        self.metadata: bytes = self.receive()

    def receive(self) -> Any:
        assert self.connection.poll(DEADLINE_S), "the peer process does not answer"
        return self.connection.recv()

    def ask(self, *request: object) -> Any:
        self.connection.send(request)
        return self.receive()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(DEADLINE_S)
        self.connection.close()


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:  # a short one: the path of a socket has 107 bytes at most
        yield folder


@pytest.fixture(params=["nccl", "nixl", ONE_MACHINE])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def peers(name: str, folder: str) -> Iterator[Callable[..., Peer]]:
    started: list[Peer] = []

    def start(epoch: int = 1) -> Peer:
        started.append(Peer(name, folder, epoch))
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.randn(NUM_BLOCKS, *BLOCK_SHAPE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.fixture
def transport(name: str, folder: str, pool: torch.Tensor) -> Iterator[Transport]:
    transport = make_transport(name, folder, "p", 1, pool)
    yield transport
    transport.close()


def linked(peers: Callable[..., Peer], transport: Transport) -> Peer:
    """A new peer that something was written to."""
    peer = peers()
    transport.add_peer("d", 1, peer.metadata)
    first = transport.write_blocks("d", [0], [0])
    poll_until(transport, lambda: first.is_settled)
    return peer


def receive_some(transport: Transport) -> list[Notification]:
    deadline = time.monotonic() + DEADLINE_S
    while not (arrived := transport.poll()):
        assert time.monotonic() < deadline, f"no notification within {DEADLINE_S} s"
    return arrived


def states(transfers: list[Transfer]) -> set[TransferState]:
    return {transfer.state for transfer in transfers}


@pytest.mark.parametrize("name", ["nccl", "nixl", ONE_MACHINE, *AT_IPV6])
def test_blocks_cross_processes(peers: Callable[..., Peer], pool: torch.Tensor, transport: Transport) -> None:
    peer = peers()
    transport.add_peer("d", 1, peer.metadata)
    transfers = [transport.write_blocks("d", [i, 31 - i], [i, 16 + i], b"%d" % i) for i in range(16)]
    poll_until(transport, lambda: all(transfer.is_settled for transfer in transfers))
    assert states(transfers) == {TransferState.DONE}
    deadline = time.monotonic() + DEADLINE_S
    while len(arrived := peer.ask("arrived")) < 16:
        assert time.monotonic() < deadline
    assert arrived == [Notification("p", 1, b"%d" % i) for i in range(16)]
    for i in range(16):
        assert torch.equal(torch.from_numpy(peer.ask("block", i)), pool[i].float())
        assert torch.equal(torch.from_numpy(peer.ask("block", 16 + i)), pool[31 - i].float())
    assert peer.ask("close") == "closed"


def test_reads_from_a_peer_that_is_stopped_and_killed_are_right_or_lost(
    peers: Callable[..., Peer], pool: torch.Tensor, transport: Transport
) -> None:
    peer = peers()
    assert peer.ask("fill", 3.0)
    transport.add_peer("d", 1, peer.metadata)
    first = transport.read_blocks("d", [0], [0])
    poll_until(transport, lambda: first.is_settled)
    assert first.state is TransferState.DONE
    peer.signal(signal.SIGSTOP)
    reads = [transport.read_blocks("d", [i], [i]) for i in range(8)]  # nixl: the peer need do nothing for them
    peer.kill()
    poll_until(transport, lambda: all(read.is_settled for read in reads), LOSS_BOUND_S)
    assert states(reads) <= {TransferState.DONE, TransferState.LOST}
    assert all(bool((pool[i] == 3.0).all()) for i in range(8) if reads[i].state is TransferState.DONE)
    try:
        late = transport.read_blocks("d", [9], [9])
    except PeerLost:
        return
    poll_until(transport, lambda: late.is_settled, LOSS_BOUND_S)
    assert late.state is TransferState.LOST


def test_a_killed_receiver_is_lost_in_time(peers: Callable[..., Peer], transport: Transport, name: str) -> None:
    peer = linked(peers, transport)
    peer.signal(signal.SIGSTOP)  # so that these writes are pending when it dies
    pending = [transport.write_blocks("d", [i], [i], b"never") for i in range(8)]
    peer.kill()
    poll_until(transport, lambda: all(transfer.is_settled for transfer in pending), LOSS_BOUND_S)
    if name == ONE_MACHINE:  # copied into the memory of a stopped process: each was over when its call returned
        assert states(pending) == {TransferState.DONE}
        pending.append(transport.write_blocks("d", [], [], b"never"))
        poll_until(transport, lambda: pending[-1].is_settled, LOSS_BOUND_S)
    assert pending[-1].state is TransferState.LOST
    with pytest.raises(PeerLost):
        transport.write_blocks("d", [0], [0])
    restarted = peers(epoch=2)
    transport.add_peer("d", 2, restarted.metadata)
    again = transport.write_blocks("d", [3], [4])
    poll_until(transport, lambda: again.is_settled)
    assert again.state is TransferState.DONE


@pytest.mark.parametrize("was_written_to", [True, False])
def test_a_write_to_a_dead_peer_is_lost(peers: Callable[..., Peer], transport: Transport, was_written_to: bool) -> None:
    peer = linked(peers, transport) if was_written_to else peers()
    peer.kill()
    try:
        transport.add_peer("d", 1, peer.metadata)
        transfer = transport.write_blocks("d", [1], [1], b"never")
    except PeerLost:
        return
    poll_until(transport, lambda: transfer.is_settled, LOSS_BOUND_S)
    assert transfer.state is TransferState.LOST


def test_a_stopped_peer_can_be_removed_and_resumed(peers: Callable[..., Peer], transport: Transport, name: str) -> None:
    peer = linked(peers, transport)
    peer.signal(signal.SIGSTOP)
    pending = [transport.write_blocks("d", [i], [i], b"stale") for i in range(8)]
    transport.remove_peer("d")  # the peer would never answer
    assert all(transfer.is_settled for transfer in pending)
    assert pending[-1].state is (TransferState.DONE if name == ONE_MACHINE else TransferState.LOST)
    peer.signal(signal.SIGCONT)
    transport.add_peer("d", 1, peer.metadata)
    again = transport.write_blocks("d", [5], [6], b"again")
    poll_until(transport, lambda: again.is_settled)
    assert again.state is TransferState.DONE


@pytest.mark.parametrize("count", [200, pytest.param(1, marks=pytest.mark.slow)])
def test_a_sender_killed_while_writing_leaves_the_receiver_alive(
    peers: Callable[..., Peer], pool: torch.Tensor, transport: Transport, count: int
) -> None:
    peer = peers()
    peer.connection.send(("write", transport.local_metadata(), count))
    arrived = receive_some(transport)
    peer.kill()
    for _ in range(100):
        arrived += transport.poll()
    assert [notification.payload for notification in arrived] == [b"%d" % number for number in range(len(arrived))]
    for number in range(min(len(arrived), NUM_BLOCKS)):
        assert bool((pool[number] == 7).all())
    other = peers(epoch=2)
    transport.add_peer("d", 2, other.metadata)
    transfer = transport.write_blocks("d", [0], [0])
    poll_until(transport, lambda: transfer.is_settled)
    assert transfer.state is TransferState.DONE


def test_close_does_not_wait_for_a_stopped_peer(peers: Callable[..., Peer], transport: Transport) -> None:
    peer = linked(peers, transport)
    peer.signal(signal.SIGSTOP)
    pending = [transport.write_blocks("d", [i], [i], b"never") for i in range(8)]
    transport.close()  # the peer would never answer
    assert all(transfer.is_settled for transfer in pending)


@pytest.mark.parametrize("name", [ONE_MACHINE], indirect=True)
def test_senders_killed_while_notifying_silence_nobody(peers: Callable[..., Peer], transport: Transport) -> None:
    """A sender killed in the middle of a message would stop UCX's ring of shared memory."""
    for epoch in range(1, 9):
        peer = peers(epoch)
        peer.connection.send(("write", transport.local_metadata(), 10_000))
        receive_some(transport)
        peer.kill()


@pytest.mark.parametrize("name", [ONE_MACHINE], indirect=True)
def test_notifications_to_a_stopped_peer_are_bounded(peers: Callable[..., Peer], transport: Transport) -> None:
    peer = peers()
    transport.add_peer("d", 1, peer.metadata)
    peer.signal(signal.SIGSTOP)
    owed = [transport.write_blocks("d", [], [], b"%d" % number) for number in range(40_000)]
    assert owed[0].state is TransferState.DONE
    assert owed[-1].state is TransferState.PENDING
    peer.signal(signal.SIGCONT)
    poll_until(transport, lambda: owed[-1].is_settled)
    assert states(owed) == {TransferState.DONE}
    deadline = time.monotonic() + DEADLINE_S
    while len(arrived := peer.ask("arrived")) < len(owed):
        assert time.monotonic() < deadline, f"{len(arrived)} arrived"
    assert [int(notification.payload) for notification in arrived] == list(range(len(owed)))


@pytest.mark.parametrize("name", [ONE_MACHINE], indirect=True)
@pytest.mark.parametrize("is_read", [True, False], ids=["read", "write"])
def test_a_copy_with_a_peer_that_dies_meanwhile_is_lost_and_over(
    peers: Callable[..., Peer], transport: Transport, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    peer = linked(peers, transport)
    peer.kill()
    monkeypatch.setattr(MailboxSender, "is_dead", False)  # it dies right after that
    copy = (transport.read_blocks if is_read else transport.write_blocks)("d", [1], [1])
    poll_until(transport, lambda: copy.is_settled, LOSS_BOUND_S)
    assert copy.state is TransferState.LOST
    transport.poll()
    assert transport.is_quiet("d")
