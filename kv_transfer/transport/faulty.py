"""A transport that wraps another one and injects faults into its writes: for tests, and for `tandem chaos`.

All faults come from one random source and one clock, both passed in, so a run over the in-process transport with a
virtual clock repeats exactly.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from tandem.kv_transfer.transport.base import (
    Notification,
    Transfer,
    TransferRequest,
    TransferState,
    Transport,
    pool_shape,
)
from tandem.protocol.errors import PeerLost, TransferError
from tandem.protocol.faults import Fault, parse_faults

_MAX_DELAY_S = 2.0


_NEED_BLOCKS = {Fault.TEAR, Fault.FLIP}
_NEED_NOTIFICATION = {Fault.GARBLE, Fault.DROP, Fault.REPEAT}


@dataclass(eq=False, slots=True)
class _Held:
    """A write that waits for its own delay or for earlier writes."""

    write: TransferRequest
    transfer: Transfer
    due: float
    fault: Fault | None


class FaultyTransport(Transport):
    """`inner` with faults in its writes. `rates` gives each fault's probability per write, and may be replaced.

    `injected` counts the faults, in a counter that several transports may share. A flipped bit is restored after
    `write_blocks` of the inner transport, which must copy inside that call, as both of ours do on CPUs.
    """

    def __init__(
        self,
        inner: Transport,
        pool: Tensor,
        *,
        rates: Mapping[Fault, float],
        source: random.Random,
        clock: Callable[[], float],
        max_delay_s: float,
        injected: Counter[str] | None = None,
    ) -> None:
        self.rates = rates
        self.injected: Counter[str] = Counter() if injected is None else injected
        self._inner = inner
        self.waker = inner.waker
        self._pool = pool
        self._block_bytes = pool_shape([pool]).block_bytes
        self._source = source
        self._clock = clock
        self._max_delay_s = max_delay_s
        self._queues: dict[str, deque[_Held]] = {}
        self._strays: list[tuple[float, TransferRequest]] = []  # lost blocks, each with the time at which it lands
        self._lost: set[str] = set()
        self._epochs: dict[str, int] = {}
        self._mirrored: list[tuple[Transfer, Transfer]] = []  # (of the inner transport, ours)

    @override
    def local_metadata(self) -> bytes:
        return self._inner.local_metadata()

    @override
    def add_peer(self, worker_id: str, epoch: int, metadata: bytes) -> None:
        self._inner.add_peer(worker_id, epoch, metadata)
        if self._epochs.get(worker_id, epoch) != epoch:  # nothing meant for the old process reaches the new one
            self._forget(worker_id)
        self._epochs[worker_id] = epoch
        self._lost.discard(worker_id)

    @override
    def remove_peer(self, worker_id: str) -> None:
        self._inner.remove_peer(worker_id)
        self._lose_queue(worker_id)
        self._lost.discard(worker_id)

    @override
    def is_quiet(self, worker_id: str) -> bool:
        is_mirroring = worker_id in self._queues or any(not ours.is_settled for _, ours in self._mirrored)
        has_strays = any(write.worker_id == worker_id for _, write in self._strays)
        return self._inner.is_quiet(worker_id) and not is_mirroring and not has_strays

    @override
    def _copy(self, request: TransferRequest) -> Transfer:
        worker_id, local_ids, remote_ids = request.worker_id, request.local_block_ids, request.remote_block_ids
        if worker_id in self._lost:
            raise PeerLost(f"the link to {worker_id} is down")
        if request.is_read:
            return self._inner.read_blocks(worker_id, remote_ids, local_ids)
        write = replace(request, local_block_ids=list(local_ids), remote_block_ids=list(remote_ids))
        fault = self._draw(write)
        queue = self._queues.get(worker_id)
        if not queue and fault not in (Fault.DELAY, Fault.STICK):
            return self._carry_out(write, fault)
        delay_s = self._source.uniform(0.0, self._max_delay_s) if fault is Fault.DELAY else 0.0
        delay_s = math.inf if fault is Fault.STICK else delay_s
        held = _Held(write, Transfer(len(local_ids) * self._block_bytes), self._clock() + delay_s, fault)
        self._queues.setdefault(worker_id, deque()).append(held)
        return held.transfer

    @override
    def poll(self) -> list[Notification]:
        self._land_strays()
        for worker_id in list(self._queues):
            self._advance(worker_id)
        arrived = self._inner.poll()
        self._mirror()
        return arrived

    @override
    def close(self) -> None:
        for worker_id in list(self._queues):
            self._lose_queue(worker_id)
        self._strays.clear()
        self._inner.close()
        self._mirror()

    def _forget(self, worker_id: str) -> None:
        """Drop everything in flight to a process that is gone."""
        self._lose_queue(worker_id)
        self._strays = [(due, write) for due, write in self._strays if write.worker_id != worker_id]

    def _draw(self, write: TransferRequest) -> Fault | None:
        """The fault whose share of [0, 1) contains the drawn number, if this write can have it."""
        drawn = self._source.random()
        for fault, rate in self.rates.items():
            drawn -= rate
            if drawn < 0:
                is_possible = (write.local_block_ids or fault not in _NEED_BLOCKS) and (
                    write.notification or fault not in _NEED_NOTIFICATION
                )
                if is_possible:
                    self.injected[fault.value] += 1
                return fault if is_possible else None
        return None

    def _advance(self, worker_id: str) -> None:
        """Carry out this link's due writes, in order."""
        queue = self._queues[worker_id]
        while queue and queue[0].due <= self._clock():
            held = queue.popleft()
            try:
                inner = self._carry_out(held.write, held.fault)
            except TransferError:  # the peer is gone
                held.transfer.settle(TransferState.LOST)
            else:
                self._mirrored.append((inner, held.transfer))
        if not queue:
            self._queues.pop(worker_id, None)

    def _carry_out(self, write: TransferRequest, fault: Fault | None) -> Transfer:
        if fault is Fault.FAIL:
            return _settled(TransferState.FAILED)
        if fault is Fault.LOSE:
            return self._lose_link(write)
        if fault is Fault.FLIP:
            return self._write_flipped(write)
        if fault is Fault.TEAR:
            write = self._torn(write)
        elif fault is Fault.GARBLE:
            write = replace(write, notification=self._flipped(write.notification))
        elif fault is Fault.DROP:
            write = replace(write, notification=b"")
        transfer = self._write(write)
        if fault is Fault.REPEAT:
            self._inner.write_blocks(write.worker_id, [], [], write.notification)
        return transfer

    def _write(self, write: TransferRequest) -> Transfer:
        return self._inner.write_blocks(
            write.worker_id, write.local_block_ids, write.remote_block_ids, write.notification
        )

    def _torn(self, write: TransferRequest) -> TransferRequest:
        """The write without one of its blocks."""
        missing = self._source.randrange(len(write.local_block_ids))
        local_ids, remote_ids = list(write.local_block_ids), list(write.remote_block_ids)
        del local_ids[missing], remote_ids[missing]
        return replace(write, local_block_ids=local_ids, remote_block_ids=remote_ids)

    def _lose_link(self, write: TransferRequest) -> Transfer:
        """Break the link in the middle of this write; the writes queued behind it are lost, too."""
        landed = self._source.randint(0, len(write.local_block_ids))
        self._inner.write_blocks(write.worker_id, write.local_block_ids[:landed], write.remote_block_ids[:landed])
        self._lost.add(write.worker_id)
        self._stray(write, landed)
        self._lose_queue(write.worker_id)
        return _settled(TransferState.LOST)

    def _lose_queue(self, worker_id: str) -> None:
        queue = self._queues.pop(worker_id, deque())
        for held in queue:
            self._stray(held.write, 0)
            held.transfer.settle(TransferState.LOST)
        queue.clear()  # `_advance` may be walking it

    def _mirror(self) -> None:
        """Settle our transfers whose inner transfers have ended."""
        for inner, ours in self._mirrored:
            if inner.is_settled:
                ours.settle(inner.state)
        self._mirrored = [(inner, ours) for inner, ours in self._mirrored if not inner.is_settled]

    def _stray(self, write: TransferRequest, landed: int) -> None:
        """Let the rest of a lost write land at random times, with the content that its local blocks have then."""
        for local_id, remote_id in zip(write.local_block_ids[landed:], write.remote_block_ids[landed:], strict=True):
            due = self._clock() + self._source.uniform(0.0, self._max_delay_s)
            self._strays.append((due, TransferRequest(write.worker_id, [local_id], [remote_id])))

    def _land_strays(self) -> None:
        now = self._clock()
        due = [write for when, write in self._strays if when <= now]
        self._strays = [(when, write) for when, write in self._strays if when > now]
        for write in due:
            try:
                self._write(write)
            except TransferError:  # the link is down: they land when it is back, unless the process was replaced
                self._strays.append((now, write))

    def _write_flipped(self, write: TransferRequest) -> Transfer:
        block = self._pool[self._source.choice(write.local_block_ids)].view(-1).view(torch.uint8)
        position, bit = self._source.randrange(len(block)), 1 << self._source.randrange(8)
        block[position] ^= bit
        try:
            return self._write(write)
        finally:
            block[position] ^= bit

    def _flipped(self, notification: bytes) -> bytes:
        flipped = bytearray(notification)
        flipped[self._source.randrange(len(flipped))] ^= 1 << self._source.randrange(8)
        return bytes(flipped)


def with_faults(inner: Transport, pool: Tensor, faults: str, *, name: str) -> FaultyTransport:
    """A worker's transport with the faults of a text as `parse_faults` reads it. `name` makes workers differ."""
    rates, seed = parse_faults(faults)
    source = random.Random(f"{seed} {name}")
    return FaultyTransport(inner, pool, rates=rates, source=source, clock=time.monotonic, max_delay_s=_MAX_DELAY_S)


def _settled(state: TransferState) -> Transfer:
    transfer = Transfer()
    transfer.settle(state)
    return transfer
