"""What the other processes of one router have open, counted on our registry as if it were ours.

Each process tells the others what it books and gives back, and hears the same of them, so each decides by the load of
all. Messages may be lost: they are counted, and who misses one asks for a snapshot. A process that is silent, left or
began anew has nothing open any more. Engines that were added or removed travel the same way.

Plain values and the time in, messages out through `send`: no sockets, no clock. Messages of one sender come in order.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from tandem.router.processes.sibling_messages import (
    Beat,
    EngineEntry,
    EngineSet,
    FirstToken,
    Left,
    Opened,
    OpenRequest,
    Released,
    SiblingMessage,
    Snapshot,
    SnapshotWanted,
    Stamp,
    Waiting,
)
from tandem.runtime.idle_timeout import IdleClock
from tandem.scheduling.bookings import Booking
from tandem.scheduling.load import RequestLoad
from tandem.scheduling.registry import Registry
from tandem.scheduling.workers import WorkerChange

__all__ = ["BEAT_INTERVAL_S", "REMOVED_S", "SILENCE_S", "PeerRouterListener", "PeerRouters", "SharedBooking"]

BEAT_INTERVAL_S = 0.25
SILENCE_S = 2.0  # a process that says nothing for so long has nothing open; when it speaks again it is asked
# Longer than any word is under way. A removal that is forgotten is missed by none but who was silent for all that time.
REMOVED_S = 300.0
_Change = Opened | FirstToken | Released | EngineSet


class PeerRouterListener(Protocol):
    """Who learns from what the other processes see."""

    def sibling_opened(self, load: RequestLoad, digests: Sequence[bytes]) -> None:
        """A sibling sent a request to these workers; the blocks of its prompt will be cached there."""

    def sibling_first_token(self, load: RequestLoad, wait_s: float) -> None:
        """The first token of a sibling's request came, so long after it was sent. Its prompt is still booked."""

    def sibling_ended(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """A request of a sibling came to its end."""

    def sibling_engine(self, entry: EngineEntry) -> None:
        """An engine was added or removed through a sibling, and this is the latest word on it."""


@dataclass(eq=False, slots=True)
class _Theirs:
    """A sibling's open request. Not booked while one of its workers is unknown here."""

    request: OpenRequest
    booking: Booking | None = None

    def is_on(self, worker_id: str) -> bool:
        return worker_id in (self.request.load.prefill, self.request.load.decode)


@dataclass(eq=False, slots=True)
class _Sibling:
    """One other process, in one life of it."""

    epoch: int
    heard_s: float
    sequence: int = 0  # changes of it that are applied here
    is_synced: bool = True
    hears_us: bool = False
    waiting: dict[str, Waiting] = field(default_factory=dict)  # in its queues, as of its latest beat
    asked_s: float = -math.inf  # when a snapshot was asked for
    open: dict[int, _Theirs] = field(default_factory=dict)


class SharedBooking:
    """A booking that the siblings hear of. Whoever reserves it releases it, on every path."""

    def __init__(self, siblings: PeerRouters, booking_id: int, booking: Booking) -> None:
        self._siblings = siblings
        self._booking_id = booking_id
        self._booking = booking

    def prefill_done(self, wait_s: float | None = None) -> None:
        """The first token came, `wait_s` after the request was sent if that was seen. Later calls change nothing."""
        self._booking.prefill_done()
        self._siblings.tell_first_token(self._booking_id, wait_s)

    def release(self, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Take the whole load off again; the lengths are of a request that came to its end. Later calls do nothing."""
        self._booking.release()
        self._siblings.tell_released(self._booking_id, num_prompt_tokens, num_output_tokens)


class PeerRouters:
    """One process among its siblings. `epoch` is larger in each life of the process of this name."""

    def __init__(self, registry: Registry, *, name: str = "0", epoch: int = 0) -> None:
        self.name = name
        self.epoch = epoch
        self.send: Callable[[SiblingMessage], None] = _to_nobody
        self.waiting: Callable[[], dict[str, Waiting]] = dict  # what waits in our queues
        self.engines: dict[str, EngineEntry] = {}  # by name, those changed at run time
        # Names of engines that every process begins with: that they were removed is never forgotten. Set it before all.
        self.lasting: Collection[str] = ()
        self._registry = registry
        self._listener: PeerRouterListener | None = None
        self._sequence = 0
        self._num_bookings = 0
        self._engines_sum = 0
        self._last_version = 0  # of any word on any engine: a later word is larger, whatever is forgotten
        self._removed_s: dict[str, float] = {}  # engines whose removal will be forgotten, and since when it is known
        self._ours: dict[int, OpenRequest] = {}
        self._siblings: dict[str, _Sibling] = {}
        self._silence = IdleClock(SILENCE_S)
        registry.listen(self._on_worker)

    @property
    def stamp(self) -> Stamp:
        """What goes with each of our messages."""
        return Stamp(self.name, self.epoch, self._sequence)

    @property
    def living(self) -> list[str]:
        """Names of the siblings that were heard lately."""
        return list(self._siblings)

    @property
    def is_joined(self) -> bool:
        """Whether we know all that the living siblings have open, and they will hear what we open."""
        return all(sibling.is_synced and sibling.hears_us for sibling in self._siblings.values())

    def epoch_of(self, name: str) -> int | None:
        """The present life of a living sibling."""
        sibling = self._siblings.get(name)
        return sibling.epoch if sibling else None

    def num_on(self, worker_id: str) -> int:
        """Requests that siblings have on the worker."""
        return sum(theirs.is_on(worker_id) for theirs in self._theirs())

    def num_open(self, name: str) -> int:
        """Requests that one sibling has open."""
        sibling = self._siblings.get(name)
        return len(sibling.open) if sibling else 0

    def waiting_in(self, queue: str) -> list[Waiting]:
        """What waits in the siblings' queues of this name, one for each sibling where anything does."""
        return [sibling.waiting[queue] for sibling in self._siblings.values() if queue in sibling.waiting]

    def listen(self, listener: PeerRouterListener) -> None:
        """Tell `listener` what the siblings see."""
        self._listener = listener

    # -- what we do -------------------------------------------------------------------------------------------

    def reserve(self, load: RequestLoad, digests: Sequence[bytes] = ()) -> SharedBooking:
        """As `Registry.reserve`, and the siblings are told. `digests` are the prompt's blocks."""
        booking = self._registry.reserve(load)
        self._num_bookings += 1
        request = self._ours[self._num_bookings] = OpenRequest(self._num_bookings, load)
        self.send(Opened(self._next(), request, list(digests)))
        return SharedBooking(self, request.booking_id, booking)

    def tell_first_token(self, booking_id: int, wait_s: float | None) -> None:
        """Of a `SharedBooking`: its prompt is computed."""
        request = self._ours.get(booking_id)
        if request is not None and not request.has_first_token:
            self._ours[booking_id] = _with_first_token(request)
            self.send(FirstToken(self._next(), booking_id, wait_s))
            self._registry.notify_progress()

    def tell_released(self, booking_id: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Of a `SharedBooking`: its request has ended."""
        if self._ours.pop(booking_id, None) is not None:
            self.send(Released(self._next(), booking_id, num_prompt_tokens, num_output_tokens))
            self._registry.notify_progress()

    def set_engine(self, name: str, spec: dict[str, Any] | None) -> None:
        """Say the latest word on an engine: its spec, or None for removed."""
        # With the epoch in it, so that what another life of ours said is never taken for the same.
        entry = EngineEntry(name, self._last_version + 1, f"{self.name}/{self.epoch}", spec)
        self._note_engine(entry)
        self.send(EngineSet(self._next(), entry))

    def tick(self, now: float) -> None:
        """Say that we live, and forget who does not. Call it every `BEAT_INTERVAL_S`."""
        self._beat()
        self._silence.look(now, BEAT_INTERVAL_S)
        for name, sibling in list(self._siblings.items()):
            if self._silence.is_idle(sibling.heard_s, now):
                self._forget(name)
        self._forget_removed(now)

    def leave(self) -> None:
        """Say that we end."""
        self.send(Left(self.stamp))

    # -- what others do -----------------------------------------------------------------------------------------

    def receive(self, message: SiblingMessage, now: float) -> None:
        """Take in one message. Our own, and those of an earlier life of a sibling, are ignored."""
        stamp = message.stamp
        sibling = self._sibling(stamp, now)
        if sibling is None:
            return
        sibling.heard_s = now
        if isinstance(message, Left):
            self._forget(stamp.sender)
            return
        if isinstance(message, Snapshot):
            self._take_snapshot(sibling, message)
        elif isinstance(message, Opened | FirstToken | Released | EngineSet):
            self._take_change(sibling, message)
        elif stamp.sequence != sibling.sequence:
            sibling.is_synced = False
        if isinstance(message, Beat):
            sibling.hears_us = (self.name, self.epoch) in message.heard
            sibling.waiting = message.waiting
        # Who told the sender of an engine may be gone, so its own count of changes does not show that we missed it.
        is_ahead = isinstance(message, Beat) and message.engines_sum != self._engines_sum
        if (is_ahead or not sibling.is_synced) and now - sibling.asked_s >= BEAT_INTERVAL_S:
            sibling.asked_s = now
            self.send(SnapshotWanted(self.stamp, stamp.sender))
        if isinstance(message, SnapshotWanted) and message.of == self.name:
            self.send(Snapshot(self.stamp, list(self._ours.values()), list(self.engines.values())))

    def check_integrity(self) -> None:
        """Raise AssertionError unless the registry has exactly the bookings that are known here, ours and theirs."""
        booked = sum(theirs.booking is not None for theirs in self._theirs())
        found, known = self._registry.num_bookings, booked + len(self._ours)
        assert found == known, f"{found} bookings on the registry, {len(self._ours)} ours and {booked} of siblings"

    def _sibling(self, stamp: Stamp, now: float) -> _Sibling | None:
        """Who sent this; None for ourselves and for those who are no more."""
        if stamp.sender == self.name:
            return None
        sibling = self._siblings.get(stamp.sender)
        if sibling is not None and stamp.epoch < sibling.epoch:
            return None
        if sibling is None or stamp.epoch > sibling.epoch:
            self._forget(stamp.sender)
            sibling = self._siblings[stamp.sender] = _Sibling(stamp.epoch, now)
            self._beat()  # whoever joins need not wait for the next one
        return sibling

    def _take_change(self, sibling: _Sibling, change: _Change) -> None:
        if change.stamp.sequence != sibling.sequence + 1 or not sibling.is_synced:
            sibling.is_synced = sibling.is_synced and change.stamp.sequence <= sibling.sequence
            return
        sibling.sequence += 1
        if isinstance(change, Opened):
            self._open(sibling, change.request)
            if self._listener is not None:
                self._listener.sibling_opened(change.request.load, change.digests)
        elif isinstance(change, FirstToken):
            self._first_token(sibling, change)
        elif isinstance(change, Released):
            self._close(sibling, change.booking_id)
            if self._listener is not None and change.num_output_tokens:
                self._listener.sibling_ended(change.num_prompt_tokens, change.num_output_tokens)
        else:
            self._set_engine(change.entry)

    def _take_snapshot(self, sibling: _Sibling, snapshot: Snapshot) -> None:
        """Have open what it has open; what is known of it stays, so that nothing is counted as placed again."""
        sibling.sequence, sibling.is_synced = snapshot.stamp.sequence, True
        requests = {request.booking_id: request for request in snapshot.requests}
        for booking_id in sibling.open.keys() - requests.keys():
            self._close(sibling, booking_id)
        for booking_id, request in requests.items():
            if booking_id not in sibling.open:
                self._open(sibling, request)
            elif request.has_first_token:
                self._prefill_done(sibling.open[booking_id])
        for entry in snapshot.engines:
            self._set_engine(entry)

    def _set_engine(self, entry: EngineEntry) -> None:
        known = self.engines.get(entry.name)
        self._last_version = max(self._last_version, entry.version)
        if known is None and not self._counts(entry):
            return  # forgotten here, or never known
        if known is None or entry.order > known.order:
            self._note_engine(entry)
            if self._listener is not None:
                self._listener.sibling_engine(entry)

    def _note_engine(self, entry: EngineEntry) -> None:
        self.engines[entry.name] = entry
        self._last_version = max(self._last_version, entry.version)
        orders = sorted((one.name, *one.order) for one in self.engines.values() if self._counts(one))
        self._engines_sum = zlib.crc32(msgspec.msgpack.encode(orders))

    def _counts(self, entry: EngineEntry) -> bool:
        """Whether it says more than nothing does. Who missed another removal still counts the engine, and so asks."""
        return entry.spec is not None or entry.name in self.lasting

    def _forget_removed(self, now: float) -> None:
        removed = [entry.name for entry in self.engines.values() if not self._counts(entry)]
        self._removed_s = {name: self._removed_s.get(name, now) for name in removed}
        for name, since_s in list(self._removed_s.items()):
            if now - since_s > REMOVED_S:
                del self.engines[name], self._removed_s[name]

    def _open(self, sibling: _Sibling, request: OpenRequest) -> None:
        theirs = sibling.open[request.booking_id] = _Theirs(request)
        self._book(theirs)

    def _first_token(self, sibling: _Sibling, change: FirstToken) -> None:
        theirs = sibling.open.get(change.booking_id)
        if theirs is None:
            return
        if self._listener is not None and change.wait_s is not None:
            self._listener.sibling_first_token(theirs.request.load, change.wait_s)
        self._prefill_done(theirs)

    def _prefill_done(self, theirs: _Theirs) -> None:
        theirs.request = _with_first_token(theirs.request)
        if theirs.booking is not None:
            theirs.booking.prefill_done()
            self._registry.notify_progress()

    def _close(self, sibling: _Sibling, booking_id: int) -> None:
        theirs = sibling.open.pop(booking_id, None)
        if theirs is not None and theirs.booking is not None:
            theirs.booking.release()
            self._registry.notify_progress()

    def _forget(self, name: str) -> None:
        sibling = self._siblings.pop(name, None)
        if sibling is not None:
            for booking_id in list(sibling.open):
                self._close(sibling, booking_id)

    def _book(self, theirs: _Theirs) -> None:
        """Count a sibling's load on its workers, if they are here."""
        load = theirs.request.load
        if self._registry.get(load.prefill) is None or self._registry.get(load.decode) is None:
            return
        theirs.booking = self._registry.reserve(load)
        if theirs.request.has_first_token:
            theirs.booking.prefill_done()

    def _on_worker(self, change: WorkerChange) -> None:
        """A worker that joins brings no load of its former life here; what siblings have on it is counted on it."""
        if change.before is not None:
            return
        worker_id = change.worker.worker_id
        for theirs in self._theirs():
            if theirs.is_on(worker_id):
                if theirs.booking is not None:
                    theirs.booking.release()
                    theirs.booking = None
                self._book(theirs)

    def _theirs(self) -> Iterator[_Theirs]:
        for sibling in self._siblings.values():
            yield from sibling.open.values()

    def _beat(self) -> None:
        heard = [(name, sibling.epoch) for name, sibling in self._siblings.items()]
        self.send(Beat(self.stamp, self._engines_sum, heard, self.waiting()))

    def _next(self) -> Stamp:
        self._sequence += 1
        return self.stamp


def _with_first_token(request: OpenRequest) -> OpenRequest:
    return msgspec.structs.replace(request, has_first_token=True)


def _to_nobody(_: SiblingMessage) -> None:
    """Of a process that is alone."""
