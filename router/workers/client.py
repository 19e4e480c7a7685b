"""The router's sockets: for each worker one DEALER for requests and tokens, and one SUB for heartbeats.

Passes the workers' messages to registry, index and cost model, and tokens to the requests that wait for them. A worker
that is dead, silent or removed fails its requests at once. Decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import (
    ContextLengthExceeded,
    IncompatiblePeer,
    InternalError,
    PeerLost,
    RequestError,
    ServingError,
    TransferError,
    TransferTimeout,
    WorkerError,
    WorkerLost,
)
from tandem.protocol.fault_boundary import error_of
from tandem.protocol.grammar import GrammarError
from tandem.protocol.messages import (
    CANCELLED,
    INVALID_REQUEST,
    BlockEvents,
    BlockSnapshot,
    Heartbeat,
    Hello,
    Introduce,
    PeerAddress,
    Pin,
    PinQuery,
    PinReport,
    RequestFailed,
    RequestPart,
    SequenceDelta,
    StepOutput,
    TurnEnd,
    Unpin,
    Welcome,
    WorkerCard,
    WorkerMessage,
    WorkerState,
    decode_heartbeat,
    decode_worker_message,
)
from tandem.router.streams import DeltaQueue
from tandem.router.workers.index_feed import IndexFeed
from tandem.router.workers.link import Link, Stopped, SubRequest
from tandem.router.workers.load_recorder import LoadRecorder
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.curve import KeyPair, connect_to_worker, make_keys
from tandem.runtime.dropped import DropReason
from tandem.runtime.idle_timeout import CHECKS, IdleClock, answered_in_time
from tandem.runtime.message_socket import MessageSocket
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry

logger = logging.getLogger(__name__)

T = TypeVar("T")

_HEARTBEATS_MISSED = 2  # one may be late

_ERRORS: dict[str | None, type[ServingError]] = {
    error.code: error
    for error in (
        ContextLengthExceeded,
        GrammarError,
        IncompatiblePeer,
        InternalError,
        PeerLost,
        TransferError,
        TransferTimeout,
        WorkerError,
    )
}
_ERRORS[INVALID_REQUEST] = RequestError


def _error_of(worker_id: str, failed: RequestFailed) -> ServingError:
    text = f"worker {worker_id}: {failed.message}"
    if failed.code == WorkerLost.code:
        return WorkerLost(text, worker_id=worker_id)
    error = _ERRORS.get(failed.code, WorkerError)(text, code=failed.code or None)
    error.num_computed_tokens, error.grammar_s = failed.num_computed_tokens, failed.grammar_s
    return error


class WorkerClient:
    """Links to all workers. Used from one event loop only."""

    def __init__(
        self,
        registry: Registry,
        index: PrefixIndex,
        costs: CostModel,
        config: RouterConfig,
        *,
        keys: KeyPair | None = None,
        heartbeat_interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`heartbeat_interval_s` is that of the workers."""
        self._registry = registry
        self._config = config
        self._router_id = f"router-{uuid.uuid4().hex[:12]}"
        self._keys = keys or make_keys()
        self._missed_s = _HEARTBEATS_MISSED * heartbeat_interval_s
        self._clock = clock
        self._links: dict[str, Link] = {}
        self._recorder = LoadRecorder(registry, costs)
        self._feed = IndexFeed(registry, index)
        self._background = BackgroundTasks()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    @property
    def public_key(self) -> str:
        """The key by which a worker admits this router: its `WorkerConfig.router_key`."""
        return self._keys.public

    @property
    def num_open_sub_requests(self) -> int:
        """Parts of requests that run on the workers."""
        return sum(len(link.sub_requests) for link in self._links.values())

    async def start(self) -> None:
        """Start to watch for silent workers."""
        self._background.keep("watch of the workers", self._watch)

    async def close(self) -> None:
        """Fail what is running and close every socket."""
        for worker_id in list(self._links):
            self.mark_dead(worker_id, "router is closing")
        await self._background.close()
        self._context.term()

    async def add_worker(self, address: PeerAddress) -> WorkerCard:
        """Connect to a worker and make it READY. An earlier epoch of the worker is given up.

        Raises `WorkerError` if it does not answer in time or dies meanwhile, and `IncompatiblePeer` if it refuses this
        router or cannot serve beside the other workers.
        """
        self.mark_dead(address.worker_id, f"replaced by epoch {address.epoch}")
        try:  # the sockets' queues need no limit: bookings limit them, and so does the end of a silent link
            dealer, subscriber = connect_to_worker(self._context, self._keys, address, max_queued=0)
        except zmq.ZMQError as exc:
            raise WorkerError(f"{address} cannot be connected to: {exc}") from exc
        messages = MessageSocket(dealer, lambda frames: self.receive(link, frames[-1]))
        heartbeats = MessageSocket(subscriber, lambda frames: self._on_heartbeat(link, frames[-1]))
        link = Link(address, messages, heartbeats)
        self.attach(link)
        link.send(Hello(router_id=self._router_id))
        timeout_s = self._config.worker_timeout_s
        try:
            if not await answered_in_time(link.welcome, timeout_s):
                raise WorkerError(
                    f"worker {address.worker_id} at {address.endpoint} did not answer within "
                    f"worker_timeout_s={timeout_s}"
                )
            return link.welcome.result()
        finally:
            if self._registry.get(address.worker_id) is None:
                self._leave(link, "did not join")

    def attach(self, link: Link) -> None:
        """Serve a link, whose worker joins with its `Welcome`."""
        self._links[link.worker_id] = link

    async def remove_worker(self, worker_id: str) -> None:
        """Send a worker nothing new, wait up to `drain_timeout_s` for what it runs, and disconnect."""
        link = self._links.get(worker_id)
        if link is None:
            return
        self._registry.set_state(worker_id, WorkerState.DRAINING, "removed")
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await link.idle.wait()
        except TimeoutError:
            logger.warning("worker %s still runs %d requests after draining", worker_id, len(link.sub_requests))
        self._leave(link, "removed")

    def mark_dead(self, worker_id: str, reason: str) -> None:
        """Fail all requests of a worker now and forget it; ignore unknown ids. Call it in the event loop."""
        if (link := self._links.get(worker_id)) is not None:
            self._leave(link, reason)

    def open_sub_request(self, worker_id: str, request: RequestPart, queue: DeltaQueue[SequenceDelta]) -> SubRequest:
        """Send a request's part to a worker; its tokens go to `queue`. Raises `WorkerError` when the worker is gone."""
        return self._live_link(worker_id).open_sub_request(request, queue, self._clock())

    def join_sub_request(self, worker_id: str, request_id: str, queue: DeltaQueue[SequenceDelta]) -> SubRequest:
        """Expect the tokens of a fork, whose request is a part of another one. Raises as `open_sub_request`."""
        return self._live_link(worker_id).join_sub_request(request_id, queue, self._clock())

    def send(self, worker_id: str, message: Pin | Unpin | TurnEnd) -> None:
        """Send a worker a message that needs no answer, unless the worker is gone. Does not wait."""
        if (link := self._links.get(worker_id)) is not None:
            link.send(message)

    async def query_pins(self, pin_ids: list[str], timeout_s: float) -> dict[str, dict[str, dict[str, int]]]:
        """Ask all workers about pins. Returns leading blocks by worker, pin and place; late workers are left out."""
        query_id = uuid.uuid4().hex
        links = list(self._links.values())
        for link in links:
            link.pin_reports[query_id] = asyncio.get_running_loop().create_future()
            link.send(PinQuery(query_id=query_id, pin_ids=pin_ids))
        asked = {link.worker_id: link.pin_reports[query_id] for link in links}
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=timeout_s)
        finally:
            for link in links:
                link.pin_reports.pop(query_id).cancel()
        return {
            worker_id: report.result().held
            for worker_id, report in asked.items()
            if report.done() and not report.cancelled()
        }

    def receive(self, link: Link, data: bytes) -> None:
        """Handle a message from a worker. One that is malformed or cannot be handled is dropped and counted."""
        self._take(link, decode_worker_message, self._dispatch, data)

    def _live_link(self, worker_id: str) -> Link:
        link = self._links.get(worker_id)
        if link is None:
            raise WorkerError(f"worker {worker_id} is gone")
        return link

    def _take(self, link: Link, decode: Callable[[bytes], T], handle: Callable[[Link, T], None], data: bytes) -> None:
        try:
            message = decode(data)
        except msgspec.DecodeError as exc:
            link.dropped.add(DropReason.MALFORMED, f"from {link.worker_id}: {exc}")
            return
        # Whatever it raises, other requests go on. After heartbeats that cannot be handled, silence ends the worker.
        if (error := error_of(handle, link, message)) is not None:
            link.dropped.add(DropReason.FAILED, f"from {link.worker_id}: {error!r}", exc_info=error)
            lost = WorkerError(f"tokens of worker {link.worker_id} could not be handled; see the log")
            for delta in message.deltas if isinstance(message, StepOutput) else ():
                if (sub_request := link.sub_requests.get(delta.request_id)) is not None:
                    sub_request.fail(lost)

    def _leave(self, link: Link, reason: str) -> None:
        worker_id = link.worker_id
        if self._links.get(worker_id) is not link:
            return
        del self._links[worker_id]
        silent_since_s = self._silent_since_s(worker_id)
        try:
            self._registry.set_state(worker_id, WorkerState.DEAD, reason)
            self._feed.forget(link, self._links.values(), self._clock())
        finally:  # whatever fails above, no request waits for this worker any more
            link.fail(f"worker {worker_id} is gone: {reason}", silent_since_s)

    def _silent_since_s(self, worker_id: str) -> float:
        """When a living worker would have been heard again. Its heartbeats go on while it computes or hangs."""
        worker = self._registry.get(worker_id)
        return math.inf if worker is None else worker.last_seen_s + self._missed_s

    def _dispatch(self, link: Link, message: WorkerMessage) -> None:
        match message:
            case StepOutput():
                self._on_step(link, message)
            case BlockEvents() | BlockSnapshot() if not link.is_of(message):
                text = f"{link.worker_id} spoke of {message.worker_id} epoch {message.epoch}"
                link.dropped.add(DropReason.IMPOSTOR, text)
            case BlockEvents() | BlockSnapshot():
                self._feed.apply(link, message, self._clock())
            case PinReport():
                report = link.pin_reports.get(message.query_id)
                if report is not None and not report.done():
                    report.set_result(message)
            case RequestFailed():
                if (sub_request := link.sub_requests.get(message.request_id)) is not None:
                    is_stopped = sub_request.is_stopping and message.code == CANCELLED
                    sub_request.fail(Stopped() if is_stopped else _error_of(link.worker_id, message))
            case Welcome():
                self._on_welcome(link, message)

    def _on_step(self, link: Link, output: StepOutput) -> None:
        self._recorder.record_step(link.worker_id, link.kind, output, self._clock())
        for delta in output.deltas:
            # A cancelled request may still get tokens.
            if (sub_request := link.sub_requests.get(delta.request_id)) is not None:
                sub_request.deliver(delta)

    def _on_welcome(self, link: Link, welcome: Welcome) -> None:
        if link.welcome.done():
            return
        reason = welcome.refusal or self._disagreement(link, welcome.card)
        if reason:
            link.welcome.set_exception(IncompatiblePeer(f"worker {link.worker_id} cannot join: {reason}"))
            return
        link.kind = welcome.card.kind
        now = self._clock()
        self._registry.add(welcome.card, now)
        link.tiers = welcome.card.tiers
        self._feed.follow(link, now)
        self._introduce(link)
        self._registry.set_state(link.worker_id, WorkerState.READY, "welcomed us")
        link.welcome.set_result(welcome.card)

    def _introduce(self, link: Link) -> None:
        """Introduce a worker and the others to each other, so that they may exchange KV."""
        others = [other for other in self._links.values() if other is not link and other.kind]
        link.send(Introduce(peers=[other.address for other in others]))
        for other in others:
            other.send(Introduce(peers=[link.address]))

    def _disagreement(self, link: Link, card: WorkerCard) -> str:
        """Why this worker cannot serve beside the others; empty if it can."""
        peer = card.address
        if peer.process != link.address.process:
            return f"expected epoch {link.address.epoch}, found {peer.worker_id} epoch {peer.epoch} at its endpoint"
        for other in self._registry:
            if other.card.kernels != card.kernels:
                return (
                    f"its KV is computed by {card.kernels!r}, that of worker {other.worker_id} by "
                    f"{other.card.kernels!r}; TANDEM_CPU_KERNELS names kernels that all CPUs have"
                )
            for name in ("model", "namespace", "block_size"):
                ours, theirs = getattr(other.card, name), getattr(card, name)
                if ours != theirs:
                    return f"{name} is {theirs!r}, but {ours!r} on worker {other.worker_id}"
        return ""

    def _on_heartbeat(self, link: Link, data: bytes) -> None:
        self._take(link, decode_heartbeat, self._handle_heartbeat, data)

    def _handle_heartbeat(self, link: Link, message: Heartbeat) -> None:
        if link.is_of(message):
            self._recorder.record_heartbeat(message, link.dropped.counts, self._clock())
        else:
            text = f"{link.worker_id} sent a heartbeat of {message.worker_id} epoch {message.epoch}"
            link.dropped.add(DropReason.IMPOSTOR, text)

    async def _watch(self) -> None:
        """Pass over workers that fall silent, give up those that stay so or are stuck, and request late snapshots."""
        timeout_s = self._config.worker_timeout_s
        idle_clock = IdleClock(timeout_s)
        idle_clock.check(self._clock(), timeout_s / CHECKS)
        while True:
            await asyncio.sleep(timeout_s / CHECKS)
            now = self._clock()
            idle_clock.check(now, timeout_s / CHECKS)
            for worker in list(self._registry):
                if idle_clock.is_idle(worker.last_seen_s, now):
                    self.mark_dead(worker.worker_id, f"silent for {idle_clock.idle_s(worker.last_seen_s, now):.1f} s")
                elif worker.progress_age_s > self._config.worker_stall_timeout_s:
                    self.mark_dead(worker.worker_id, f"stuck: its step or loop began {worker.progress_age_s:.1f} s ago")
                elif idle_clock.idle_s(worker.last_seen_s, now) > self._missed_s:
                    self._registry.note_silence(worker.worker_id)
            for link in self._links.values():
                self._feed.request_overdue(link, now, timeout_s)
