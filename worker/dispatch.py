"""Routes each message to a part of the worker, and handles messages and requests that raise."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.engine.sequence import Sequence
from tandem.engine.sequence_factory import CheckedPrompt
from tandem.kv_transfer.links import LinkChange
from tandem.kv_transfer.transport.base import Notification
from tandem.protocol.errors import InternalError, RequestError, ServingError
from tandem.protocol.fault_boundary import error_of
from tandem.protocol.messages import (
    CANCELLED,
    INVALID_REQUEST,
    Cancel,
    CopyKv,
    Decode,
    Generate,
    Hello,
    Introduce,
    Message,
    Pin,
    PinQuery,
    Prefill,
    ReadDone,
    ReadGrant,
    ReadRequest,
    RequestPart,
    SnapshotRequest,
    TurnEnd,
    Unpin,
)
from tandem.runtime.dropped import DropReason
from tandem.worker.assembly import WorkerParts
from tandem.worker.handoff_messages import HandoffMessages
from tandem.worker.long_prompts import LongRequest
from tandem.worker.reporter import StatusReporter

logger = logging.getLogger(__name__)


class MessageDispatcher:
    """Hands messages to a worker's parts. An error in one of them ends at most a request, never the worker."""

    def __init__(self, parts: WorkerParts, reporter: StatusReporter) -> None:
        self._parts = parts
        self._reporter = reporter
        self._handoffs = HandoffMessages(parts.links, parts.prefill, parts.decode)

    def take(self, identity: bytes, message: Message, now: float) -> None:
        """Handle one message that came from `identity`."""
        self._guarded(message, self._handle, identity, message, now)

    def take_notification(self, notification: Notification, now: float) -> None:
        """Handle one notification of a peer's write."""
        self._guarded(notification, self._parts.decode.notified, notification, now)

    def begin_long(self, now: float) -> None:
        """Begin the requests whose long prompts have become ready."""
        for one in self._parts.long_prompts.take_ready():
            self._guarded(one.request, self._begin, one.request.request_ids, self._begin_long, one, now)
            for name in one.cancelled:
                self._cancel(name)

    def _guarded(self, cause: Message | Notification, handle: Callable[..., None], *args: object) -> None:
        """Handle a message or a notification. If that raises, its request ends; a notification's lease runs out."""
        if (error := error_of(handle, *args)) is not None:
            self._parts.dropped.add(DropReason.FAILED, f"a {type(cause).__name__}: {error!r}", exc_info=error)
            for request_id in _answers(cause):
                self.give_up(request_id, error)

    def give_up(self, request_id: str, error: Exception, sequence: Sequence | None = None) -> None:
        """End a request that met an error, wherever it is: tell its client, and free its blocks."""
        if isinstance(error, RequestError):  # the client's fault, such as a grammar that costs too much
            message, code = error.message, error.code or INVALID_REQUEST
        else:
            self._reporter.num_errors += 1
            message = f"{type(error).__name__} while it was worked on; the worker's log has more"
            code = InternalError.code or ""
        self._parts.replies.fail(request_id, message, code, sequence)
        parts = self._parts
        for cancel in (self._stop_computing, parts.decode.cancel, parts.copies.cancel):
            if (left := error_of(cancel, request_id)) is not None:
                logger.error("request %s left something behind", request_id, exc_info=left)

    def obey(self, router_key: str) -> None:
        """Serve another router from now on. What the former one asked for ends: nobody waits for it."""
        self._parts.sockets.obey(router_key)
        for request_id in self._parts.replies.forget_routers():
            self._cancel(request_id)

    def send_events(self) -> None:
        """Tell the routers and the pins which blocks came and went."""
        changes = self._parts.cache.take_events()
        for place, (stored, removed) in changes.items():
            self._parts.pins.changed(place, stored, removed)
        self._parts.replies.send_events(changes)

    def link_changed(self, change: LinkChange | None, now: float) -> None:
        """As `HandoffMessages.link_changed`."""
        self._handoffs.link_changed(change, now)

    def _handle(self, identity: bytes, message: Message, now: float) -> None:
        parts = self._parts
        match message:
            case Generate() | Prefill() | Decode() | CopyKv():
                self._meet_peers(message)
                self._accept(identity, message, now)
            case Introduce():
                for peer in message.peers:
                    parts.sockets.introduce(peer)
            case Cancel():
                if message.is_confirmed:
                    parts.replies.fail(message.request_id, "it was cancelled", CANCELLED)
                self._cancel(message.request_id)
            case ReadRequest():
                parts.links.remember(message.sender)
                parts.lender.requested(message, now)
            case ReadGrant():
                parts.reader.granted(message, now)
            case ReadDone():
                parts.lender.done(message)
            case Hello():
                for request_id in parts.replies.welcome(identity, message, self._reporter.card):
                    self._cancel(request_id)
            case TurnEnd():
                parts.cache.note_end(message.digests, has_calls=message.has_calls, is_demoted=message.is_demoted)
            case SnapshotRequest():
                self._send_snapshots(identity, message.places)
            case Pin():
                parts.pins.pin(message, now)
            case Unpin():
                parts.pins.unpin(message.pin_id)
            case PinQuery():
                parts.replies.send(identity, parts.pins.report(message.query_id, message.pin_ids))
            case _:
                if not self._handoffs.take(message, now):
                    logger.warning("ignored a %s", type(message).__name__)

    def _meet_peers(self, request: RequestPart) -> None:
        """Also introduce the peers that a request names: an `Introduce` can be lost with a connection."""
        if isinstance(request, Prefill):
            self._parts.sockets.introduce(request.decode_worker)
        if isinstance(request, CopyKv):
            self._parts.sockets.introduce(request.source)
        elif isinstance(request, Decode):
            self._parts.sockets.introduce(request.prefill_worker)
        elif request.kv_holder is not None:
            self._parts.sockets.introduce(request.kv_holder.worker)

    def _accept(self, identity: bytes, request: RequestPart, now: float) -> None:
        names, replies = _answers(request), self._parts.replies
        opened = [name for name in names if not self._is_here(name) and replies.open(name, identity)]
        if len(opened) < len(names):
            for name in opened:
                replies.forget(name)
            for name in names:
                replies.refuse(identity, name, f"request id {name} is in use")
            return
        if isinstance(request, CopyKv):
            self._begin(names, self._parts.copies.accept, request, now)
        elif request.packed_ids:
            self._parts.long_prompts.begin(request)
        else:
            self._begin(names, self._compute, request, now)

    def _is_here(self, name: str) -> bool:
        """Whether a request of this name is still here, though nothing more may be said about it."""
        return self._parts.prefill.has(name) or self._parts.long_prompts.has(name)

    def _begin(self, names: list[str], begin: Callable[..., None], *args: object) -> None:
        """Begin a request with answers of these names. If it cannot be taken, they fail."""
        try:
            begin(*args)
        except RequestError as exc:
            for name in names:
                self._parts.replies.fail(name, exc.message, exc.code or INVALID_REQUEST)
        except ServingError as exc:
            for name in names:
                self._parts.replies.fail(name, exc.message, exc.code or "")

    def _begin_long(self, one: LongRequest, now: float) -> None:
        outcome = one.outcome.result()
        if isinstance(outcome, Exception):
            raise outcome
        self._compute(one.request, now, outcome)

    def _compute(self, request: Generate | Prefill | Decode, now: float, prompt: CheckedPrompt | None = None) -> None:
        if isinstance(request, Prefill):
            self._parts.prefill.accept(request, now, prompt)
        elif isinstance(request, Decode):
            self._parts.decode.accept(request, now, prompt)
        else:
            sequence = self._parts.engine.factory.sequence_of(request, now, prompt=prompt)
            sequence.kv_holder = request.kv_holder
            self._parts.engine.add(sequence)

    def _cancel(self, request_id: str) -> None:
        self._parts.replies.forget(request_id)
        self._parts.long_prompts.cancel(request_id)
        self._stop_computing(request_id)
        self._parts.decode.cancel(request_id)
        self._parts.copies.cancel(request_id)

    def _stop_computing(self, request_id: str) -> None:
        """Stop the request in the engine. The prefill role does so itself: other answers may need the prompt."""
        if not self._parts.prefill.cancel(request_id):
            self._parts.engine.abort(request_id)

    def _send_snapshots(self, identity: bytes, places: list[str]) -> None:
        self.send_events()  # pending events belong before the snapshots, not after them
        for place in places:
            self._parts.replies.send_snapshot(identity, place, self._parts.cache.digests(place))


def _answers(cause: Message | Notification) -> list[str]:
    """The names of all answers that a message is about: of a request and its forks."""
    if isinstance(cause, Generate | Prefill | Decode):
        return cause.request_ids
    return [getattr(cause, "request_id", "")]
