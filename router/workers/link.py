"""The router's connection to one worker, and the parts of requests that run there."""

from __future__ import annotations

import asyncio

from tandem.protocol.errors import ServingError, WorkerError, WorkerLost
from tandem.protocol.messages import (
    BlockEvents,
    BlockSnapshot,
    Cancel,
    Heartbeat,
    PeerAddress,
    PinReport,
    RequestPart,
    RouterMessage,
    SequenceDelta,
    WorkerCard,
    WorkerEpoch,
    encode_message,
)
from tandem.router.streams import DeltaQueue, Interrupted
from tandem.runtime.dropped import DroppedMessages
from tandem.runtime.message_socket import MessageSocket


class Stopped(Interrupted):
    """A worker has stopped its part of a request, as it was asked to; all its tokens came before this."""


class SubRequest:
    """One worker's part of a request. It is open until it finishes, fails, or is closed or cancelled here."""

    def __init__(self, link: Link, request_id: str, queue: DeltaQueue[SequenceDelta], sent_s: float) -> None:
        self.has_delivered = False  # whether the worker has sent tokens
        self.is_stopping = False  # whether the worker was asked to stop, and to say so
        self.sent_s = sent_s
        self._link = link
        self._request_id = request_id
        self._queue = queue

    @property
    def worker_id(self) -> str:
        """The worker that does this part."""
        return self._link.worker_id

    @property
    def is_open(self) -> bool:
        """Whether tokens or an error may still arrive."""
        return self._link.sub_requests.get(self._request_id) is self

    def close(self) -> None:
        """Expect nothing more from the worker, which is done or gone."""
        if self.is_open:
            self._link.drop_sub_request(self._request_id)

    def stop(self) -> None:
        """Tell the worker to stop after the current step, unless it has finished; `Stopped` follows its tokens."""
        if self.is_open:
            self.is_stopping = True
            self._link.send(Cancel(request_id=self._request_id, is_confirmed=True))

    def cancel(self) -> None:
        """Tell the worker to stop, unless it has finished. Does not wait."""
        if self.is_open:
            self.close()
            if not self.is_stopping:
                self._link.send(Cancel(request_id=self._request_id))

    def deliver(self, delta: SequenceDelta) -> None:
        """Pass tokens on to the request; the last ones close the sub-request."""
        self.has_delivered = True
        if delta.finish_reason is not None:
            self.close()
        self._queue.put(delta)

    def fail(self, error: ServingError | Stopped) -> None:
        """Close the sub-request and end the request with this error."""
        self.close()
        self._queue.fail(error)


class Link:
    """The sockets to one worker, and the sub-requests open on it."""

    def __init__(self, address: PeerAddress, messages: MessageSocket, heartbeats: MessageSocket) -> None:
        self.address = address
        self.sub_requests: dict[str, SubRequest] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self.welcome: asyncio.Future[WorkerCard] = asyncio.get_running_loop().create_future()
        self.kind = ""  # known from the welcome on
        self.tiers: dict[str, str] = {}  # known from the welcome on
        self.places: set[str] = set()  # places that the index follows
        self.snapshots_due: set[str] = set()  # places whose snapshot was requested and has not arrived
        self.snapshot_requested_s = 0.0
        self.pin_reports: dict[str, asyncio.Future[PinReport]] = {}  # awaited, by query
        self.dropped = DroppedMessages()  # messages from the worker that were not handled
        self._messages = messages
        self._heartbeats = heartbeats

    @property
    def worker_id(self) -> str:
        """The worker's name."""
        return self.address.worker_id

    def send(self, message: RouterMessage) -> None:
        """Queue a message. Never blocks: the queue has no limit, and silence ends the link."""
        self._messages.send(encode_message(message))

    def open_sub_request(self, request: RequestPart, queue: DeltaQueue[SequenceDelta], now: float) -> SubRequest:
        """Send the worker its part of a request; its tokens go to `queue`."""
        sub_request = self.join_sub_request(request.request_id, queue, now)
        self.send(request)
        return sub_request

    def join_sub_request(self, name: str, queue: DeltaQueue[SequenceDelta], now: float) -> SubRequest:
        """Expect the worker's part of a request that it gets as a fork of another one; its tokens go to `queue`."""
        assert name not in self.sub_requests, f"request {name} is already on {self.worker_id}"
        sub_request = self.sub_requests[name] = SubRequest(self, name, queue, now)
        self.idle.clear()
        return sub_request

    def is_of(self, message: BlockEvents | BlockSnapshot | Heartbeat) -> bool:
        """Whether the message names this worker and epoch as its sender."""
        return WorkerEpoch(message.worker_id, message.epoch) == self.address.process

    def drop_sub_request(self, request_id: str) -> None:
        """Forget an open sub-request."""
        del self.sub_requests[request_id]
        if not self.sub_requests:
            self.idle.set()

    def fail(self, message: str, silent_since_s: float) -> None:
        """Close the sockets and fail every sub-request. Nothing that was sent in the silence was read."""
        self._messages.close()
        self._heartbeats.close()
        for sub_request in list(self.sub_requests.values()):
            may_have_read = sub_request.sent_s <= silent_since_s
            sub_request.fail(WorkerLost(message, worker_id=self.worker_id, may_have_read=may_have_read))
        if not self.welcome.done():
            self.welcome.set_exception(WorkerError(message))
        for report in self.pin_reports.values():
            report.cancel()
        self.welcome.exception()  # marks it as retrieved: maybe no task waits for it
