"""The router's sockets: one DEALER per worker for requests and tokens, and one SUB for its heartbeats.

Feeds what workers say to registry, index and cost model, and tokens to the request that waits for them. A worker that
is dead, silent or removed fails its requests at once. Decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Collection, Mapping

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
)
from tandem.protocol.messages import (
    INVALID_REQUEST,
    POOL_PLACE,
    BlockEvents,
    BlockSnapshot,
    Cancel,
    Decode,
    Generate,
    Heartbeat,
    Hello,
    Introduce,
    LinkLoad,
    PeerAddress,
    Pin,
    PinQuery,
    PinReport,
    Prefill,
    RequestFailed,
    RouterMessage,
    SequenceDelta,
    SnapshotRequest,
    StepOutput,
    Unpin,
    Welcome,
    WorkerCard,
    WorkerMessage,
    WorkerState,
    decode_heartbeat,
    decode_worker_message,
    encode_message,
    holder_name,
)
from tandem.router.streams import DeltaQueue
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.curve import KeyPair, connect_to_worker, make_keys
from tandem.runtime.dropped import DroppedMessages, DropReason
from tandem.runtime.idle_timeout import LOOKS, IdleClock, answered_in_time
from tandem.runtime.message_socket import MessageSocket
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.prefix_index import PrefixIndex
from tandem.scheduling.registry import Registry

__all__ = ["Leg", "WorkerClient"]

logger = logging.getLogger(__name__)

# Between two steps of a kind of worker that are learned from. Five coefficients are known as well from 500 of thousands
# of steps a second, and learning from one takes longer than all else about it.
LEARN_INTERVAL_S = 2e-3

_ERRORS: dict[str | None, type[ServingError]] = {
    error.code: error
    for error in (
        ContextLengthExceeded,
        IncompatiblePeer,
        InternalError,
        PeerLost,
        TransferError,
        TransferTimeout,
        WorkerError,
    )
}
_ERRORS[INVALID_REQUEST] = RequestError


class Leg:
    """One worker's part in a request. It is open until it finished, failed, or was closed or cancelled here."""

    def __init__(self, link: _Link, request_id: str, queue: DeltaQueue[SequenceDelta]) -> None:
        self.has_delivered = False  # whether the worker has sent tokens
        self._link = link
        self._request_id = request_id
        self._queue = queue

    @property
    def worker_id(self) -> str:
        """The worker that does this part."""
        return self._link.worker_id

    @property
    def is_open(self) -> bool:
        """Whether news may still come."""
        return self._link.legs.get(self._request_id) is self

    def close(self) -> None:
        """Expect nothing more from the worker, which is done or gone."""
        if self.is_open:
            self._link.drop_leg(self._request_id)

    def cancel(self) -> None:
        """Tell the worker to stop, unless it has finished. Does not wait."""
        if self.is_open:
            self.close()
            self._link.send(Cancel(request_id=self._request_id))

    def deliver(self, delta: SequenceDelta) -> None:
        """Pass tokens on to the request; the last ones close the leg."""
        self.has_delivered = True
        if delta.finish_reason is not None:
            self.close()
        self._queue.put(delta)

    def fail(self, error: ServingError) -> None:
        """Close the leg and end the request with this error."""
        self.close()
        self._queue.fail(error)


class _Link:
    """The sockets to one worker, and the legs that wait on it."""

    def __init__(self, address: PeerAddress, messages: MessageSocket, heartbeats: MessageSocket) -> None:
        self.address = address
        self.legs: dict[str, Leg] = {}
        self.idle = asyncio.Event()
        self.idle.set()
        self.welcome: asyncio.Future[WorkerCard] = asyncio.get_running_loop().create_future()
        self.kind = ""  # known with the welcome
        self.tiers: dict[str, str] = {}  # the same
        self.snapshot_asked_s = 0.0
        self.snapshots_due: set[str] = set()  # places whose snapshot has been asked for and has not come
        self.places: set[str] = set()  # that the index follows
        self.pin_reports: dict[str, asyncio.Future[PinReport]] = {}  # asked for, by query
        self.dropped = DroppedMessages()  # of what the worker said
        self._messages = messages
        self._heartbeats = heartbeats

    @property
    def worker_id(self) -> str:
        return self.address.worker_id

    def send(self, message: RouterMessage) -> None:
        """Queue a message. Never blocks: the queue has no limit, and silence ends the link."""
        self._messages.send(encode_message(message))

    def open_leg(self, request: Generate | Prefill | Decode, queue: DeltaQueue[SequenceDelta]) -> Leg:
        assert request.request_id not in self.legs, f"request {request.request_id} is already on {self.worker_id}"
        leg = self.legs[request.request_id] = Leg(self, request.request_id, queue)
        self.idle.clear()
        self.send(request)
        return leg

    def is_of(self, message: BlockEvents | BlockSnapshot | Heartbeat) -> bool:
        """Whether the worker speaks in its own name."""
        return (message.worker_id, message.epoch) == (self.address.worker_id, self.address.epoch)

    def drop_leg(self, request_id: str) -> None:
        del self.legs[request_id]
        if not self.legs:
            self.idle.set()

    def fail(self, message: str) -> None:
        """Close the sockets and give every leg an error of its own."""
        self._messages.close()
        self._heartbeats.close()
        for leg in list(self.legs.values()):
            leg.fail(WorkerError(message))
        if not self.welcome.done():
            self.welcome.set_exception(WorkerError(message))
        for report in self.pin_reports.values():
            report.cancel()
        self.welcome.exception()  # marks it as seen: nobody need be waiting for it


class WorkerClient:
    """Links to all workers. Used from one event loop only."""

    def __init__(
        self,
        registry: Registry,
        index: PrefixIndex,
        costs: CostModel,
        config: RouterConfig,
        *,
        router_id: str = "",
        keys: KeyPair | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._index = index
        self._costs = costs
        self._config = config
        self._router_id = router_id or f"router-{uuid.uuid4().hex[:12]}"
        self._keys = keys or make_keys()
        self._clock = clock
        self._links: dict[str, _Link] = {}
        self._learned_s: dict[str, float] = {}  # by kind of worker, when a step was last learned from
        self._background = BackgroundTasks()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    @property
    def public_key(self) -> str:
        """What a worker has to know to let this router in: its `WorkerConfig.router_key`."""
        return self._keys.public

    @property
    def num_open_legs(self) -> int:
        """Parts of requests that workers are busy with, over all workers."""
        return sum(len(link.legs) for link in self._links.values())

    async def start(self) -> None:
        """Begin to watch for silence."""
        self._background.keep("watch of the workers", self._watch)

    async def close(self) -> None:
        """Fail what is running and close every socket."""
        for worker_id in list(self._links):
            self.mark_dead(worker_id, "router is closing")
        await self._background.close()
        self._context.term()

    async def add_worker(self, address: PeerAddress) -> WorkerCard:
        """Connect to a worker and make it READY. An earlier epoch of it is given up.

        Raises `WorkerError` when it does not answer in time or dies meanwhile, `IncompatiblePeer` when it refuses
        us or cannot serve beside the other workers.
        """
        self.mark_dead(address.worker_id, f"replaced by epoch {address.epoch}")
        try:  # their queues are limited above: by bookings, and by the silence after which a link ends
            dealer, subscriber = connect_to_worker(self._context, self._keys, address, max_queued=0)
        except zmq.ZMQError as exc:
            raise WorkerError(f"{address} cannot be connected to: {exc}") from exc
        messages = MessageSocket(dealer, lambda frames: self._on_data(link, frames[-1]))
        heartbeats = MessageSocket(subscriber, lambda frames: self._on_heartbeat(link, frames[-1]))
        link = self._links[address.worker_id] = _Link(address, messages, heartbeats)
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

    async def remove_worker(self, worker_id: str) -> None:
        """Give a worker nothing new, wait for what it runs up to `drain_timeout_s`, and disconnect."""
        link = self._links.get(worker_id)
        if link is None:
            return
        self._registry.set_state(worker_id, WorkerState.DRAINING, "removed")
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await link.idle.wait()
        except TimeoutError:
            logger.warning("worker %s still runs %d requests after draining", worker_id, len(link.legs))
        self._leave(link, "removed")

    def mark_dead(self, worker_id: str, reason: str) -> None:
        """Fail all requests of a worker now and forget it; unknown ids are ignored. Call it in the event loop."""
        if (link := self._links.get(worker_id)) is not None:
            self._leave(link, reason)

    def open_leg(self, worker_id: str, request: Generate | Prefill | Decode, queue: DeltaQueue[SequenceDelta]) -> Leg:
        """Send a request's part to a worker; its tokens go to `queue`. Raises `WorkerError` when the worker is gone."""
        link = self._links.get(worker_id)
        if link is None:
            raise WorkerError(f"worker {worker_id} is gone")
        return link.open_leg(request, queue)

    def send(self, worker_id: str, message: Pin | Unpin) -> None:
        """Tell a worker something that needs no answer; one that is gone is ignored. Does not wait."""
        if (link := self._links.get(worker_id)) is not None:
            link.send(message)

    async def query_pins(self, pin_ids: list[str], timeout_s: float) -> dict[str, dict[str, dict[str, int]]]:
        """By worker, and by pin it knows, leading blocks by place. Without workers that do not answer in time."""
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

    def _leave(self, link: _Link, reason: str) -> None:
        worker_id = link.worker_id
        if self._links.get(worker_id) is not link:
            return
        del self._links[worker_id]
        try:
            self._registry.set_state(worker_id, WorkerState.DEAD, reason)
            self._index.remove_worker(*(holder_name(worker_id, place) for place in (POOL_PLACE, *link.tiers)))
            for other in self._links.values():
                self._follow_places(other)  # what it alone told of a store, another one tells from now on
        finally:  # whatever goes wrong above, nobody waits for this worker any more
            link.fail(f"worker {worker_id} is gone: {reason}")

    def _on_data(self, link: _Link, data: bytes) -> None:
        try:
            message = decode_worker_message(data)
        except msgspec.DecodeError as exc:
            link.dropped.add(DropReason.MALFORMED, f"from {link.worker_id}: {exc}")
            return
        try:
            self._dispatch(link, message)
        except Exception as exc:  # it ends the requests that it is about, and nothing else
            link.dropped.add(DropReason.FAILED, f"from {link.worker_id}: {exc!r}", exc_info=True)
            for delta in message.deltas if isinstance(message, StepOutput) else ():
                if (leg := link.legs.get(delta.request_id)) is not None:
                    leg.fail(WorkerError(f"tokens of worker {link.worker_id} could not be handled; see the log"))

    def _dispatch(self, link: _Link, message: WorkerMessage) -> None:
        match message:
            case StepOutput():
                self._on_step(link, message)
            case BlockEvents() | BlockSnapshot() if not link.is_of(message):
                text = f"{link.worker_id} spoke of {message.worker_id} epoch {message.epoch}"
                link.dropped.add(DropReason.IMPOSTOR, text)
            case BlockEvents():
                if self._index.apply(message):
                    self._ask_for_snapshot(link, {message.place})
            case BlockSnapshot():
                self._index.apply_snapshot(message)
                link.snapshots_due.discard(message.place)
            case PinReport():
                report = link.pin_reports.get(message.query_id)
                if report is not None and not report.done():
                    report.set_result(message)
            case RequestFailed():
                if (leg := link.legs.get(message.request_id)) is not None:
                    error = _ERRORS.get(message.code, WorkerError)
                    leg.fail(error(f"worker {link.worker_id}: {message.message}", code=message.code or None))
            case Welcome():
                self._on_welcome(link, message)

    def _on_step(self, link: _Link, output: StepOutput) -> None:
        now = self._clock()
        if now - self._learned_s.get(link.kind, -math.inf) >= LEARN_INTERVAL_S:
            self._learned_s[link.kind] = now
            self._costs.steps(link.kind).observe(output.stats)
        self._registry.note_step(link.worker_id, output.stats)
        self._registry.note_load(link.worker_id, output.load, now)
        for delta in output.deltas:
            # A request that was cancelled here may still get tokens on their way.
            if (leg := link.legs.get(delta.request_id)) is not None:
                leg.deliver(delta)

    def _on_welcome(self, link: _Link, welcome: Welcome) -> None:
        if link.welcome.done():
            return
        reason = welcome.refusal or self._disagreement(link, welcome.card)
        if reason:
            link.welcome.set_exception(IncompatiblePeer(f"worker {link.worker_id} cannot join: {reason}"))
            return
        link.kind = welcome.card.kind
        self._registry.add(welcome.card, self._clock())
        link.tiers = welcome.card.tiers
        self._follow_places(link)
        self._introduce(link)
        self._registry.set_state(link.worker_id, WorkerState.READY, "welcomed us")
        link.welcome.set_result(welcome.card)

    def _introduce(self, link: _Link) -> None:
        """Make a worker and those before it known to each other, so that they may exchange KV."""
        others = [other for other in self._links.values() if other is not link and other.kind]
        link.send(Introduce(peers=[other.address for other in others]))
        for other in others:
            other.send(Introduce(peers=[link.address]))

    def _disagreement(self, link: _Link, card: WorkerCard) -> str:
        """What keeps this worker from serving beside the others; empty when nothing does."""
        peer = card.address
        if (peer.worker_id, peer.epoch) != (link.worker_id, link.address.epoch):
            return f"expected epoch {link.address.epoch}, found {peer.worker_id} epoch {peer.epoch} at its endpoint"
        for other in self._registry:
            for name in ("model", "namespace", "block_size"):
                ours, theirs = getattr(other.card, name), getattr(card, name)
                if ours != theirs:
                    return f"{name} is {theirs!r}, but {ours!r} on worker {other.worker_id}"
        return ""

    def _follow_places(self, link: _Link) -> None:
        """Follow what a worker has in its pool and its own tiers, and in stores that no other one tells of yet."""
        new = {POOL_PLACE, *link.tiers} - link.places if link.kind else set()
        for place in list(new):
            store = link.tiers.get(place, "")
            if store and not self._registry.is_reporter(store, link.worker_id):
                new.discard(place)
            else:
                self._index.add_worker(holder_name(link.worker_id, place), link.address.epoch)
        link.places |= new
        self._ask_for_snapshot(link, new)  # it may have cached blocks before we came

    def _ask_for_snapshot(self, link: _Link, places: Collection[str]) -> None:
        due = set(places) - link.snapshots_due
        if due:
            link.snapshots_due |= due
            link.snapshot_asked_s = self._clock()
            link.send(SnapshotRequest(places=sorted(due)))

    def _on_heartbeat(self, link: _Link, data: bytes) -> None:
        try:
            message = decode_heartbeat(data)
            if not link.is_of(message):
                text = f"{link.worker_id} sent a heartbeat of {message.worker_id} epoch {message.epoch}"
                link.dropped.add(DropReason.IMPOSTOR, text)
            else:
                self._note(message, link.dropped.counts)
        except msgspec.DecodeError as exc:
            link.dropped.add(DropReason.MALFORMED, f"a heartbeat of {link.worker_id}: {exc}")
        except Exception as exc:
            link.dropped.add(DropReason.FAILED, f"a heartbeat of {link.worker_id}: {exc!r}", exc_info=True)

    def _note(self, heartbeat: Heartbeat, dropped_here: Mapping[str, int]) -> None:
        worker_id = heartbeat.worker_id
        self._registry.note_load(worker_id, heartbeat.load, self._clock(), step_age_s=heartbeat.step_age_s)
        self._registry.note_tiers(worker_id, heartbeat.tiers, heartbeat.fetches)
        self._registry.note_pins(worker_id, heartbeat.pins)
        self._registry.note_quarantines(worker_id, heartbeat.quarantines)
        self._registry.note_dropped(worker_id, heartbeat.num_dropped, dropped_here)
        self._on_links(worker_id, heartbeat.links)

    def _on_links(self, worker_id: str, links: list[LinkLoad]) -> None:
        """Learn what the handoffs since the last heartbeat cost: the mean of each link counts as one measurement."""
        worker = self._registry.get(worker_id)
        if worker is None:
            return
        known = {link.peer_id: link for link in worker.links}
        for link in links:
            before = known.get(link.peer_id, LinkLoad(peer_id=link.peer_id))
            num_handoffs = link.num_handoffs - before.num_handoffs  # negative where the peer was replaced
            peer = self._registry.get(link.peer_id)
            if num_handoffs > 0 and peer is not None:
                num_bytes = (link.exposed_bytes - before.exposed_bytes) / num_handoffs
                exposed_s = (link.exposed_s - before.exposed_s) / num_handoffs
                self._costs.transfer(worker.card.kind, peer.card.kind).observe(num_bytes, exposed_s)
        self._registry.note_links(worker_id, links)

    async def _watch(self) -> None:
        """Give up workers that are silent, and ask again for snapshots that did not come."""
        timeout_s = self._config.worker_timeout_s
        silence = IdleClock(timeout_s)
        silence.look(self._clock(), timeout_s / LOOKS)
        while True:
            await asyncio.sleep(timeout_s / LOOKS)
            now = self._clock()
            silence.look(now, timeout_s / LOOKS)
            for worker in list(self._registry):
                if silence.is_idle(worker.last_seen_s, now):
                    self.mark_dead(worker.worker_id, f"silent for {silence.idle_s(worker.last_seen_s, now):.1f} s")
            for link in self._links.values():
                if link.snapshots_due and now - link.snapshot_asked_s > timeout_s:
                    overdue, link.snapshots_due = link.snapshots_due, set()
                    self._ask_for_snapshot(link, overdue)
