"""A worker: one engine, both roles, one loop.

    receive -> poll transport -> pump -> step -> send

The loop never waits for a peer: it polls. The role that the router sees is a label. Any worker can prefill and decode,
so a flip only changes the label; requests of the old role go on beside those of the new one.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tandem.engine.step_result import StepResult
from tandem.kv_transfer.transport.base import Notification
from tandem.kv_transfer.transport.in_process import InProcessHub
from tandem.protocol.config import WorkerConfig
from tandem.protocol.errors import WorkerError, WorkerLost
from tandem.protocol.fault_boundary import outcome_of, undone_on_error
from tandem.protocol.messages import Message, PeerAddress, Role, WorkerCard
from tandem.worker.assembly import assemble
from tandem.worker.dispatch import MessageDispatcher
from tandem.worker.reporter import StatusReporter
from tandem.worker.status import WorkerStatus

_IDLE_POLL_MS = 200
_TRANSFER_POLL_MS = 1
# NIXL with a port of UCX wakes nobody, and a write ends only after several polls of both sides. So both poll this often
# when one has begun. A poll takes 40 us, so for longer it would cost half a core.
_QUICK_POLL_S = 1e-4
_QUICK_FOR_S = 0.01
_LINK_EXPIRY_S = 1.0

T = TypeVar("T")


class Worker:
    """One worker process: its parts, and the loop that drives them.

    Construct it anywhere, then let one thread call `run`; `call` executes a function between two steps of that loop.
    """

    def __init__(self, config: WorkerConfig, *, hub: InProcessHub | None = None) -> None:
        self.config = config
        self.parts = assemble(config, hub)
        self.reporter = StatusReporter(self.parts)
        self._dispatcher = MessageDispatcher(self.parts, self.reporter)
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._next_link_expiry = 0.0
        self._is_waiting = False  # whether there is work but no room for it, or the device has enough for now
        self._notifications: list[Notification] = []  # polled, but not acted upon yet
        if self.parts.transport.waker is not None:
            self.parts.sockets.watch(self.parts.transport.waker)

    @property
    def address(self) -> PeerAddress:
        """Where peers and the router reach this worker."""
        return self.parts.address

    @property
    def role(self) -> Role:
        """The role in which the router uses this worker."""
        return self.reporter.role

    @property
    def card(self) -> WorkerCard:
        """What this worker tells a router about itself."""
        return self.reporter.card

    def run(self) -> None:
        """Serve until `stop`. An error that is not a request's fault ends the worker, and the process is replaced."""
        self.parts.heartbeats.start(self.reporter.heartbeat)
        try:
            with undone_on_error(self._fail_requests):
                while not self._stopping.is_set():
                    self.run_once()
        finally:
            self._stopping.set()
            self._run_calls()  # their callers wait for an answer
            self.close()

    def _fail_requests(self) -> None:
        for request_id in self.parts.replies.request_ids:
            self.parts.replies.fail(request_id, "the worker failed; see its log", WorkerLost.code)

    def stop(self) -> None:
        """Let `run` return soon. Safe from any thread."""
        self._stopping.set()
        self.parts.sockets.wake()

    def call(self, function: Callable[[], T], timeout_s: float = 10.0) -> T:
        """Run `function` in the loop, between two steps, and return its result. Safe from any other thread.

        Raises WorkerError if the loop has stopped or does not get to it in time.
        """
        future: Future[T] = Future()

        def answer() -> None:
            outcome = outcome_of(function)
            if isinstance(outcome, Exception):
                future.set_exception(outcome)  # raises it in the thread that called
            else:
                future.set_result(outcome)

        if self._stopping.is_set():
            raise WorkerError(f"worker {self.config.worker_id} has stopped")
        self._calls.put(answer)
        self.parts.sockets.wake()
        try:
            return future.result(timeout_s)
        except TimeoutError as exc:
            raise WorkerError(f"worker {self.config.worker_id} did not answer in {timeout_s} s") from exc

    # Called in the loop, through `call`.

    def status(self) -> WorkerStatus:
        """Current load and unfinished work: handoffs, leases, reads."""
        return self.reporter.status()

    def set_role(self, role: Role) -> None:
        """Serve in another role from now on; the cache stays, and so do requests of the old role."""
        self.reporter.set_role(role)

    def obey(self, router_key: str) -> None:
        """Serve another router, which has this public key. What the former one asked for ends."""
        self._dispatcher.obey(router_key)

    def peer_given_up(self, peer: PeerAddress) -> None:
        """That process is about to be ended: send nothing more to it, and fail the requests that need it.

        It may run on for a while, so blocks that it could still write to or read stay reserved.
        """
        self.parts.links.forget(peer.process)
        self.parts.prefill.peer_lost(peer.process)
        self.parts.decode.peer_given_up(peer.process)
        self.parts.reader.peer_lost(peer.process)
        self.parts.sockets.forget_peer(peer)

    def peer_died(self, peer: PeerAddress) -> None:
        """That process is certainly gone: none of its writes will land, so free what it reserved."""
        self.peer_given_up(peer)
        self.parts.decode.peer_lost(peer.process)
        self.parts.lender.peer_lost(peer.process)

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless all books agree; with `idle`, nothing may be held by anyone."""
        parts = self.parts
        parts.prefill.check_integrity(idle=idle)
        parts.decode.check_integrity(idle=idle)
        parts.engine.check_integrity(idle=idle)
        parts.cache.check_integrity(idle=idle)
        parts.reader.check_integrity(idle=idle)
        parts.lender.check_integrity(idle=idle)
        parts.copies.check_integrity(idle=idle)
        parts.pins.check_integrity(idle=idle)
        parts.long_prompts.check_integrity(idle=idle)
        request_ids = parts.replies.request_ids
        assert not (idle and request_ids), f"requests not forgotten: {sorted(request_ids)}"

    # The loop.

    def run_once(self) -> None:
        """Go through the loop once. `run` calls this; tests may, in its place."""
        parts = self.parts
        # NOTE: two clock readings. Everything that came before `began` is read below, so a deadline is missed only if
        # it lies before `began`. Everything that is read was sent before `now`, so granted time counts from `now`.
        began = self.reporter.turned = time.monotonic()
        messages = self._receive()
        now = time.monotonic()
        for identity, message in messages:
            self._dispatcher.take(identity, message, now)
        self._dispatcher.begin_long(now)
        self._run_calls()
        self._notifications += parts.transport.poll()
        now = time.monotonic()
        for notification in self._notifications:
            self._dispatcher.take_notification(notification, now)
        self._notifications.clear()
        self._expire(began, now)
        if first_tokens := parts.prefill.take_first_tokens():
            parts.replies.send_first_tokens(first_tokens, self.reporter.load())
        self._pump(now)
        self.reporter.publish()  # before the step: however long it takes, heartbeats name every handoff
        results = self._step()
        self._is_waiting = not results and parts.engine.has_work
        for result in results:
            self._finish_step(result)
        self._dispatcher.send_events()
        self.reporter.publish()

    def close(self) -> None:
        """Close everything, last made first, whatever goes wrong with one of them. `run` does this at its end."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.parts.context.term)
            stack.callback(self.parts.engine.close)
            stack.callback(self.parts.sockets.close)
            stack.callback(self.parts.transport.close)
            stack.callback(self.parts.cache.close)
            stack.callback(self.parts.heartbeats.close)
            stack.callback(self.parts.long_prompts.close)

    def _receive(self) -> list[tuple[bytes, Message]]:
        """The messages that are here, after a wait for them or for the transport."""
        wait_ms = self._poll_ms()
        if wait_ms and self._is_writing:
            time.sleep(_QUICK_POLL_S)
            wait_ms = 0
        return self.parts.sockets.receive(wait_ms)

    @property
    def _is_writing(self) -> bool:
        """Whether a write has just begun, here or at a peer, whose end only polls will show."""
        parts = self.parts
        begun = max(parts.prefill.writes.last_begun, parts.decode.last_begun)
        return parts.transport.waker is None and time.monotonic() < begun + _QUICK_FOR_S

    def _poll_ms(self) -> int:
        if self._notifications:
            return 0
        if self.parts.engine.has_work:
            return _TRANSFER_POLL_MS if self._is_waiting else 0
        is_moving = self._is_transferring or self.parts.cache.is_busy
        return _TRANSFER_POLL_MS if is_moving else _IDLE_POLL_MS

    @property
    def _is_transferring(self) -> bool:
        """Whether polling the transport often makes something finish sooner, here or at a peer."""
        parts = self.parts
        is_handing_off = parts.prefill.is_transferring or parts.decode.is_transferring
        return is_handing_off or parts.reader.is_reading or parts.lender.num_open > 0

    def _run_calls(self) -> None:
        while True:
            try:
                function = self._calls.get_nowait()
            except queue.Empty:
                return
            function()

    def _expire(self, began: float, now: float) -> None:
        """End what is too late, now that all messages that came before `began` are read."""
        if now >= self._next_link_expiry:
            self._next_link_expiry = now + _LINK_EXPIRY_S
            for change in self.parts.links.expire(began):
                self._dispatcher.link_changed(change, now)
        self.parts.prefill.expire(began)
        self.parts.decode.expire(began)

    def _pump(self, now: float) -> None:
        """Let every part go on as far as it can without waiting."""
        self._pump_roles(now)
        self.parts.reader.pump(now)
        for request_id in self.parts.copies.pump(now):
            self.parts.replies.send_end(request_id, self.reporter.load())
        self.parts.cache.pump(now)
        self.parts.lender.pump(now)
        self.parts.pins.pump(now)

    def _pump_roles(self, now: float) -> None:
        self.parts.prefill.pump(now)
        self.parts.decode.pump(now)

    def _step(self) -> list[StepResult]:
        engine, reporter = self.parts.engine, self.reporter
        reporter.step_started = reporter.step_started or time.monotonic()
        results = engine.step(before_compute=self._request_leases, between_layers=self._poll_transport)
        if not engine.is_computing:
            reporter.step_started = 0.0
        elif results:  # the next step began when the last of these ended
            reporter.step_started = time.monotonic()
        return results

    def _request_leases(self) -> None:
        """Request room for prompts that the step has just admitted: their handoffs may begin right after it."""
        self.parts.prefill.request_leases(time.monotonic())

    def _poll_transport(self) -> None:
        """Keep writes moving while a step computes: a peer's write completes only when its receiver polls.

        Whatever arrives is handled after the step.
        """
        if self._is_transferring:
            self._notifications += self.parts.transport.poll()

    def _finish_step(self, result: StepResult) -> None:
        """Send what a step computed, and let transfers begin that waited for it."""
        for failure in result.failures:
            self._dispatcher.give_up(failure.sequence.request_id, failure.error, failure.sequence)
        _note_step(result, time.monotonic())
        self.parts.cache.after_step(result.stats)
        outputs = self.parts.prefill.after_step(result)
        self.parts.replies.send_step(outputs, result.stats, self.reporter.load())
        self._pump_roles(time.monotonic())


def _note_step(result: StepResult, now: float) -> None:
    """Note a step that has just ended in the timelines of its traced sequences."""
    for chunk in result.chunks:
        if (timeline := chunk.sequence.timeline) is not None:
            timeline.step(now - result.stats.duration_s, now, chunk.num_tokens, samples=chunk.samples)
