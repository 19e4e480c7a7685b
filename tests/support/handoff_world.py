"""A world of one receiver and two senders over unreliable links, for random exploration of leases and outbox.

Memory is modelled block by block: a write in flight may land at any time until it settled or its sender died. Every
landing checks that its block is still lent to that write, and all received blocks are compared with the sent ones.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.kv_transfer.leases import LeaseFenced, LeaseReceived, LeaseReleased, LeaseTable
from tandem.kv_transfer.outbox import HandoffEnded, LeaseEnded, Outbox
from tandem.kv_transfer.outgoing_handoff import BlockWrite
from tandem.kv_transfer.transport.base import TransferState
from tandem.protocol.messages import ChunkArrived, HandoffDone, WorkerEpoch

NUM_BLOCKS = 12
TTL_S = 10.0

Content = tuple[str, int, int]  # request id, generation, index in the prompt


@dataclass(eq=False)
class Flying:
    """A write that the transport has not settled yet."""

    write: BlockWrite
    missing: list[int]  # positions that have not landed


@dataclass(eq=False)
class Sender:
    worker_id: str
    epoch: int = 1
    outbox: Outbox = field(default_factory=Outbox)
    flying: deque[Flying] = field(default_factory=deque)
    stray: list[tuple[BlockWrite, int]] = field(default_factory=list)  # lost positions that may still land
    pinned: set[int] = field(default_factory=set)  # handoffs whose local blocks are pinned
    is_link_up: bool = True

    @property
    def process(self) -> WorkerEpoch:
        return WorkerEpoch(self.worker_id, self.epoch)


class World:
    """All state, and one method per event. `pick(n)` chooses a number below n."""

    def __init__(self, pick: Callable[[int], int]) -> None:
        self.pick = pick
        self.now = 0.0
        self.num_requests = 0
        self.receiver = WorkerEpoch("d", 0)
        self.senders = [Sender("p0"), Sender("p1")]
        self.zombies: list[Sender] = []  # given up, but running on until they are known to be gone
        self.control: list[Callable[[], None]] = []  # messages in flight; they may be lost, repeated and reordered
        self.num_received = 0
        self.num_released = 0
        self._start_receiver()

    def _start_receiver(self) -> None:
        self.receiver = WorkerEpoch("d", self.receiver.epoch + 1)
        self.leases = LeaseTable(first_generation=self.receiver.epoch * 100_000)
        self.free = set(range(NUM_BLOCKS))
        self.content: list[Content | None] = [None] * NUM_BLOCKS
        self.lent: dict[int, int] = {}  # block -> generation, the world's own account

    # Events.

    def new_request(self) -> None:
        """Both legs are dispatched; either may be lost."""
        sender = self.senders[self.pick(2)]
        num_blocks = 1 + self.pick(4)
        first_block = self.pick(num_blocks + 1)
        needed = num_blocks - first_block
        self.num_requests += 1
        request_id = f"r{self.num_requests}" if self.pick(4) else f"r{max(1, self.num_requests - 1)}"
        receiver = self.receiver
        if self.pick(8):
            sender.outbox.cancel(request_id, "placed again")
            sender.pinned.add(
                sender.outbox.open(request_id, receiver, num_blocks=num_blocks, grant_deadline=self.now + TTL_S)
            )
        if len(self.free) >= needed and self.pick(8):
            self._end(self.leases.cancel(request_id, "placed again"))
            blocks = [self.free.pop() for _ in range(needed)]
            lease = self.leases.grant(
                request_id,
                blocks,
                first_block=first_block,
                sender=sender.process,
                now=self.now,
                ttl_s=TTL_S,
            )
            for block in blocks:
                self.lent[block] = lease.generation
                self.content[block] = None
            self._send_to_sender(
                sender.process,
                lambda outbox: outbox.granted(
                    request_id,
                    receiver,
                    generation=lease.generation,
                    first_block=first_block,
                    block_ids=blocks,
                    ttl_s=TTL_S,
                    now=self.now,
                ),
            )

    def control_message(self) -> None:
        """One message arrives: out of order, perhaps twice, perhaps never."""
        if not self.control:
            return
        position, fate = self.pick(len(self.control)), self.pick(10)
        message = self.control[position] if fate == 0 else self.control.pop(position)
        if fate != 1:
            message()

    def compute(self) -> None:
        """A handoff's prefill computes more."""
        sender = self.senders[self.pick(2)]
        active = sender.outbox.active_handoffs
        if not active:
            return
        handoff = active[self.pick(len(active))]
        request_id = handoff.key.request_id
        others = [other.num_blocks for other in active if other.key.request_id == request_id]
        computed = min(len(handoff.local_block_ids) + 1 + self.pick(3), *others, handoff.num_blocks)
        sender.outbox.blocks_computed(request_id, list(range(computed)))
        if computed == handoff.num_blocks and self.pick(3):
            sender.outbox.first_token(request_id, 42)

    def submit(self) -> None:
        """A sender's step passes its writes to the transport."""
        self._submit(self.senders[self.pick(2)])

    def _submit(self, sender: Sender) -> None:
        for write in sender.outbox.next_writes():
            if sender.is_link_up and write.receiver == self.receiver:
                sender.flying.append(Flying(write, list(range(len(write.remote_block_ids)))))
            else:
                sender.outbox.write_settled(write, TransferState.FAILED)

    def land(self) -> None:
        """One block of a flying or lost write lands."""
        running = [*self.senders, *self.zombies]
        sender = running[self.pick(len(running))]
        if sender.stray and self.pick(8) == 0:  # lost bytes land late
            write, position = sender.stray.pop(self.pick(len(sender.stray)))
            self._land(write, position)
        elif sender.flying:
            flying = sender.flying[self.pick(len(sender.flying))]
            if flying.missing:
                self._land(flying.write, flying.missing.pop(self.pick(len(flying.missing))))

    def settle(self) -> None:
        """The oldest write of a link ends, well or not. Its notification may arrive twice or never."""
        sender = self.senders[self.pick(2)]
        if not sender.flying:
            return
        flying = sender.flying.popleft()
        if self.pick(30) == 0:
            sender.outbox.write_settled(flying.write, TransferState.FAILED)
            return
        if self.pick(60) == 0:
            sender.flying.appendleft(flying)
            self._lose_link(sender)
            return
        while flying.missing:
            self._land(flying.write, flying.missing.pop())
        sender.outbox.write_settled(flying.write, TransferState.DONE)
        for _ in range((1, 1, 1, 2, 0)[self.pick(5)]):
            self._notify(flying.write)

    def heal(self) -> None:
        """A link comes back, and its transport knows that none of its lost writes can land any more."""
        sender = self.senders[self.pick(2)]
        if not sender.is_link_up:
            self._heal(sender)

    def _heal(self, sender: Sender) -> None:
        for write, position in sender.stray:
            self._land(write, position)
        sender.stray.clear()
        sender.is_link_up = True
        sender.outbox.confirm_lost_writes(self.receiver)

    def heartbeat(self) -> None:
        sender = self.senders[self.pick(2)]
        self.leases.extend(sender.process, sender.outbox.heartbeat_handoffs, now=self.now)

    def time_passes(self) -> None:
        self.now += (0.5, 2.0, 6.0, 11.0)[self.pick(4)]

    def expire(self) -> None:
        for fenced in self.leases.expire(self.now):
            self._end(fenced)
        for sender in self.senders:
            sender.outbox.expire(self.now)

    def cancel(self) -> None:
        if self.num_requests:
            request_id = f"r{1 + self.pick(self.num_requests)}"
            if self.pick(2):
                self._end(self.leases.cancel(request_id))
            else:
                self.senders[self.pick(2)].outbox.cancel(request_id)

    def collect(self) -> None:
        """Both sides act on what has ended, and the receiver repeats its revocations."""
        for sender in self.senders:
            for ended in sender.outbox.take_ended():
                if isinstance(ended, HandoffEnded):
                    sender.pinned.remove(ended.handoff_id)
                else:
                    self._send_closed(sender, ended)
        for lease in self.leases.fenced:
            self._send_revoked(lease.sender, lease.request_id, lease.generation)

    def give_up_sender(self) -> None:
        """The process is reported dead and replaced. It may run on, because nothing has proved its end."""
        position = self.pick(2)
        old = self.senders[position]
        self.senders[position] = Sender(old.worker_id, old.epoch + 1)
        self.zombies.append(old)
        for fenced in self.leases.give_up_sender(old.process):
            self._end(fenced)

    def end_zombie(self) -> None:
        """The process is certainly gone, and the receiver learns of it: none of its writes lands from now on."""
        if self.zombies:
            zombie = self.zombies.pop(self.pick(len(self.zombies)))
            for released in self.leases.sender_lost(zombie.process):
                self._end(released)

    def kill_receiver(self) -> None:
        """The process and its memory are gone; a new epoch starts with a new pool."""
        old = self.receiver
        self._start_receiver()
        for sender in [*self.senders, *self.zombies]:
            flying, sender.flying = sender.flying, deque()
            for lost in flying:
                sender.outbox.write_settled(lost.write, TransferState.LOST)
            sender.stray.clear()
            sender.is_link_up = True
            sender.outbox.receiver_lost(old)

    def check(self) -> None:
        self.leases.check_integrity()
        for sender in self.senders:
            sender.outbox.check_integrity()
        held = self.leases.held_block_ids
        assert sorted([*self.free, *held]) == list(range(NUM_BLOCKS)), f"free {self.free}, held {held}"
        assert sorted(held) == sorted(self.lent), "table and world disagree on what is lent"

    def wind_down(self) -> None:
        """Everything in flight ends; then nothing may be left anywhere."""
        for sender in self.senders:
            if not sender.is_link_up and self.pick(2):
                self._heal(sender)
        while self.zombies:
            self.end_zombie()
        for _ in range(6):
            for sender in self.senders:
                self._submit(sender)
                while sender.flying:
                    flying = sender.flying.popleft()
                    for position in flying.missing:
                        self._land(flying.write, position)
                    sender.outbox.write_settled(flying.write, TransferState.DONE)
                    self._notify(flying.write)
            self.now += TTL_S + 1
            self.expire()
            self.collect()
            while self.control:
                self.control.pop(0)()
            self.check()
        for position, sender in enumerate(self.senders):
            if not sender.is_link_up:  # it has lost writes: only the end of the process makes its leases safe
                for released in self.leases.sender_lost(sender.process):
                    self._end(released)
                assert not sender.pinned, f"{sender.worker_id} keeps blocks pinned"
                self.senders[position] = Sender(sender.worker_id, sender.epoch + 1)
        for sender in self.senders:
            assert sender.outbox.num_open == 0, f"{sender.worker_id} has open handoffs"
            assert not sender.pinned, f"{sender.worker_id} keeps blocks pinned"
        assert self.free == set(range(NUM_BLOCKS)), f"leaked: {self.leases.held_block_ids}"
        self.check()

    # Effects of the events.

    def _land(self, write: BlockWrite, position: int) -> None:
        assert isinstance(write.notification, ChunkArrived)
        block, chunk = write.remote_block_ids[position], write.notification
        assert self.lent.get(block) == chunk.generation, (
            f"a write under {chunk.generation} lands in block {block} lent to {self.lent.get(block)}"
        )
        self.content[block] = (chunk.request_id, chunk.generation, write.local_block_ids[position])

    def _notify(self, write: BlockWrite) -> None:
        message = write.notification
        if isinstance(message, ChunkArrived):
            self.leases.chunk_arrived(
                message.request_id, message.generation, message.first_block, message.num_blocks, [], now=self.now
            )
        elif isinstance(message, HandoffDone):
            self._end(
                self.leases.handoff_done(message.request_id, message.generation, message.first_token_id, now=self.now)
            )

    def _end(self, end: LeaseReceived | LeaseReleased | LeaseFenced | None) -> None:
        """Act for the receiver on what its lease table returned."""
        if end is None:
            return
        lease = end.lease
        if isinstance(end, LeaseFenced):
            self._send_revoked(lease.sender, lease.request_id, lease.generation)
            return
        if isinstance(end, LeaseReceived) and not end.num_missing:
            self.num_received += 1
            expected = [
                (lease.request_id, lease.generation, lease.first_block + i) for i in range(len(lease.block_ids))
            ]
            assert [self.content[block] for block in lease.block_ids] == expected, "received what was not sent"
        else:
            self.num_released += 1
        for block in lease.block_ids:  # received blocks are used at once and then freed
            assert self.lent.pop(block) == lease.generation
            assert block not in self.free, f"block {block} is freed twice"
            self.free.add(block)

    def _lose_link(self, sender: Sender) -> None:
        """The link goes down; all writes in flight may land later."""
        sender.is_link_up = False
        while sender.flying:
            lost = sender.flying.popleft()
            sender.stray += [(lost.write, position) for position in lost.missing]
            sender.outbox.write_settled(lost.write, TransferState.LOST)

    def _send_to_sender(self, process: WorkerEpoch, deliver: Callable[[Outbox], None]) -> None:
        def arrive() -> None:
            for sender in self.senders:
                if sender.process == process:
                    deliver(sender.outbox)

        self.control.append(arrive)

    def _send_revoked(self, process: WorkerEpoch, request_id: str, generation: int) -> None:
        receiver = self.receiver
        self._send_to_sender(process, lambda outbox: outbox.revoked(request_id, receiver, generation))

    def _send_closed(self, sender: Sender, ended: LeaseEnded) -> None:
        process = sender.process

        def arrive() -> None:
            if ended.receiver == self.receiver:
                self._end(self.leases.lease_closed(ended.request_id, ended.generation, process, ended.reason))

        self.control.append(arrive)


def walk(seed: int, num_steps: int) -> World:
    """A world after a random walk, with everything still in flight."""
    source = random.Random(seed)
    world = World(source.randrange)
    steps = [
        world.new_request,
        world.control_message,
        world.compute,
        world.submit,
        world.land,
        world.settle,
        world.heartbeat,
        world.time_passes,
        world.expire,
        world.heal,
        world.cancel,
        world.collect,
        world.give_up_sender,
        world.end_zombie,
        world.kill_receiver,
    ]
    weights = [4, 20, 14, 14, 8, 16, 8, 1, 2, 0.5, 0.5, 4, 0.5, 0.5, 0.2]
    for step in source.choices(steps, weights, k=num_steps):
        step()
        world.check()
    return world
