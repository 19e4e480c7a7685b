"""A network in one process whose writes a test judges: each one is delivered, held back, failed or lost."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor
from typing_extensions import override

from tandem.kv_transfer.transport.base import Transfer, TransferState
from tandem.kv_transfer.transport.in_process import InProcessHub, InProcessTransport, InProcessWrite


class Verdict(enum.Enum):
    """The fate of a write or a read."""

    DELIVER = "deliver"
    HOLD = "hold"  # it stays pending until `release_held`; later transfers of this link queue behind it
    FAIL = "fail"  # nothing lands
    LOSE = "lose"  # the link breaks after the first block


class JudgedHub(InProcessHub):
    """`judge` decides what happens to each write; without one all are delivered."""

    def __init__(self, judge: Callable[[InProcessWrite], Verdict] | None = None) -> None:
        super().__init__()
        self._judge = judge
        self._held: dict[tuple[InProcessTransport, InProcessTransport], deque[InProcessWrite]] = {}

    @property
    def held(self) -> list[InProcessWrite]:
        """Writes held back, oldest first per link."""
        with self.lock:
            return [write for queue in self._held.values() for write in queue]

    def stop_judging(self) -> None:
        """Deliver every later write."""
        with self.lock:
            self._judge = None

    def release_held(self) -> None:
        """Deliver everything that was held back."""
        with self.lock:
            held, self._held = self._held, {}
            for queue in held.values():
                for write in queue:
                    super().submit(write)

    def lose(self, is_lost: Callable[[InProcessWrite], bool]) -> None:
        """Make these of the held writes LOST."""
        with self.lock:
            for link, queue in list(self._held.items()):
                for write in [write for write in queue if is_lost(write)]:
                    queue.remove(write)
                    write.transfer.settle(TransferState.LOST)
                if not queue:
                    del self._held[link]

    @override
    def join(self, worker_id: str, epoch: int, pool: Tensor | Sequence[Tensor]) -> InProcessTransport:
        return _JudgedTransport(worker_id, epoch, pool, self)

    @override
    def detach(self, transport: InProcessTransport) -> None:
        with self.lock:
            super().detach(transport)
            self.lose(lambda write: transport in (write.sender, write.receiver))

    @override
    def submit(self, write: InProcessWrite) -> None:
        with self.lock:
            verdict = self._judge(write) if self._judge else Verdict.DELIVER
            link = (write.sender, write.receiver)
            if verdict is Verdict.FAIL:
                write.transfer.settle(TransferState.FAILED)
            elif verdict is Verdict.LOSE:
                super().submit(_first_block_of(write))
                write.transfer.settle(TransferState.LOST)
                write.sender.remove_peer(write.receiver.worker_id)
            elif verdict is Verdict.HOLD or link in self._held:
                self._held.setdefault(link, deque()).append(write)
            else:
                super().submit(write)


class _JudgedTransport(InProcessTransport):
    """Has held writes, which are lost with their peer."""

    def __init__(self, worker_id: str, epoch: int, pool: Tensor | Sequence[Tensor], hub: JudgedHub) -> None:
        super().__init__(worker_id, epoch, pool, hub)
        self._judged = hub

    @override
    def remove_peer(self, worker_id: str) -> None:
        super().remove_peer(worker_id)
        self._judged.lose(lambda write: write.sender is self and write.receiver.worker_id == worker_id)


def damaging(damage: Callable[[Tensor, list[int]], None]) -> Callable[[InProcessWrite], Verdict]:
    """A link that damages the blocks of every write where they arrive; the sender still computes with its own."""

    def judge(write: InProcessWrite) -> Verdict:
        if write.local_block_ids:
            deliver_damaged(write, damage)
        return Verdict.DELIVER

    return judge


def deliver_damaged(write: InProcessWrite, damage: Callable[[Tensor, list[int]], None]) -> None:
    """Copy the blocks now, `damage` them where they arrived, and leave nothing more to copy.

    Both pools must have one shard, of one shape.
    """
    here, there = (write.sender.shards[0], write.local_block_ids), (write.receiver.shards[0], write.remote_block_ids)
    (source, sent), (target, arrived) = (there, here) if write.is_read else (here, there)
    target[arrived] = source[sent]
    damage(target, arrived)
    write.local_block_ids, write.remote_block_ids = [], []


def _first_block_of(write: InProcessWrite) -> InProcessWrite:
    local, remote = write.local_block_ids[:1], write.remote_block_ids[:1]
    return replace(write, local_block_ids=local, remote_block_ids=remote, notification=b"", transfer=Transfer())
