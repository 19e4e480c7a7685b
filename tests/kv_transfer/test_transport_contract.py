"""The contract of transports: the same tests for each of them."""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq
from zmq.constants import PollEvent

from tandem.kv_transfer.transport import base
from tandem.kv_transfer.transport.base import Notification, Transfer, TransferState, Transport, block_runs
from tandem.kv_transfer.transport.factory import create_transport
from tandem.kv_transfer.transport.in_process import InProcessHub
from tandem.protocol.errors import ConfigError, IncompatiblePeer, PeerLost, TransferError

ONE_MACHINE = "nixl on one machine"  # without a port of UCX
TRANSPORTS = ["in_process", "nccl", "nixl", ONE_MACHINE]
DEADLINE_S = 20.0


class Network:
    """Makes transports of one kind and closes them at the end of the test."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.hub = InProcessHub()
        self.stack = ExitStack()

    def make(self, worker_id: str, pool: torch.Tensor | Sequence[torch.Tensor], epoch: int = 1) -> Transport:
        name, mailbox = self.name, ""
        if name == ONE_MACHINE:
            name, mailbox = "nixl", f"ipc://{self.folder}/{worker_id}-{epoch}"
        transport = create_transport(name, worker_id=worker_id, epoch=epoch, pool=pool, hub=self.hub, mailbox=mailbox)
        self.stack.callback(transport.close)
        return transport

    def link(
        self, sender_pool: torch.Tensor | Sequence[torch.Tensor], receiver_pool: torch.Tensor | Sequence[torch.Tensor]
    ) -> tuple[Transport, Transport]:
        """A sender "p" and a receiver "d", each knowing the other."""
        sender, receiver = self.make("p", sender_pool), self.make("d", receiver_pool)
        sender.add_peer("d", 1, receiver.local_metadata())
        receiver.add_peer("p", 1, sender.local_metadata())
        return sender, receiver


@pytest.fixture(params=TRANSPORTS)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:  # a short one: the path of a socket has 107 bytes at most
        yield from _network(request.param, Path(folder))


def _network(name: str, folder: Path) -> Iterator[Network]:
    network = Network(name, folder)
    with network.stack:
        yield network


def random_pool(num_blocks: int = 8, block_shape: tuple[int, ...] = (3, 2, 4), seed: int = 0) -> torch.Tensor:
    return torch.randn(num_blocks, *block_shape, generator=torch.Generator().manual_seed(seed))


def settle(transfers: list[Transfer], *transports: Transport) -> None:
    """Poll all transports until the transfers are settled; notifications that arrive meanwhile are dropped."""
    deadline = time.monotonic() + DEADLINE_S
    while not all(transfer.is_settled for transfer in transfers):
        for transport in transports:
            transport.poll()
        assert time.monotonic() < deadline, f"not settled within {DEADLINE_S} s"


def receive(count: int, receiver: Transport, *others: Transport) -> list[Notification]:
    """Poll until `receiver` has got this many notifications."""
    arrived: list[Notification] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(arrived) < count:
        for other in others:
            other.poll()
        arrived += receiver.poll()
        assert time.monotonic() < deadline, f"{len(arrived)} of {count} notifications arrived"
    return arrived


SHAPES = [
    (torch.int8, (1,)),
    (torch.float8_e4m3fn, (3, 2, 2, 4, 8)),
    (torch.float32, (3, 2, 16, 1, 5)),
    (torch.bfloat16, (30, 2, 16, 3, 64)),
]
OTHER_SHAPES = itertools.product([torch.bfloat16, torch.float32, torch.int8], [shape for _, shape in SHAPES])
every_shape = pytest.mark.parametrize(
    ("dtype", "block_shape"),
    [*SHAPES, *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHER_SHAPES if one not in SHAPES)],
    ids=str,
)


@every_shape
@pytest.mark.parametrize("is_read", [False, True], ids=["write", "read"])
def test_bytes_arrive_exactly_and_only_in_the_named_blocks(
    network: Network, dtype: torch.dtype, block_shape: tuple[int, ...], is_read: bool
) -> None:
    ours = random_pool(6, block_shape, seed=1).mul(50).to(dtype)
    theirs = random_pool(9, block_shape, seed=2).mul(50).to(dtype)
    source, target = (theirs, ours) if is_read else (ours, theirs)
    from_ids, to_ids = ([3, 7, 8, 3], [5, 0, 1, 2]) if is_read else ([2, 5, 4], [7, 0, 3])
    expected, unchanged = target.clone(), source.clone()
    expected[to_ids] = source[from_ids]
    near, far = network.link(ours, theirs)
    transfer = (near.read_blocks if is_read else near.write_blocks)("d", from_ids, to_ids)
    assert transfer.state in (TransferState.PENDING, TransferState.DONE)
    settle([transfer], near, far)
    assert transfer.state is TransferState.DONE
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(source.view(torch.uint8), unchanged.view(torch.uint8))
    assert far.poll() == []


def test_the_notification_comes_after_the_bytes(network: Network) -> None:
    source, target = torch.ones(4, 90_000), torch.zeros(4, 90_000)
    sender, receiver = network.link(source, target)
    for turn in range(20):
        source.fill_(turn + 1)
        transfer = sender.write_blocks("d", [0, 1, 2, 3], [3, 2, 1, 0], b"%d" % turn)
        assert receive(1, receiver, sender) == [Notification("p", 1, b"%d" % turn)]
        assert bool((target == turn + 1).all())
        settle([transfer], sender, receiver)
        assert transfer.state is TransferState.DONE


def test_who_waits_for_the_waker_polls_only_when_there_is_something_to_do(network: Network) -> None:
    sender, receiver = network.link(random_pool(), random_pool())
    sender.write_blocks("d", [0], [0], b"the link is up")
    receive(1, receiver, sender)
    if network.name == "nixl":
        assert sender.waker is None
        return
    poller = zmq.Poller()
    for transport in (sender, receiver):
        poller.register(transport.waker, PollEvent.POLLIN)
    for _ in range(20):
        transfer, arrived = sender.write_blocks("d", [0, 1], [3, 2], b"written"), list[Notification]()
        while not (arrived and transfer.is_settled):
            assert poller.poll(1e3 * DEADLINE_S), "nothing woke us"
            arrived += receiver.poll()
            sender.poll()
        receiver.poll()
        assert not poller.poll(0), "a loop that waits for it would never rest"


def test_notifications_keep_the_order_of_writes(network: Network) -> None:
    sender, receiver = network.link(random_pool(), random_pool())
    for number in range(200):
        blocks = [] if number % 3 == 0 else [number % 8]
        sender.write_blocks("d", blocks, blocks, b"%d" % number)
    arrived = receive(200, receiver, sender)
    assert [notification.payload for notification in arrived] == [b"%d" % number for number in range(200)]
    assert receiver.poll() == []


def test_an_empty_notification_is_not_sent(network: Network) -> None:
    sender, receiver = network.link(random_pool(), random_pool())
    sender.write_blocks("d", [1], [1])
    sender.write_blocks("d", [], [], b"last")
    assert receive(1, receiver, sender) == [Notification("p", 1, b"last")]


def test_a_large_notification_arrives_whole(network: Network) -> None:
    sender, receiver = network.link(random_pool(), random_pool())
    payload = bytes(range(256)) * 400
    sender.write_blocks("d", [0], [0], b"before")
    sender.write_blocks("d", [0], [0], payload)
    sender.write_blocks("d", [0], [0], b"after")
    assert [notification.payload for notification in receive(3, receiver, sender)] == [b"before", payload, b"after"]


BAD_IDS: list[tuple[list[int], list[int]]] = [
    *(([8], [0]), ([0], [8]), ([-1], [0]), ([0], [-1])),
    *(([0, 1], [0]), ([], [0]), ([0, 1], [2, 2])),
]


def test_bad_block_ids_raise_and_copy_nothing(network: Network) -> None:
    ours, theirs = random_pool(), random_pool(seed=6)
    before = ours.clone(), theirs.clone()
    near, far = network.link(ours, theirs)
    for from_ids, to_ids in BAD_IDS:
        with pytest.raises(TransferError, match=r"do not pair|leave the pool|names a remote block twice"):
            near.write_blocks("d", from_ids, to_ids, b"never")
        with pytest.raises(TransferError, match=r"do not pair|leave the pool|names a local block twice"):
            near.read_blocks("d", from_ids, to_ids)
    settle([near.read_blocks("d", [], [])], near, far)
    near.write_blocks("d", [], [], b"next")
    assert receive(1, far, near) == [Notification("p", 1, b"next")]
    assert torch.equal(ours, before[0])
    assert torch.equal(theirs, before[1])


@pytest.mark.parametrize(
    ("num_shards", "is_read"),
    [
        *(((2, 2), False), ((1, 2), True), ((2, 1), False), ((4, 2), True), ((3, 2), False)),
        *(pytest.param((1, 2), False, marks=pytest.mark.slow), pytest.param((2, 1), True, marks=pytest.mark.slow)),
        *(pytest.param((3, 2), True, marks=pytest.mark.slow), pytest.param((4, 2), False, marks=pytest.mark.slow)),
    ],
    ids=str,
)
def test_blocks_cross_between_pools_of_any_shards(network: Network, num_shards: tuple[int, int], is_read: bool) -> None:
    """A block has the same bytes for any number of shards, whichever they are on either side."""
    source, target = (random_pool(count, (12, 2, 5), seed=seed).to(torch.bfloat16) for count, seed in ((11, 1), (9, 2)))
    ours, theirs = [4, 5, 6, 0, 10, 9], [0, 1, 2, 8, 5, 4]
    expected, ours_before = target.clone(), source.clone()
    expected[theirs] = source[ours]
    pools = zip((source, target), num_shards, strict=True)
    shards = [[part.contiguous() for part in pool.chunk(number, dim=1)] for pool, number in pools]
    sender, receiver = network.link(*shards)
    transfer = receiver.read_blocks("p", ours, theirs) if is_read else sender.write_blocks("d", ours, theirs, b"all")
    settle([transfer], sender, receiver)
    assert transfer.state is TransferState.DONE
    assert transfer.num_bytes == 6 * 12 * 2 * 5 * 2
    assert torch.equal(torch.cat(shards[1], dim=1), expected)
    assert torch.equal(torch.cat(shards[0], dim=1), ours_before)


def test_reads_and_writes_of_both_sides_at_once(network: Network) -> None:
    left, right = random_pool(96, seed=8), random_pool(96, seed=9)
    expected_left, expected_right = left.clone(), right.clone()
    expected_left[32:64], expected_left[64:] = right[:32], right[:32].flip(0)
    expected_right[32:64], expected_right[64:] = left[:32], left[:32].flip(0)
    sender, receiver = network.link(left, right)
    transfers = []
    for block in range(32):
        for transport, peer in ((sender, "d"), (receiver, "p")):
            transfers.append(transport.read_blocks(peer, [block], [32 + block]))
            transfers.append(transport.write_blocks(peer, [block], [95 - block]))
    settle(transfers, sender, receiver)
    assert {transfer.state for transfer in transfers} == {TransferState.DONE}
    assert torch.equal(left, expected_left)
    assert torch.equal(right, expected_right)


@pytest.mark.parametrize("is_read", [False, True], ids=["write", "read"])
def test_removing_a_peer_loses_transfers_that_are_not_done(network: Network, is_read: bool) -> None:
    ours = random_pool()
    near, far = network.link(ours, random_pool(seed=1))
    settle([near.read_blocks("d", [0], [0])], near, far)
    transfer = (near.read_blocks if is_read else near.write_blocks)("d", [1], [1])
    near.remove_peer("d")
    assert transfer.state in (TransferState.LOST, TransferState.DONE)
    now = ours.clone()
    far.poll()
    assert torch.equal(ours, now)  # no byte of a lost read lands


def test_a_settled_transfer_knows_its_bytes_and_seconds(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver = network.link(random_pool(), random_pool())
    readings = itertools.count(1.0)
    monkeypatch.setattr(base, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    transfers = [sender.write_blocks("d", [0, 1], [2, 3], b"x" * 1000), sender.read_blocks("d", [0], [5])]
    transfers += [sender.write_blocks("d", [], [], b"y")]
    settle(transfers, sender, receiver)
    assert [transfer.num_bytes for transfer in transfers] == [192, 96, 0]
    seconds = [transfer.seconds for transfer in transfers if transfer.seconds is not None]
    assert len(seconds) == 3
    assert min(seconds) > 0.0
    assert sum(seconds) < next(readings)  # each second of the link belongs to one transfer


def test_a_removed_peer_is_unknown_and_can_be_added_again(network: Network) -> None:
    target = torch.zeros(8, 3, 2, 4)
    source = random_pool(seed=7)
    sender, receiver = network.link(source, target)
    sender.write_blocks("d", [0], [0], b"first")
    assert receive(1, receiver, sender) == [Notification("p", 1, b"first")]
    sender.remove_peer("d")
    sender.remove_peer("d")
    with pytest.raises(PeerLost):
        sender.write_blocks("d", [1], [1])
    sender.add_peer("d", 1, receiver.local_metadata())
    sender.write_blocks("d", [1], [1], b"second")
    assert receive(1, receiver, sender) == [Notification("p", 1, b"second")]
    assert torch.equal(target[:2], source[:2])


def test_notifications_go_on_after_the_sender_is_removed_and_added(network: Network) -> None:
    sender, receiver = network.link(random_pool(), random_pool())
    sender.write_blocks("d", [0], [0], b"before")
    assert receive(1, receiver, sender) == [Notification("p", 1, b"before")]
    receiver.remove_peer("p")
    sender.write_blocks("d", [0], [0], b"between")
    assert receive(1, receiver, sender) == [Notification("p", 1, b"between")]
    receiver.add_peer("p", 1, sender.local_metadata())
    sender.write_blocks("d", [0], [0], b"after")
    assert receive(1, receiver, sender) == [Notification("p", 1, b"after")]


def test_adding_a_known_peer_again_changes_nothing(network: Network) -> None:
    sender, receiver = network.link(random_pool(), random_pool())
    transfer = sender.write_blocks("d", [0], [0], b"a")
    sender.add_peer("d", 1, receiver.local_metadata())
    sender.write_blocks("d", [0], [0], b"b")
    assert [notification.payload for notification in receive(2, receiver, sender)] == [b"a", b"b"]
    settle([transfer], sender, receiver)
    assert transfer.state is TransferState.DONE


def test_a_new_epoch_replaces_the_old_peer(network: Network) -> None:
    source, old_target, new_target = random_pool(), torch.zeros(8, 3, 2, 4), torch.zeros(8, 3, 2, 4)
    sender, receiver = network.link(source, old_target)
    settle([sender.write_blocks("d", [0], [0])], sender, receiver)
    receiver.close()
    old_target.zero_()
    restarted = network.make("d", new_target, epoch=2)
    sender.add_peer("d", 2, restarted.local_metadata())
    sender.write_blocks("d", [4], [5], b"hello")
    assert receive(1, restarted, sender) == [Notification("p", 1, b"hello")]
    assert torch.equal(new_target[5], source[4])
    assert not old_target.any()


def test_what_was_lost_lands_no_more_once_the_transport_says_so(network: Network) -> None:
    source, target = torch.ones(64, 90_000), torch.zeros(64, 90_000)
    sender, receiver = network.link(source, target)
    settle([sender.write_blocks("d", [0], [0])], sender, receiver)  # the link is up
    blocks = list(range(64))
    writes = [sender.write_blocks("d", blocks, blocks) for _ in range(4)]
    sender.remove_peer("d")
    assert all(write.is_settled for write in writes)
    sender.add_peer("d", 1, receiver.local_metadata())
    deadline = time.monotonic() + (1.0 if network.name == "nixl" else DEADLINE_S)
    while not sender.is_quiet("d") and time.monotonic() < deadline:
        receiver.poll()
        sender.poll()
    assert sender.is_quiet("d") is (network.name != "nixl"), "NIXL cannot know what becomes of what it gave up"
    if network.name != "nixl":
        target.fill_(5.0)
        for _ in range(200):
            receiver.poll()
            sender.poll()
        assert bool((target == 5.0).all())
    settle([sender.write_blocks("d", [1], [1])], sender, receiver)
    assert bool((target[1] == 1.0).all())


def test_another_block_size_is_refused(network: Network) -> None:
    sender, receiver = network.make("p", random_pool()), network.make("d", random_pool(block_shape=(5,)))
    with pytest.raises(IncompatiblePeer, match=r"block_bytes: 96 here, 20 at d"):
        sender.add_peer("d", 1, receiver.local_metadata())


@pytest.mark.parametrize("metadata", [b"", b"garbage", b"\x90"])
def test_unreadable_metadata_is_refused(network: Network, metadata: bytes) -> None:
    with pytest.raises(TransferError, match="metadata cannot be read"):
        network.make("p", random_pool()).add_peer("d", 1, metadata)


def test_metadata_of_another_worker_or_epoch_is_refused(network: Network) -> None:
    sender, receiver = network.make("p", random_pool()), network.make("d", random_pool())
    for worker_id, epoch in (("d", 2), ("e", 1)):
        with pytest.raises(TransferError):
            sender.add_peer(worker_id, epoch, receiver.local_metadata())
        with pytest.raises(PeerLost):
            sender.write_blocks(worker_id, [], [], b"x")


def test_close_twice_is_fine_and_ends_everything(network: Network) -> None:
    sender, receiver = network.link(random_pool(), random_pool())
    settle([sender.write_blocks("d", [0], [0])], sender, receiver)
    for transport in (sender, receiver, sender, receiver):
        transport.close()
    assert sender.poll() == []
    with pytest.raises(PeerLost):
        sender.write_blocks("d", [0], [0])
    with pytest.raises(PeerLost):
        sender.add_peer("d", 1, receiver.local_metadata() if network.name == "in_process" else b"")


@pytest.mark.parametrize("pool", [torch.zeros(4), torch.zeros(0, 3), torch.zeros(4, 6)[:, ::2]], ids=str)
def test_a_pool_without_contiguous_blocks_is_refused(network: Network, pool: torch.Tensor) -> None:
    with pytest.raises(TransferError, match="contiguous"):
        network.make("p", pool)


def test_an_unknown_transport_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"transport=.pigeon.: .pigeon. is unknown; choose one of nccl, nixl"):
        create_transport("pigeon", worker_id="p", epoch=1, pool=random_pool())


def test_runs_name_the_same_pairs_of_blocks() -> None:
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        num_blocks = rng.randrange(1, 30)
        local, remote = rng.sample(range(30), num_blocks), rng.sample(range(30), num_blocks)
        runs = block_runs(local, remote)
        pairs = [(run.local + i, run.remote + i) for run in runs for i in range(run.num_blocks)]
        assert pairs == sorted(zip(local, remote, strict=True))
        for one, other in itertools.pairwise(runs):  # none could be longer
            assert (other.local, other.remote) != (one.local + one.num_blocks, one.remote + one.num_blocks)
