"""A worker: one engine, both roles, one loop.

    receive -> poll transport -> step -> pump roles -> send

The loop never waits for anyone: it polls. Which role the router sees is a label; the worker can always do both, so a
flip is a change of that label once the old role's work is done.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import torch
import zmq

from tandem.decode_worker import DecodeRole
from tandem.engine.engine import Engine, SequenceOutput, StepResult
from tandem.engine.sequence import Sequence
from tandem.kv_transfer.handshake import compatibility_fields
from tandem.kv_transfer.links import LinkChange, LinkState, PeerLinks
from tandem.kv_transfer.transport.base import Notification, Transport
from tandem.kv_transfer.transport.factory import create_transport
from tandem.kv_transfer.transport.in_process import InProcessHub
from tandem.prefill_worker import PrefillRole
from tandem.protocol.config import WorkerConfig
from tandem.protocol.errors import InternalError, RequestError, ServingError, WorkerError
from tandem.protocol.messages import (
    INVALID_REQUEST,
    WIRE_VERSION,
    BlockEvents,
    BlockSnapshot,
    Cancel,
    Decode,
    FetchStats,
    Generate,
    Heartbeat,
    Hello,
    Introduce,
    LeaseClosed,
    LeaseGrant,
    LeaseQueued,
    LeaseRefused,
    LeaseRequest,
    LeaseRevoked,
    LinkLoad,
    Message,
    PeerAddress,
    PeerHello,
    PeerRefused,
    Pin,
    PinLoad,
    PinQuery,
    Prefill,
    Quarantine,
    ReadDone,
    ReadGrant,
    ReadRequest,
    RequestFailed,
    Role,
    SequenceDelta,
    SnapshotRequest,
    StepOutput,
    StepStats,
    TierLoad,
    Unpin,
    Welcome,
    WorkerCard,
    WorkerLoad,
)
from tandem.runtime.curve import make_keys
from tandem.runtime.dropped import DroppedMessages, DropReason
from tandem.scheduling.cost_model import CostModel
from tandem.worker.kv.peer_reads import PeerHolder, PeerReader
from tandem.worker.kv.pins import WorkerPins
from tandem.worker.kv.tiered_cache import TieredCache, create_tiers
from tandem.worker.sockets import HeartbeatThread, WorkerSockets, socket_endpoint
from tandem.worker.status import WorkerStatus

__all__ = ["Worker"]

logger = logging.getLogger(__name__)

_IDLE_POLL_MS = 200
_TRANSFER_POLL_MS = 1  # NIXL has no file descriptor to wait on
_LINK_EXPIRY_S = 1.0
_REPORT_S = 0.5  # between two looks at tiers and links

T = TypeVar("T")


class Worker:
    """Engine, transport, roles and sockets of one worker process.

    Construct it anywhere, then let one thread call `run`; `call` executes a function between two steps of that loop.
    """

    def __init__(self, config: WorkerConfig, *, hub: InProcessHub | None = None) -> None:
        self.config = config
        self.role = config.role
        epoch = time.time_ns()
        name = f"{config.worker_id}-{epoch:x}"
        endpoint = socket_endpoint(config.socket_folder, config.host, name)
        self._engine = Engine(config.engine, kv_codec=config.tiers.codec_identity)
        self._transport: Transport = create_transport(
            config.transfer.transport,
            worker_id=config.worker_id,
            epoch=epoch,
            pool=self._engine.kv,
            hub=hub,
            host=config.host,
            mailbox=socket_endpoint(config.socket_folder, config.host, f"{name}.kv") if config.socket_folder else "",
        )
        self._context = zmq.Context()
        self._dropped = DroppedMessages()
        keys = make_keys()
        self._sockets = WorkerSockets(self._context, endpoint, keys, config.router_key, self._dropped)
        self._live_handoffs: list[tuple[str, int]] = []
        self._load = self._engine.load()
        self._tier_report: tuple[list[TierLoad], FetchStats | None, PinLoad | None] = ([], None, None)
        self._link_report: list[LinkLoad] = []
        self._quarantine_report: list[Quarantine] = []
        self._next_report = 0.0
        self._step_started = 0.0
        interval_s = config.transfer.heartbeat_interval_s
        endpoint = socket_endpoint(config.socket_folder, config.host, f"{name}.beats")
        self._heartbeat = HeartbeatThread(self._context, endpoint, keys, interval_s, self._make_heartbeat)
        self.address = PeerAddress(
            config.worker_id, epoch, self._sockets.endpoint, self._heartbeat.endpoint, keys.public
        )
        model = self._engine.model
        compatibility = compatibility_fields(
            model_revision=model.revision,
            namespace=self._engine.namespace,
            kv_dtype=str(model.dtype),
            block_size=config.engine.block_size,
            block_shape=self._engine.kv.shape[1:],
            transport=config.transfer.transport,
            checksums=config.transfer.checksums,
        )
        timeout_s = config.transfer.handoff_timeout_s
        self._links = PeerLinks(
            self.address, compatibility, self._transport, self._sockets.send_peer, timeout_s=timeout_s
        )
        self._prefill = PrefillRole(
            self._engine, self._transport, self._links, config.transfer, self._fail, self._forget
        )
        self._decode = DecodeRole(
            self._engine, self._links, config.transfer, self._fail, first_generation=epoch & 0x7FFFFFFFFFFFFFFF
        )
        self._routers: dict[bytes, str] = {}  # socket identity -> router id
        self._clients: dict[str, bytes] = {}  # request id -> socket identity of its router
        self._event_sequences: Counter[str] = Counter()  # by place
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._next_link_expiry = 0.0
        self._num_errors = 0  # each ended a request, or a message, and nothing else
        self._waits_for_room = False  # the last step found work but no blocks for it
        self._notifications: list[Notification] = []
        self._engine.runner.between_layers = self._poll_transport
        self._engine.on_scheduled = lambda: self._prefill.request_leases(time.monotonic())
        steps = CostModel().steps(self._kind)
        self._reader = PeerReader(self._engine, self._transport, self._links, config.transfer)
        tiers = create_tiers(config.tiers, self._engine)
        self._cache = TieredCache(self._engine, tiers, steps, peers=self._reader)
        self._holder = PeerHolder(self._engine, self._cache.tier("host"), self._links, config.transfer)
        self._pins = WorkerPins(self._engine, self._cache, config.tiers.pin_share)

    @property
    def card(self) -> WorkerCard:
        """What a router has to know of this worker."""
        engine, config = self._engine, self.config
        return WorkerCard(
            address=self.address,
            role=self.role,
            kind=self._kind,
            model=config.engine.served_model_name or os.path.basename(config.engine.model),
            max_model_len=engine.config.max_model_len,
            block_size=engine.config.block_size,
            num_blocks=engine.pool.num_blocks,
            block_bytes=engine.block_bytes,
            max_num_batched_tokens=engine.config.max_num_batched_tokens,
            max_num_seqs=engine.config.max_num_seqs,
            namespace=engine.namespace,
            pid=os.getpid(),
            tiers={cached.name: cached.store for cached in self._cache.tiers},
            max_pinned_blocks=self._pins.max_blocks,
        )

    @property
    def _kind(self) -> str:
        """Workers of one kind compute at one speed."""
        device = self._engine.model.device
        return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu-{torch.get_num_threads()}"

    def run(self) -> None:
        """Serve until `stop`. An error that no request is to blame for ends the worker, and the process is replaced."""
        self._heartbeat.start()
        try:
            while not self._stopping.is_set():
                self._turn()
        except Exception:
            logger.exception("worker %s failed", self.config.worker_id)
            for request_id in list(self._clients):
                self._fail(request_id, "the worker failed; see its log", WorkerError.code or "")
            raise
        finally:
            self._stopping.set()
            self._run_calls()  # whoever waits for one gets its answer
            self._close()

    def stop(self) -> None:
        """Let `run` return soon. Safe from any thread."""
        self._stopping.set()
        self._sockets.wake()

    def call(self, function: Callable[[], T], timeout_s: float = 10.0) -> T:
        """Run `function` in the loop, between two steps, and return its result. Safe from any other thread.

        Raises WorkerError if the loop has stopped or does not get to it in time.
        """
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(function())
            except BaseException as exc:
                future.set_exception(exc)

        if self._stopping.is_set():
            raise WorkerError(f"worker {self.config.worker_id} has stopped")
        self._calls.put(answer)
        self._sockets.wake()
        try:
            return future.result(timeout_s)
        except TimeoutError as exc:
            raise WorkerError(f"worker {self.config.worker_id} did not answer in {timeout_s} s") from exc

    # Called in the loop, through `call`.

    def status(self) -> WorkerStatus:
        """Load and open business."""
        return WorkerStatus(
            worker_id=self.config.worker_id,
            role=self.role,
            load=self._make_load(),
            num_open_handoffs=self._prefill.num_open + self._decode.num_open,
            num_open_leases=self._decode.num_leases,
            num_used_blocks=self._engine.pool.num_used,
            num_preemptions=self._engine.scheduler.num_preemptions,
            request_ids=frozenset(self._clients),
        )

    def set_role(self, role: Role) -> None:
        """Play another role from now on; the cache stays, and so does what is being worked on."""
        logger.info("worker %s: %s -> %s", self.config.worker_id, self.role, role)
        self.role = role

    def peer_given_up(self, peer: PeerAddress) -> None:
        """That process is to be ended: nothing more is sent to it or expected of it, and requests with it fail.

        It may run on for a while. So whatever it could still write to or read stays reserved.
        """
        self._links.forget(peer.worker_id, peer.epoch)
        self._prefill.peer_lost(peer.worker_id, peer.epoch)
        self._decode.peer_given_up(peer.worker_id, peer.epoch)
        self._reader.peer_lost(peer.worker_id, peer.epoch)
        self._sockets.forget_peer(peer)

    def peer_died(self, peer: PeerAddress) -> None:
        """That process is gone for certain: nothing of it will land any more, so what was reserved for it is freed."""
        self.peer_given_up(peer)
        self._decode.peer_lost(peer.worker_id, peer.epoch)
        self._holder.peer_lost(peer.worker_id, peer.epoch)

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless all books agree; with `idle`, nothing may be held by anyone."""
        self._prefill.check_integrity(idle=idle)
        self._decode.check_integrity(idle=idle)
        self._engine.check_integrity(idle=idle)
        self._cache.check_integrity(idle=idle)
        self._reader.check_integrity(idle=idle)
        self._holder.check_integrity(idle=idle)
        self._pins.check_integrity(idle=idle)
        assert not (idle and self._clients), f"requests not forgotten: {sorted(self._clients)}"

    # The loop.

    def _turn(self) -> None:
        # NOTE: two readings. Whatever came before `began` is read below, so `began` alone tells what did not come in
        # time. Whatever is read was sent before `now`, so time that a message grants counts from `now`.
        began = time.monotonic()
        messages = self._sockets.receive(self._poll_ms())
        now = time.monotonic()
        for identity, message in messages:
            self._take(identity, message, now)
        self._run_calls()
        self._notifications += self._transport.poll()
        now = time.monotonic()
        for notification in self._notifications:
            self._take_notification(notification, now)
        self._notifications.clear()
        if now >= self._next_link_expiry:
            self._next_link_expiry = now + _LINK_EXPIRY_S
            for change in self._links.expire(began):
                self._link_changed(change, now)
        self._prefill.expire(began)
        self._decode.expire(began)
        if first_tokens := self._prefill.take_first_tokens():
            self._send_output(first_tokens, StepStats(duration_s=0.0), ())
        self._pump(now)
        self._reader.pump(now)
        self._cache.pump(now)
        self._holder.pump(now)
        self._pins.pump(now)
        self._publish_state()  # before the step: however long it takes, heartbeats name every handoff
        result = self._step()
        self._waits_for_room = result is None and self._engine.has_work
        if result is not None:
            for failure in result.failures:
                self._give_up(failure.sequence.request_id, failure.error)
            self._cache.after_step(result.stats)
            self._send_output(self._prefill.after_step(result), result.stats, self._routers)
            self._pump(time.monotonic())
        self._send_events()
        self._publish_state()

    def _poll_transport(self) -> None:
        """Keep writes moving while a step computes: a peer's write completes only when its receiver polls.

        What arrives is acted upon after the step.
        """
        if self._is_transferring:
            self._notifications += self._transport.poll()

    @property
    def _is_transferring(self) -> bool:
        """Whether polling the transport often makes something finish sooner, here or at a peer."""
        is_handing_off = self._prefill.is_transferring or self._decode.is_transferring
        return is_handing_off or self._reader.is_reading or self._holder.num_open > 0

    def _poll_ms(self) -> int:
        if self._engine.has_work:
            return _TRANSFER_POLL_MS if self._waits_for_room else 0
        is_moving = self._is_transferring or self._cache.is_busy
        return _TRANSFER_POLL_MS if is_moving else _IDLE_POLL_MS

    def _publish_state(self) -> None:
        """What the heartbeat thread sends from now on."""
        self._live_handoffs = self._prefill.live_handoffs
        self._load = self._make_load()
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + _REPORT_S
            self._link_report = self._prefill.link_loads
            self._quarantine_report = self._decode.quarantines(now)
            fetches = self._cache.fetcher.stats(self._holder.num_lent_blocks)
            self._tier_report = (self._cache.loads(), fetches, self._pins.load())

    def _make_load(self) -> WorkerLoad:
        load = self._engine.load()
        num_quarantined_blocks = self._decode.num_quarantined_blocks + self._reader.num_stuck_blocks
        if not (self._decode.num_leases or num_quarantined_blocks or self._num_errors or self._decode.num_recomputed):
            return load
        return msgspec.structs.replace(
            load,
            num_open_leases=self._decode.num_leases,
            num_quarantined_blocks=num_quarantined_blocks,
            num_errors=self._num_errors,
            num_recomputed=self._decode.num_recomputed,
        )

    def _pump(self, now: float) -> None:
        self._prefill.pump(now)
        self._decode.pump(now)

    def _step(self) -> StepResult | None:
        self._step_started = time.monotonic()
        try:
            return self._engine.step()
        finally:
            self._step_started = 0.0

    def _take(self, identity: bytes, message: Message, now: float) -> None:
        """Handle one message. Whatever it raises ends the request it is about, not the worker."""
        try:
            self._handle(identity, message, now)
        except Exception as exc:
            self._dropped.add(DropReason.FAILED, f"a {type(message).__name__}: {exc!r}", exc_info=True)
            self._give_up(getattr(message, "request_id", ""), exc)

    def _take_notification(self, notification: Notification, now: float) -> None:
        try:
            self._decode.notified(notification, now)
        except Exception as exc:
            self._num_errors += 1
            text = f"a notification of {notification.worker_id}, whose lease will run out: {exc!r}"
            self._dropped.add(DropReason.FAILED, text, exc_info=True)

    def _handle(self, identity: bytes, message: Message, now: float) -> None:
        match message:
            case Generate() | Prefill() | Decode():
                self._meet_peers(message)
                self._accept(identity, message, now)
            case Introduce():
                for peer in message.peers:
                    self._sockets.introduce(peer)
            case Cancel():
                self._cancel(message.request_id)
            case Heartbeat():
                self._decode.heartbeat(message.worker_id, message.epoch, message.handoffs, now)
            case LeaseRequest():
                self._links.remember(message.sender)
                self._decode.requested(message, now)
            case LeaseGrant():
                self._links.remember(message.sender)
                self._prefill.granted(message, now)
            case LeaseQueued():
                self._prefill.queued(message, now)
            case LeaseRefused():
                self._prefill.refused(message)
            case LeaseRevoked():
                self._prefill.revoked(message)
            case LeaseClosed():
                self._decode.closed(message)
            case ReadRequest():
                self._links.remember(message.sender)
                self._holder.requested(message, now)
            case ReadGrant():
                self._reader.granted(message, now)
            case ReadDone():
                self._holder.done(message)
            case PeerHello():
                self._link_changed(self._links.hello(message), now)
            case PeerRefused():
                self._link_changed(self._links.refused(message), now)
            case Hello():
                self._welcome(identity, message)
            case SnapshotRequest():
                self._send_snapshots(identity, message.places)
            case Pin():
                self._pins.pin(message, now)
            case Unpin():
                self._pins.unpin(message.pin_id)
            case PinQuery():
                self._sockets.reply(identity, self._pins.report(message.query_id, message.pin_ids))
            case _:
                logger.warning("ignored a %s", type(message).__name__)

    def _meet_peers(self, request: Generate | Prefill | Decode) -> None:
        """A request introduces whom it names, too: an `Introduce` can be lost with a connection."""
        if isinstance(request, Prefill):
            self._sockets.introduce(request.decode_worker)
        if isinstance(request, Decode):
            self._sockets.introduce(request.prefill_worker)
        elif request.kv_holder is not None:
            self._sockets.introduce(request.kv_holder.worker)

    def _accept(self, identity: bytes, request: Generate | Prefill | Decode, now: float) -> None:
        if request.request_id in self._clients or self._prefill.has(request.request_id):
            reason = f"request id {request.request_id} is in use"
            failed = RequestFailed(request_id=request.request_id, message=reason, code=WorkerError.code or "")
            self._sockets.reply(identity, failed)
            return
        self._clients[request.request_id] = identity
        try:
            if isinstance(request, Prefill):
                self._prefill.accept(request, now)
            elif isinstance(request, Decode):
                self._decode.accept(request, now)
            else:
                sequence = self._engine.make_sequence(
                    request.request_id,
                    request.token_ids,
                    request.sampling,
                    cache_salt=request.cache_salt,
                    priority=request.priority,
                )
                sequence.kv_holder = request.kv_holder
                self._engine.add(sequence)
        except RequestError as exc:
            self._fail(request.request_id, exc.message, exc.code or INVALID_REQUEST)
        except ServingError as exc:
            self._fail(request.request_id, exc.message, exc.code or "")

    def _give_up(self, request_id: str, error: Exception) -> None:
        """End a request that met an error of ours, wherever it is: its client is told, its blocks are freed."""
        self._num_errors += 1
        message = f"{type(error).__name__} while it was worked on; the worker's log has more"
        self._fail(request_id, message, InternalError.code or "")
        for cancel in (self._prefill.cancel, self._decode.cancel, self._engine.abort):
            try:
                cancel(request_id)
            except Exception:
                logger.exception("request %s left something behind", request_id)

    def _cancel(self, request_id: str) -> None:
        self._clients.pop(request_id, None)
        self._prefill.cancel(request_id)
        self._decode.cancel(request_id)
        self._engine.abort(request_id)

    def _link_changed(self, change: LinkChange | None, now: float) -> None:
        if change is None:
            return
        if change.state is LinkState.READY:
            self._prefill.link_ready(change.peer, now)
        else:
            logger.warning("%s", change.reason)
            self._prefill.link_refused(change.peer, change.reason)

    def _welcome(self, identity: bytes, message: Hello) -> None:
        refusal = ""
        if message.wire_version != WIRE_VERSION:
            refusal = f"wire version {message.wire_version} there, {WIRE_VERSION} here"
        else:
            self._routers = {i: r for i, r in self._routers.items() if r != message.router_id}  # it reconnected
            self._routers[identity] = message.router_id
        self._sockets.reply(identity, Welcome(card=self.card, refusal=refusal))

    def _send_output(self, outputs: list[SequenceOutput], stats: StepStats, routers: Iterable[bytes]) -> None:
        """One message with all new tokens of its requests to each router that has some, and to each of `routers`."""
        deltas: dict[bytes, list[SequenceDelta]] = {identity: [] for identity in routers}
        for output in outputs:
            sequence = output.sequence
            identity = self._clients.get(sequence.request_id)
            if identity is None:
                continue
            deltas.setdefault(identity, []).append(
                _delta(sequence, [output.token_id], None if output.logprobs is None else [output.logprobs])
            )
            if sequence.finish_reason is not None:
                del self._clients[sequence.request_id]
        load = self._make_load()
        for identity, items in deltas.items():
            message = StepOutput(
                worker_id=self.config.worker_id,
                epoch=self.address.epoch,
                deltas=items,
                stats=stats,
                load=load,
            )
            self._sockets.reply(identity, message)

    def _send_events(self) -> None:
        for place, (stored, removed) in self._cache.take_events().items():
            self._event_sequences[place] += 1
            events = BlockEvents(
                worker_id=self.config.worker_id,
                epoch=self.address.epoch,
                sequence=self._event_sequences[place],
                stored=stored,
                removed=removed,
                place=place,
            )
            for identity in self._routers:
                self._sockets.reply(identity, events)

    def _send_snapshots(self, identity: bytes, places: list[str]) -> None:
        self._send_events()  # what is pending belongs before the snapshots, not after them
        for place in places:
            snapshot = BlockSnapshot(
                worker_id=self.config.worker_id,
                epoch=self.address.epoch,
                sequence=self._event_sequences[place],
                digests=self._cache.digests(place),
                place=place,
            )
            self._sockets.reply(identity, snapshot)

    def _fail(self, request_id: str, message: str, code: str) -> None:
        identity = self._clients.pop(request_id, None)
        if identity is not None:
            self._sockets.reply(identity, RequestFailed(request_id=request_id, message=message, code=code))

    def _forget(self, request_id: str) -> None:
        """This worker has nothing more to say about the request."""
        self._clients.pop(request_id, None)

    def _run_calls(self) -> None:
        while True:
            try:
                function = self._calls.get_nowait()
            except queue.Empty:
                return
            function()

    def _make_heartbeat(self) -> Heartbeat:
        """Called from the heartbeat thread: reads only values that the loop replaces whole."""
        started = self._step_started
        return Heartbeat(
            worker_id=self.config.worker_id,
            epoch=self.address.epoch,
            step_age_s=time.monotonic() - started if started else 0.0,
            load=self._load,
            handoffs=self._live_handoffs,
            tiers=self._tier_report[0],
            fetches=self._tier_report[1],
            links=self._link_report,
            quarantines=self._quarantine_report,
            pins=self._tier_report[2],
            num_dropped=self._count_dropped(),
        )

    def _count_dropped(self) -> dict[str, int]:
        num_notifications = self._transport.num_dropped
        return dict(self._dropped.counts) | ({"notification": num_notifications} if num_notifications else {})

    def _close(self) -> None:
        """Close everything, last made first, whatever goes wrong with one of them."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._context.term)
            stack.callback(self._sockets.close)
            stack.callback(self._transport.close)
            stack.callback(self._cache.close)
            stack.callback(self._heartbeat.close)


def _delta(sequence: Sequence, token_ids: list[int], logprobs: list[Any] | None) -> SequenceDelta:
    offset = sequence.num_output_tokens - len(token_ids)
    return SequenceDelta(
        request_id=sequence.request_id,
        offset=offset,
        token_ids=token_ids,
        finish_reason=sequence.finish_reason,
        stop_token_id=sequence.stop_token_id,
        num_cached_tokens=sequence.num_cached_tokens if offset == 0 else None,
        logprobs=logprobs,
    )
