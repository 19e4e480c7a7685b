"""Every interleaving of a small world: a real LeaseTable and a real Outbox under every fault, state by state.

The world is one request of a few blocks that may be granted and sent twice, a pool, a network and two processes that
may die. Breadth first, each state is expanded by everything that can happen in it: control messages are delivered in
any order, repeated or dropped; writes succeed, fail or are lost with their link and may land at any time after;
notifications are repeated or dropped; leases run out; either side cancels, dies and comes back. States are told apart
by a canonical snapshot with times relative to now, so the walk ends by itself. In a world with more of everything
random walks are taken instead.

That nothing leaks is checked for every state: from each, the quiet schedule (no more faults, everything under way
arrives, time passes, the dead are reported) has to lead to a world at rest.
"""

from __future__ import annotations

import functools
import gc
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kv_transfer.leases import LeaseFenced, LeaseReceived, LeaseReleased, LeaseTable
from tandem.kv_transfer.outbox import HandoffEnded, LeaseEnded, Outbox
from tandem.kv_transfer.outgoing_handoff import BlockWrite
from tandem.kv_transfer.transport.base import TransferState
from tandem.protocol.messages import ChunkArrived, WorkerEpoch

REQUEST = "r"
TTL_TICKS = 2  # a lease outlives one tick and a heartbeat in it
FIRST_TOKEN = 7

Snapshot = tuple[Any, ...]
_Cloned = TypeVar("_Cloned")


def receiver_of(epoch: int) -> WorkerEpoch:
    return WorkerEpoch("d", epoch)


def sender_of(epoch: int) -> WorkerEpoch:
    return WorkerEpoch("p", epoch)


class Broken(Exception):
    """An invariant does not hold; the message says which."""


def require(condition: bool, claim: str) -> None:
    if not condition:
        raise Broken(claim)


class Message(NamedTuple):
    """A control message: to the receiver `closed` and `beat`, to the sender `queued`, `grant` and `revoked`."""

    kind: str
    sender_epoch: int
    receiver_epoch: int
    generation: int
    block_ids: tuple[int, ...] = ()


class Stray(NamedTuple):
    """A block of a lost write, which may land at any time while its sender lives."""

    generation: int
    block_id: int


class Bounds(NamedTuple):
    """The size of the world: each number is a budget."""

    num_blocks: int = 1  # of the prompt
    num_pool_blocks: int = 1
    queues: int = 0  # times the receiver says that the request is in line
    grants: int = 2
    opens: int = 2
    cancels: int = 1  # on either side
    sender_deaths: int = 1
    receiver_deaths: int = 1
    give_ups: int = 0  # times the receiver gives up a sender that runs on
    repeats: int = 1  # of control messages and notifications
    can_vouch: bool = True  # the transport knows when nothing that was lost can land any more


@dataclass(eq=False)
class World:
    """All state. `actions` names all events; the first of them belongs to the quiet schedule.

    NOTE: `snapshot` reads private state of both objects: a model checker has to tell all their states apart.
    """

    bounds: Bounds
    table_type: type[LeaseTable] = LeaseTable
    outbox_type: type[Outbox] = Outbox
    now: int = 0
    sender_epoch: int = 1
    receiver_epoch: int = 1
    network: frozenset[Message] = frozenset()
    writes: deque[BlockWrite] = field(default_factory=deque)  # on the link, oldest first
    notifications: deque[Any] = field(default_factory=deque)  # of writes that are done, in order
    strays: frozenset[Stray] = frozenset()
    is_link_up: bool = True
    is_sender_death_known: bool = True
    is_receiver_death_known: bool = True
    used: dict[str, int] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    lent: dict[int, int] = field(default_factory=dict)  # block -> generation, the world's own account
    content: dict[int, tuple[int, int]] = field(default_factory=dict)  # lent block -> (generation, index) that landed
    last_generation: int = 0
    num_received: int = 0
    vouched_until: int = 0  # by the latest word of the receiver that the handoff is in line

    def __post_init__(self) -> None:
        self.outbox = self.outbox_type()
        self._start_receiver()

    def _start_receiver(self) -> None:
        self.table = self.table_type(first_generation=self.receiver_epoch * 10)
        self.free = set(range(self.bounds.num_pool_blocks))
        self.lent.clear()
        self.content.clear()

    # What can happen.

    def actions(self) -> list[tuple[str, Callable[[World], None]]]:
        """All events that can happen now. The quiet schedule takes the first; faults and clients come after it."""
        return [*self.calm_actions(), *self.fault_actions()]

    def calm_actions(self) -> list[tuple[str, Callable[[World], None]]]:
        """Those without a fault."""
        return [*self._quiet_actions(), *self._client_actions()]

    def _quiet_actions(self) -> list[tuple[str, Callable[[World], None]]]:
        actions: list[tuple[str, Callable[[World], None]]] = []
        for message in sorted(self.network):
            actions.append((f"deliver {message}", lambda world, message=message: world.deliver(message, keep=False)))
        if self.notifications:
            actions.append(("notify", lambda world: world.notify(keep=False)))
        if self.writes:
            actions.append(("write done", World.write_done))
        if not self.is_sender_death_known:
            actions.append(("receiver learns of the sender's death", World.tell_receiver))
        if not self.is_receiver_death_known:
            actions.append(("sender learns of the receiver's death", World.tell_sender))
        actions.append(("sender submits", World.submit))
        if self.bounds.can_vouch and self.strays:
            actions.append(("strays land", World.land_strays))
        elif self.bounds.can_vouch and self.outbox.receivers_with_lost_writes:
            actions.append(("nothing lost can land", World.confirm_lost_writes))
        elif (
            any(lease.sender.epoch == self.sender_epoch for lease in self.table.fenced)
            and self.outbox.receivers_with_lost_writes
            and self.is_sender_death_known
        ):
            actions.append(("sender with a lost write is restarted", World.kill_sender))
        actions.append(("receiver pumps", World.pump_receiver))
        if self.table.num_live or self.outbox.num_open or self.outbox._early_grants:
            actions.append(("tick", World.tick))
        return actions

    def _client_actions(self) -> list[tuple[str, Callable[[World], None]]]:
        actions: list[tuple[str, Callable[[World], None]]] = []
        active = next(iter(self.outbox.active_handoffs), None)
        if self._may("opens") and not self._is_active(self.receiver_epoch):
            actions.append(("sender opens", World.open))
        room = len(self.free) >= self.bounds.num_blocks
        if self._may("queues") and self.table.num_live == 0:
            actions.append(("receiver says that it is in line", World.say_queued))
        if self._may("grants") and room and self.table.num_live == 0:
            actions.append(("receiver grants", World.grant))
        if active is not None and len(active.local_block_ids) < active.num_blocks:
            actions.append(("block computed", World.compute))
        elif active is not None and not active.first_token_ids:
            actions.append(("first token", lambda world: world.outbox.first_tokens(REQUEST, (FIRST_TOKEN,))))
        if self.outbox.heartbeat_handoffs:
            actions.append(("heartbeat", World.heartbeat))
        if self._may("cancels") and active is not None:
            actions.append(("sender cancels", World.cancel_at_sender))
        if self._may("cancels") and self.table.num_live:
            actions.append(("receiver cancels", World.cancel_at_receiver))
        return actions

    def fault_actions(self) -> list[tuple[str, Callable[[World], None]]]:
        actions: list[tuple[str, Callable[[World], None]]] = []
        for message in sorted(self.network):
            actions.append((f"drop {message}", lambda world, message=message: world.drop(message)))
            if self._may("repeats"):
                actions.append(
                    (f"deliver and repeat {message}", lambda world, message=message: world.deliver(message, keep=True))
                )
        if self.notifications:
            actions.append(("notification dropped", lambda world: world.notifications.popleft()))
            if self._may("repeats"):
                actions.append(("notification repeated", lambda world: world.notify(keep=True)))
        if self.writes:
            actions.append(("write fails", World.write_failed))
            actions.append(("link is lost", World.lose_link))
        if not self.is_link_up:
            actions.append(("link is back", World.restore_link))
        if self._may("sender_deaths") and self.is_sender_death_known:
            actions.append(("sender dies", World.kill_sender))
        if self._may("give_ups") and self.is_sender_death_known:
            actions.append(("sender is given up", World.give_up_sender))
        if self._may("receiver_deaths") and self.is_receiver_death_known:
            actions.append(("receiver dies", World.kill_receiver))
        return actions

    def _may(self, budget: str) -> bool:
        return self.used.get(budget, 0) < getattr(self.bounds, budget)

    def _is_active(self, receiver_epoch: int) -> bool:
        key = (REQUEST, receiver_of(receiver_epoch))
        return any(handoff.key == key for handoff in self.outbox.active_handoffs)

    def _use(self, budget: str) -> None:
        self.used[budget] = self.used.get(budget, 0) + 1

    # How it happens.

    def open(self) -> None:
        self._use("opens")
        handoff = self.outbox.open(
            REQUEST,
            receiver_of(self.receiver_epoch),
            num_blocks=self.bounds.num_blocks,
            grant_deadline=self.now + TTL_TICKS,
        )
        self.pinned.add(handoff)
        self.vouched_until = 0

    def say_queued(self) -> None:
        self._use("queues")
        self._send(Message("queued", self.sender_epoch, self.receiver_epoch, 0))

    def grant(self) -> None:
        self._use("grants")
        blocks = sorted(self.free)[: self.bounds.num_blocks]
        self.free -= set(blocks)
        lease = self.table.grant(
            REQUEST,
            blocks,
            first_block=0,
            sender=sender_of(self.sender_epoch if self.is_sender_death_known else self.sender_epoch - 1),
            now=self.now,
            ttl_s=TTL_TICKS,
        )
        require(lease.generation > self.last_generation, f"generation {lease.generation} is used again")
        self.last_generation = lease.generation
        self.lent |= dict.fromkeys(blocks, lease.generation)
        self._send(Message("grant", lease.sender.epoch, self.receiver_epoch, lease.generation, lease.block_ids))

    def compute(self) -> None:
        handoff = self.outbox.active_handoffs[0]
        num_final = len(handoff.local_block_ids) + 1
        self.outbox.blocks_computed(REQUEST, list(range(num_final)), num_final)

    def heartbeat(self) -> None:
        for _, generation in self.outbox.heartbeat_handoffs:
            self._send(Message("beat", self.sender_epoch, self.receiver_epoch, generation))

    def cancel_at_sender(self) -> None:
        self._use("cancels")
        self.outbox.cancel(REQUEST)

    def cancel_at_receiver(self) -> None:
        self._use("cancels")
        self._end(self.table.cancel(REQUEST))

    def tick(self) -> None:
        self.now += 1

    def pump_receiver(self) -> None:
        for ended in self.table.expire(self.now):
            self._end(ended)
        for lease in self.table.fenced:
            self._send(Message("revoked", lease.sender.epoch, self.receiver_epoch, lease.generation))

    def submit(self) -> None:
        for write in self.outbox.next_writes():
            if self.is_link_up and write.receiver.epoch == self.receiver_epoch:
                self._check_target(write)
                self.writes.append(write)
            else:
                self.outbox.write_settled(write, TransferState.FAILED)

    def collect(self) -> None:
        """Act for the sender on what has ended. This follows every step, because it waits for nothing."""
        self.outbox.expire(self.now)
        for ended in self.outbox.take_ended():
            if isinstance(ended, HandoffEnded):
                is_late = "no word" in ended.reason
                require(not is_late or self.now >= self.vouched_until, "a handoff that is in line fails as late")
                self.pinned.remove(ended.handoff_id)
                require(ended.handoff_id not in self._flying_handoffs(), "blocks are unpinned under a write")
            elif isinstance(ended, LeaseEnded):
                self._send(Message("closed", self.sender_epoch, ended.receiver.epoch, ended.generation))

    def write_done(self) -> None:
        write = self.writes.popleft()
        self._check_target(write)
        if isinstance(write.notification, ChunkArrived):
            for block, index in zip(write.remote_block_ids, write.local_block_ids, strict=True):
                self.content[block] = (write.notification.generation, index)
        self.notifications.append(write.notification)
        self.outbox.write_settled(write, TransferState.DONE)

    def write_failed(self) -> None:
        self.outbox.write_settled(self.writes.popleft(), TransferState.FAILED)

    def lose_link(self) -> None:
        """All writes of the link are lost, and their blocks may land at any time."""
        self.is_link_up = False
        while self.writes:
            write = self.writes.popleft()
            generation = write.notification.generation
            self.strays |= {Stray(generation, block) for block in write.remote_block_ids}
            self.outbox.write_settled(write, TransferState.LOST)

    def land_strays(self) -> None:
        for stray in self.strays:
            lent = self.lent.get(stray.block_id)
            require(lent == stray.generation, f"a lost write of {stray.generation} lands in {stray.block_id} of {lent}")
        self.strays = frozenset()

    def confirm_lost_writes(self) -> None:
        for receiver in self.outbox.receivers_with_lost_writes:
            self.outbox.confirm_lost_writes(receiver)

    def restore_link(self) -> None:
        self.is_link_up = True

    def notify(self, *, keep: bool) -> None:
        message = self.notifications[0]
        if keep:
            self._use("repeats")
        else:
            self.notifications.popleft()
        if isinstance(message, ChunkArrived):
            self.table.chunk_arrived(
                REQUEST, message.generation, message.first_block, message.num_blocks, [], now=self.now
            )
        else:
            self._end(self.table.handoff_done(REQUEST, message.generation, message.first_token_ids, now=self.now))

    def drop(self, message: Message) -> None:
        self.network -= {message}

    def deliver(self, message: Message, *, keep: bool) -> None:
        if keep:
            self._use("repeats")
        else:
            self.network -= {message}
        if message.kind in ("queued", "grant", "revoked"):
            self._deliver_to_sender(message)
        else:
            self._deliver_to_receiver(message)

    def _deliver_to_sender(self, message: Message) -> None:
        if message.sender_epoch != self.sender_epoch:
            return
        if message.kind == "queued":
            deadline = self.now + TTL_TICKS
            if self._is_active(message.receiver_epoch):
                self.vouched_until = deadline
            self.outbox.queued(REQUEST, receiver_of(message.receiver_epoch), grant_deadline=deadline)
        elif message.kind == "revoked":
            self.outbox.revoked(REQUEST, receiver_of(message.receiver_epoch), message.generation)
        elif message.receiver_epoch == self.receiver_epoch or not self.is_receiver_death_known:
            # the role drops grants of an epoch that it knows to be dead
            self.outbox.granted(
                REQUEST,
                receiver_of(message.receiver_epoch),
                generation=message.generation,
                first_block=0,
                block_ids=message.block_ids,
                ttl_s=TTL_TICKS,
                now=self.now,
            )

    def _deliver_to_receiver(self, message: Message) -> None:
        if message.receiver_epoch != self.receiver_epoch:
            return
        if message.kind == "beat":
            self.table.extend(sender_of(message.sender_epoch), [(REQUEST, message.generation)], now=self.now)
        else:
            self._end(self.table.lease_closed(REQUEST, message.generation, sender_of(message.sender_epoch)))

    def kill_sender(self) -> None:
        """None of the process' writes lands after its death. Its earlier messages may still be in flight."""
        self._use("sender_deaths")
        self.sender_epoch += 1
        self.outbox = self.outbox_type()
        self.writes.clear()
        self.strays = frozenset()
        self.pinned.clear()
        self.is_link_up = True
        self.is_sender_death_known = False
        self.is_receiver_death_known = True  # the new process knows no dead receiver

    def tell_receiver(self) -> None:
        self.is_sender_death_known = True
        for released in self.table.sender_lost(sender_of(self.sender_epoch - 1)):
            self._end(released)

    def give_up_sender(self) -> None:
        self._use("give_ups")
        for fenced in self.table.give_up_sender(sender_of(self.sender_epoch)):
            self._end(fenced)

    def kill_receiver(self) -> None:
        """The process, its memory and its leases are gone; a new one starts with a new pool."""
        self._use("receiver_deaths")
        while self.writes:
            self.outbox.write_settled(self.writes.popleft(), TransferState.LOST)
        self.notifications.clear()
        self.strays = frozenset()
        self.receiver_epoch += 1
        self.is_receiver_death_known = False
        self.is_sender_death_known = True
        self._start_receiver()

    def tell_sender(self) -> None:
        self.is_receiver_death_known = True
        self.outbox.receiver_lost(receiver_of(self.receiver_epoch - 1))

    def _send(self, message: Message) -> None:
        self.network |= {message}

    def _end(self, end: LeaseReceived | LeaseReleased | LeaseFenced | None) -> None:
        """Act for the receiver on what its lease table returned."""
        if end is None or isinstance(end, LeaseFenced):
            return
        lease = end.lease
        if isinstance(end, LeaseReceived) and not end.num_missing:
            self.num_received += 1
            arrived = [self.content.get(block) for block in lease.block_ids]
            whole = [(lease.generation, index) for index in range(len(lease.block_ids))]
            require(arrived == whole, f"received {arrived} as {whole}")
        for block in lease.block_ids:
            require(self.lent.get(block) == lease.generation, f"lease {lease.generation} ends twice")
            require(not self._is_written(block), f"block {block} is freed while a write to it is in flight")
            del self.lent[block]
            self.content.pop(block, None)
            self.free.add(block)

    def _is_written(self, block: int) -> bool:
        return any(block in write.remote_block_ids for write in self.writes) or any(
            stray.block_id == block for stray in self.strays
        )

    def _check_target(self, write: BlockWrite) -> None:
        for block in write.remote_block_ids:
            generation = write.notification.generation
            require(self.lent.get(block) == generation, f"{generation} writes to block {block} of {self.lent}")

    def _flying_handoffs(self) -> set[int]:
        return {write.handoff.handoff_id for write in self.writes}

    def clone(self) -> World:
        """An independent copy. Copies are most of a walk's time, and copy.deepcopy is ten times slower."""
        new = World.__new__(World)
        new.__dict__ |= self.__dict__
        new.free, new.pinned, new.used = set(self.free), set(self.pinned), dict(self.used)
        new.lent, new.content = dict(self.lent), dict(self.content)
        new.notifications = deque(self.notifications)
        assert not self.outbox.take_ended(), "collect comes first"
        copies: dict[int, Any] = {}
        new.table, new.outbox = _clone(self.table, copies), _clone(self.outbox, copies)
        new.writes = deque(replace(write, handoff=_copied(write.handoff, copies)) for write in self.writes)
        return new

    # What can be said of it.

    def check(self) -> None:
        """Check the invariants of every state; those of a step are checked when it is taken."""
        try:
            self.table.check_integrity()
            self.outbox.check_integrity()
        except AssertionError as exc:
            raise Broken(str(exc)) from exc
        held = sorted(self.table.held_block_ids)
        require(held == sorted(self.lent), f"the table holds {held}, lent is {self.lent}")
        everything = sorted([*self.free, *held])
        require(everything == list(range(self.bounds.num_pool_blocks)), f"free {self.free}, held {held}")

    @property
    def is_at_rest(self) -> bool:
        """Whether no block is held on either side."""
        is_free = len(self.free) == self.bounds.num_pool_blocks
        return is_free and not self.pinned and self.outbox.num_open == 0 and not self.outbox._early_grants

    def snapshot(self) -> Snapshot:
        """Identifies this state: times count from now, and all deadlines that have passed are equal."""
        table, outbox, now = self.table, self.outbox, self.now
        active = {id(handoff) for handoff in outbox.active_handoffs}
        handoffs = {id(handoff): handoff for handoff in outbox.open_handoffs}
        handoffs |= {id(write.handoff): write.handoff for write in self.writes}
        leases = tuple(
            (g, e.is_fenced, max(0, e.deadline - now), e.lease.sender.epoch, tuple(e.checksums))
            for g, e in table._entries.items()
        )
        sent = tuple(
            sorted(
                (
                    *(h.handoff_id, h.key.receiver.epoch, id(h) in active, h.num_submitted, h.num_in_flight),
                    *(len(h.local_block_ids), not h.first_token_ids, h.is_done_submitted, h.is_done_settled),
                    *(h.has_failed_write, h.has_lost_write, h.is_revoked, h.is_receiver_lost, h.is_ended),
                    *(bool(h.failure), h.grant is None and max(0, h.grant_deadline - now)),
                    0 if h.grant is None else h.grant.lease.generation,
                )
                for h in handoffs.values()
            )
        )
        early = tuple((g.lease, max(0, g.deadline - now)) for g in outbox._early_grants.values())
        writes = tuple((w.handoff.handoff_id, w.notification.generation, *w.remote_block_ids) for w in self.writes)
        notifications = tuple((m.generation, getattr(m, "first_block", -1)) for m in self.notifications)
        past = tuple(sorted(outbox._past)), tuple(sorted(outbox._ungranted)), tuple(sorted(outbox._lost_leases))
        return (
            *(leases, sent, early, writes, notifications, past, self.network, self.strays, self.is_link_up),
            *(self.sender_epoch, self.receiver_epoch, self.is_sender_death_known, self.is_receiver_death_known),
            *(tuple(sorted(self.used.items())), tuple(sorted(self.content.items())), frozenset(self.pinned)),
            *(self.last_generation, max(0, self.vouched_until - self.now)),
        )


def _clone(original: _Cloned, copies: dict[int, Any]) -> _Cloned:
    """A copy that shares nothing which can change. `copies` has the copies of records, by the `id` of the original."""
    new = object.__new__(type(original))
    new.__dict__ |= {k: v if type(v) is int else _copied(v, copies) for k, v in vars(original).items()}
    return new


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    kind = type(value)
    if isinstance(value, dict):
        new = value.copy()
        for key, one in value.items():
            if type(one) is list or hasattr(one, "__dataclass_fields__"):
                new[key] = _copied(one, copies)
        return new
    if kind is list:
        return [_copied(one, copies) for one in value]
    if not hasattr(kind, "__dataclass_fields__"):
        return value
    if id(value) not in copies:
        parts = {name: _copied(getattr(value, name), copies) for name in _container_names(kind)}
        copies[id(value)] = replace(value, **parts)
    return copies[id(value)]


@functools.cache
def _container_names(record: type) -> list[str]:
    """The fields of a record that begin as an empty list or dictionary."""
    return [one.name for one in fields(record) if one.default_factory is not MISSING]


class Explored(NamedTuple):
    """The outcome of a walk over all states."""

    num_states: int
    num_steps: int
    num_deepest: int
    num_received: int  # steps by which KV was received
    violation: str
    trace: list[str]


def explore(world: World) -> Explored:
    """Expand all states breadth first until an invariant breaks; the trace is the shortest way there."""
    numbers: dict[Snapshot, int] = {world.snapshot(): 0}  # states are numbered, as hashing a snapshot is what costs
    parents: list[tuple[int, str]] = [(0, "")]
    quiet: dict[int, int] = {}
    at_rest: set[int] = set()
    frontier = deque([(0, world, 0)])
    num_steps = depth = num_received = 0
    violation, trace = "", []
    while frontier and not violation:
        state, world, depth = frontier.popleft()
        if world.is_at_rest:
            at_rest.add(state)
        for name, act in world.actions():
            successor = world.clone()
            num_steps += 1
            try:
                act(successor)
                successor.collect()
                reached = numbers.setdefault(successor.snapshot(), len(parents))
                if reached == len(parents):
                    successor.check()
                    parents.append((state, name))
                    frontier.append((reached, successor, depth + 1))
            except Broken as exc:
                violation, trace = str(exc), [*_trace(parents, state), name]
                break
            num_received += successor.num_received - world.num_received
            if reached != state:
                quiet.setdefault(state, reached)
    leak = None if violation else _find_leak(quiet, at_rest)
    if leak is not None:
        violation, trace = "a leak: the quiet schedule never comes to rest", _trace(parents, leak)
    return Explored(len(parents), num_steps, depth, num_received, violation, trace)


def _find_leak(quiet: dict[int, int], at_rest: set[int]) -> int | None:
    """A state from which the quiet schedule (always the first event that changes anything) never comes to rest."""
    safe = set(at_rest)
    for start in quiet:
        way: dict[int, None] = {}
        state: int | None = start
        while state is not None and state not in safe:
            if state in way:
                return start
            way[state] = None
            state = quiet.get(state)
        if state is None:
            return start
        safe.update(way)
    return None


def _trace(parents: list[tuple[int, str]], state: int) -> list[str]:
    names: list[str] = []
    while state != 0:
        state, name = parents[state]
        names.append(name)
    return names[::-1]


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """A walk makes many objects but no cycles; collecting garbage would take half of its time."""
    gc.disable()
    yield
    gc.enable()


NO_FAULTS = Bounds(grants=1, opens=1, cancels=0, sender_deaths=0, receiver_deaths=0, repeats=0)
SMALL = [
    NO_FAULTS._replace(can_vouch=False),
    NO_FAULTS._replace(cancels=1, sender_deaths=1),
    NO_FAULTS._replace(give_ups=1, sender_deaths=1),
    NO_FAULTS._replace(cancels=1, receiver_deaths=1),
    NO_FAULTS._replace(num_blocks=2, num_pool_blocks=2, repeats=1),
    NO_FAULTS._replace(grants=2),
    NO_FAULTS._replace(queues=1),
]


LARGER = {
    "all faults": NO_FAULTS._replace(cancels=1, sender_deaths=1, receiver_deaths=1, repeats=1),
    "two blocks": NO_FAULTS._replace(num_blocks=2, num_pool_blocks=2, sender_deaths=1, receiver_deaths=1),
    "two leases": NO_FAULTS._replace(num_pool_blocks=2, grants=2),
    "two handoffs": NO_FAULTS._replace(grants=2, opens=2),
    "in line": NO_FAULTS._replace(queues=2, cancels=1, receiver_deaths=1),
}


def explore_all(bounds: Bounds) -> Explored:
    started = time.perf_counter()
    explored = explore(World(bounds))
    print(
        f"{bounds}: {explored.num_states} states, {explored.num_steps} steps, at most {explored.num_deepest} deep, "
        f"KV received in {explored.num_received} of them; {time.perf_counter() - started:.1f} s"
    )
    assert not explored.violation, f"{explored.violation}: {explored.trace}"
    assert explored.num_received > 0
    return explored


@pytest.mark.slow
@pytest.mark.usefixtures("no_garbage_collection")
def test_no_interleaving_breaks_a_lease() -> None:
    assert sum(explore_all(bounds).num_states for bounds in SMALL) > 20_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("bounds", LARGER.values(), ids=LARGER)
def test_no_interleaving_of_a_larger_world_breaks_a_lease(bounds: Bounds) -> None:
    assert explore_all(bounds).num_states > 10_000


BUSY = Bounds(
    num_blocks=3,
    num_pool_blocks=6,
    queues=3,
    grants=8,
    opens=8,
    cancels=3,
    sender_deaths=2,
    receiver_deaths=2,
    give_ups=2,
    repeats=6,
)


def walk(choices: Iterable[int]) -> World:
    """A busy world after these events, of which one in ten is a fault or lets time pass; then it has come to rest."""
    world = World(BUSY)

    def act(event: Callable[[World], object]) -> None:
        event(world)
        world.collect()
        world.check()

    for choice in choices:
        calm = [event for _, event in world.calm_actions() if event is not World.tick]
        events = calm if choice % 10 else [World.tick, *(event for _, event in world.fault_actions())]
        act(events[choice // 10 % len(events)])
    for _ in range(500):
        if world.is_at_rest:
            return world
        before = world.snapshot()
        for _, event in world.actions():
            act(event)
            if world.snapshot() != before:
                break
    raise Broken("the quiet schedule never comes to rest")


@given(st.lists(st.integers(0, 1000), max_size=200))
def test_any_walk_through_a_busy_world_comes_to_rest(choices: list[int]) -> None:
    walk(choices)


def test_random_walks_through_a_busy_world_see_success_and_come_to_rest() -> None:
    num_received = 0
    for seed in range(100):
        print(f"seed {seed}")
        num_received += walk(random.Random(seed).choices(range(1000), k=200)).num_received
    assert num_received > 40


class FreesAtFencing(LeaseTable):
    def _fence(self, entry: Any, reason: str) -> Any:
        super()._fence(entry, reason)
        return self._release(entry, reason)


class RepeatsGenerations(LeaseTable):
    def __init__(self, *, first_generation: int = 1) -> None:
        super().__init__()


class HidesMissingChunks(LeaseTable):
    def handoff_done(self, *args: Any, **fields: Any) -> Any:
        ended = super().handoff_done(*args, **fields)
        is_received = isinstance(ended, LeaseReceived)
        return ended._replace(checksums=[b""] * len(ended.lease.block_ids)) if is_received else ended


class KeepsLeasesOfTheDead(LeaseTable):
    def sender_lost(self, sender: WorkerEpoch) -> list[LeaseReleased]:
        return []


class EndsLeasesTwice(LeaseTable):
    def _remove(self, entry: Any) -> None:
        if entry.is_fenced:  # a fenced lease stays and is released by the next confirmation, too
            return
        super()._remove(entry)


class WritesAfterItsEnd(Outbox):
    def granted(self, *args: Any, **fields: Any) -> None:
        self._past.clear()
        super().granted(*args, **fields)


class FailsWhatIsInLine(Outbox):
    def queued(self, *args: Any, **fields: Any) -> None:
        pass


class ForgetsItsLeaseInLine(Outbox):
    def queued(self, *args: Any, grant_deadline: float) -> None:
        for handoff in self._active.values():
            handoff.grant, handoff.grant_deadline = None, grant_deadline


@pytest.mark.parametrize(
    ("broken", "bounds", "violation"),
    [
        (FreesAtFencing, NO_FAULTS, "is freed while a write|writes to block"),
        (RepeatsGenerations, NO_FAULTS._replace(grants=2, receiver_deaths=1), "is used again"),
        (HidesMissingChunks, NO_FAULTS, "received"),
        (KeepsLeasesOfTheDead, NO_FAULTS._replace(sender_deaths=1), "a leak"),
        (EndsLeasesTwice, NO_FAULTS, "ends twice|the table holds"),
        (WritesAfterItsEnd, NO_FAULTS._replace(opens=2, cancels=1, repeats=1), "writes to block|is freed while"),
        (FailsWhatIsInLine, NO_FAULTS._replace(queues=1), "in line fails as late"),
        (ForgetsItsLeaseInLine, NO_FAULTS._replace(queues=1), "without a grant"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
@pytest.mark.usefixtures("no_garbage_collection")
def test_the_walk_finds_what_is_broken(broken: type[LeaseTable] | type[Outbox], bounds: Bounds, violation: str) -> None:
    world = World(bounds, table_type=broken) if issubclass(broken, LeaseTable) else World(bounds, outbox_type=broken)
    explored = explore(world)
    print(f"{explored.violation} after {explored.num_states} states: {' -> '.join(explored.trace)}")
    assert re.search(violation, explored.violation)
