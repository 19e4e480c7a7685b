"""Puts the notifications of NIXL links back in the order in which they were sent. Pure.

The sender numbers them; a checksum covers number and payload. One that is damaged or never arrives is dropped, and
those behind it do not wait for it. UCX takes notifications from every process that can connect, so everything here is
bounded.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from tandem.kv_transfer.transport.base import Notification
from tandem.kv_transfer.transport.checksum import append_checksum, strip_checksum

logger = logging.getLogger(__name__)

MAX_EARLY = 1024  # notifications of a link that wait for an earlier one; what is missing by then will not arrive
MAX_AHEAD = 1 << 16  # a number further ahead than this was not made by the sender
_MAX_EARLY_BYTES = 16 << 20
_MAX_SENDERS = 1024
_MAX_AGENT_NAME = 2048

_HEADER = struct.Struct("<QQ")  # number of the sender's link, sequence number within the link
HEADER_BYTES = _HEADER.size


def number_notification(link: int, sequence: int, payload: bytes) -> bytes:
    """The payload as it is sent: with its numbers before it and a checksum after it."""
    return append_checksum(_HEADER.pack(link, sequence) + payload)


def agent_name(worker_id: str, epoch: int) -> str:
    """A worker's name at NIXL, unique over restarts, so that a new process is never taken for the old one."""
    return f"{worker_id}#{epoch}"


def worker_of(name: str) -> tuple[str, int]:
    """(worker id, epoch) of an `agent_name`."""
    worker_id, _, epoch = name.rpartition("#")
    return worker_id, int(epoch)


def _is_agent_name(name: str) -> bool:
    worker_id, _, epoch = name.rpartition("#")
    return bool(worker_id) and epoch.isdecimal() and len(name) <= _MAX_AGENT_NAME


@dataclass(eq=False, slots=True)
class NotificationSequencer:
    """Reorders the notifications of one sender."""

    max_early_bytes: int = _MAX_EARLY_BYTES
    num_dropped: int = 0  # damaged, missing, or with an impossible number
    num_early_bytes: int = 0
    early: dict[int, bytes] = field(default_factory=dict)  # by sequence number; they wait for an earlier one
    _link: int = 0
    _next_sequence: int = 0
    _num_damaged: int = 0  # each had a number that is or will be missing, on this link or the next one

    def take(self, message: bytes) -> Iterator[bytes]:
        """The payloads that are due after this message."""
        numbered = strip_checksum(message)
        if numbered is None or len(numbered) < HEADER_BYTES:
            self._num_damaged += 1
            self.num_dropped += 1
        else:
            link, sequence = _HEADER.unpack_from(numbered)
            self._put(link, sequence, numbered[HEADER_BYTES:])
        while self.early:
            if (payload := self.early.pop(self._next_sequence, None)) is not None:
                self.num_early_bytes -= len(payload)
                self._next_sequence += 1
                yield payload
            elif self._num_damaged:  # the missing number was that of a damaged one: it will not come
                self._num_damaged -= 1
                self._next_sequence += 1
            elif len(self.early) > MAX_EARLY or self.num_early_bytes > self.max_early_bytes:
                first = min(self.early)
                self.num_dropped += first - self._next_sequence
                self._next_sequence = first
            else:
                return

    def _put(self, link: int, sequence: int, payload: bytes) -> None:
        if link > self._link:  # the sender added us again and counts from 0
            self._link, self._next_sequence, self.early, self.num_early_bytes = link, 0, {}, 0
        if link != self._link or sequence < self._next_sequence or sequence in self.early:
            return  # of an earlier link, or repeated
        if sequence - self._next_sequence >= MAX_AHEAD:
            self.num_dropped += 1
            return
        self.early[sequence] = payload
        self.num_early_bytes += len(payload)


class NotificationReceiver:
    """Reorders the notifications of all senders, each known by its agent name."""

    def __init__(self, max_senders: int = _MAX_SENDERS) -> None:
        self.num_dropped = 0
        self._max_senders = max_senders
        self._sequencers: dict[str, NotificationSequencer] = {}

    def take(self, arrived: dict[str, list[bytes]]) -> list[Notification]:
        """The notifications that are due after these messages, given by the agent name of their sender."""
        due: list[Notification] = []
        for name, messages in arrived.items():
            sequencer = self._sequencer_of(name)
            if sequencer is None:
                self._note_dropped(len(messages), name)
                continue
            worker_id, epoch = worker_of(name)
            for message in messages:
                due += [Notification(worker_id, epoch, payload) for payload in sequencer.take(message)]
            self._note_dropped(sequencer.num_dropped, name)
            sequencer.num_dropped = 0
        return due

    def keep_only(self, name: str) -> None:
        """Forget all other epochs of this worker.

        NOTE: nothing else ends a known sender's order. Its link to us goes on counting when ours to it is removed.
        """
        worker_id, _ = worker_of(name)
        for other in [other for other in self._sequencers if other != name and worker_of(other)[0] == worker_id]:
            del self._sequencers[other]

    def _sequencer_of(self, name: str) -> NotificationSequencer | None:
        """None if the name is not a worker's, or is one too many: known senders are never displaced."""
        sequencer = self._sequencers.get(name)
        if sequencer is None and _is_agent_name(name):
            worker_id, epoch = worker_of(name)
            for former in [n for n in self._sequencers if worker_of(n)[0] == worker_id and worker_of(n)[1] < epoch]:
                del self._sequencers[former]
            if len(self._sequencers) < self._max_senders:
                sequencer = self._sequencers[name] = NotificationSequencer()
        return sequencer

    def _note_dropped(self, count: int, name: str) -> None:
        if count:
            before, self.num_dropped = self.num_dropped, self.num_dropped + count
            if before.bit_length() < self.num_dropped.bit_length():  # at 1, 2, 4, ...: a flood must not fill a disk
                text = "dropped notifications of %r: damaged, missing or from an unknown worker; %d in all"
                logger.warning(text, name[:_MAX_AGENT_NAME], self.num_dropped)
