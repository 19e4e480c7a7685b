"""Transports between real processes: bytes, restarts, and peers killed or stopped in the middle of a transfer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from kv_transfer.transport import Notification, Transfer, TransferState, Transport, create_transport
from protocol.errors import PeerLost

NUM_BLOCKS = 32
BLOCK_SHAPE = (30, 2, 16, 3, 64)  # 360 KB in bfloat16
DEADLINE_S = 30.0
LOSS_BOUND_S = 5.0  # from a peer's death to a settled write


def zero_pool() -> torch.Tensor:
    return torch.zeros(NUM_BLOCKS, *BLOCK_SHAPE, dtype=torch.bfloat16)


def run_peer(connection: Connection, name: str, epoch: int) -> None:
    """A worker "d": polls its transport and does what the test asks for."""
    torch.set_num_threads(1)
    pool = zero_pool()
    transport = create_transport(name, worker_id="d", epoch=epoch, pool=pool)
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

    def __init__(self, name: str, epoch: int = 1) -> None:
        context = multiprocessing.get_context("forkserver")  # fork without our threads
        context.set_forkserver_preload(["kv_transfer.transport.collective", "kv_transfer.transport.nixl"])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=run_peer, args=(theirs, name, epoch), daemon=True)
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


@pytest.fixture(params=["nccl", "nixl"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def peers(name: str) -> Iterator[Callable[..., Peer]]:
    started: list[Peer] = []

    def start(epoch: int = 1) -> Peer:
        started.append(Peer(name, epoch))
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.randn(NUM_BLOCKS, *BLOCK_SHAPE, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


@pytest.fixture
def transport(name: str, pool: torch.Tensor) -> Iterator[Transport]:
    transport = create_transport(name, worker_id="p", epoch=1, pool=pool)
    yield transport
    transport.close()


def poll_until(transport: Transport, condition: Callable[[], bool], bound_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + bound_s
    while not condition():
        transport.poll()
        assert time.monotonic() < deadline, f"condition not met within {bound_s} s"


def receive_some(transport: Transport) -> list[Notification]:
    deadline = time.monotonic() + DEADLINE_S
    while not (arrived := transport.poll()):
        assert time.monotonic() < deadline, f"no notification within {DEADLINE_S} s"
    return arrived


def states(transfers: list[Transfer]) -> set[TransferState]:
    return {transfer.state for transfer in transfers}


def test_blocks_and_notifications_cross_processes(
    peers: Callable[..., Peer], pool: torch.Tensor, transport: Transport
) -> None:
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


def test_reads_cross_processes_beside_writes(
    peers: Callable[..., Peer], pool: torch.Tensor, transport: Transport
) -> None:
    peer = peers()
    assert peer.ask("fill", 3.0)
    transport.add_peer("d", 1, peer.metadata)
    reads = [transport.read_blocks("d", [16 + i, 8 + i], [i, 8 + i]) for i in range(8)]
    write = transport.write_blocks("d", [20, 21], [0, 1], b"beside")
    poll_until(transport, lambda: all(transfer.is_settled for transfer in [*reads, write]))
    assert states([*reads, write]) == {TransferState.DONE}
    assert bool((pool[:16] == 3.0).all())
    assert not bool((pool[16:] == 3.0).all())
    assert torch.equal(torch.from_numpy(peer.ask("block", 1)), pool[21].float())
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
    reads = [transport.read_blocks("d", [i], [i]) for i in range(8)]  # nixl: nothing of the peer is needed for them
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


def test_a_receiver_killed_in_mid_use_is_lost_within_a_bound(peers: Callable[..., Peer], transport: Transport) -> None:
    peer = peers()
    transport.add_peer("d", 1, peer.metadata)
    first = transport.write_blocks("d", [0], [0])
    poll_until(transport, lambda: first.is_settled)

    peer.signal(signal.SIGSTOP)  # so that these writes are pending when it dies
    pending = [transport.write_blocks("d", [i], [i], b"never") for i in range(8)]
    peer.kill()
    poll_until(transport, lambda: all(transfer.is_settled for transfer in pending), LOSS_BOUND_S)
    assert pending[-1].state is TransferState.LOST
    with pytest.raises(PeerLost):
        transport.write_blocks("d", [0], [0])

    restarted = peers(epoch=2)
    transport.add_peer("d", 2, restarted.metadata)
    again = transport.write_blocks("d", [3], [4])
    poll_until(transport, lambda: again.is_settled)
    assert again.state is TransferState.DONE


def test_writing_to_a_peer_that_died_while_idle_is_lost(peers: Callable[..., Peer], transport: Transport) -> None:
    peer = peers()
    transport.add_peer("d", 1, peer.metadata)
    first = transport.write_blocks("d", [0], [0])
    poll_until(transport, lambda: first.is_settled)
    peer.kill()
    try:
        transfer = transport.write_blocks("d", [1], [1], b"never")
    except PeerLost:
        return
    poll_until(transport, lambda: transfer.is_settled, LOSS_BOUND_S)
    assert transfer.state is TransferState.LOST


def test_a_peer_that_died_before_it_was_ever_written_to_is_lost(
    peers: Callable[..., Peer], transport: Transport
) -> None:
    peer = peers()
    peer.kill()
    try:
        transport.add_peer("d", 1, peer.metadata)
        transfer = transport.write_blocks("d", [1], [1], b"never")
    except PeerLost:
        return
    poll_until(transport, lambda: transfer.is_settled, LOSS_BOUND_S)
    assert transfer.state is TransferState.LOST


def test_a_stopped_peer_can_be_removed_and_resumed(peers: Callable[..., Peer], transport: Transport) -> None:
    peer = peers()
    transport.add_peer("d", 1, peer.metadata)
    first = transport.write_blocks("d", [0], [0])
    poll_until(transport, lambda: first.is_settled)

    peer.signal(signal.SIGSTOP)
    pending = [transport.write_blocks("d", [i], [i], b"stale") for i in range(8)]
    started = time.monotonic()
    transport.remove_peer("d")
    assert time.monotonic() - started < 1.0
    assert all(transfer.is_settled for transfer in pending)
    assert pending[-1].state is TransferState.LOST

    peer.signal(signal.SIGCONT)
    transport.add_peer("d", 1, peer.metadata)
    again = transport.write_blocks("d", [5], [6], b"again")
    poll_until(transport, lambda: again.is_settled)
    assert again.state is TransferState.DONE


@pytest.mark.parametrize("count", [1, 200])
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
    peer = peers()
    transport.add_peer("d", 1, peer.metadata)
    first = transport.write_blocks("d", [0], [0])
    poll_until(transport, lambda: first.is_settled)
    peer.signal(signal.SIGSTOP)
    pending = [transport.write_blocks("d", [i], [i], b"never") for i in range(8)]
    started = time.monotonic()
    transport.close()
    assert time.monotonic() - started < 2.0
    assert all(transfer.is_settled for transfer in pending)
