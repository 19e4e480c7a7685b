"""The Ray actor around a worker: its process, its cores, and the supervisor's calls.

Only these calls pass through Ray. Requests, tokens and KV never do.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import ray
from typing_extensions import override

from tandem.cluster.node_config import config_on_node
from tandem.cluster.owned_actor import WATCH_S, OwnedActor, WatchNews
from tandem.cluster.ownership import LeaseTerms
from tandem.protocol.config import WorkerConfig
from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import PeerAddress, Role
from tandem.runtime.gc_tuning import freeze_startup_heap
from tandem.runtime.log_format import show_warnings
from tandem.worker.status import WorkerStatus

if TYPE_CHECKING:
    from tandem.worker.loop import Worker

logger = logging.getLogger(__name__)


class WorkerActor(OwnedActor):
    """Owns one worker. Its methods run on Ray's threads; the worker's loop has a thread of its own."""

    _worker: Worker | None = None
    _thread: threading.Thread

    def __init__(self, config: WorkerConfig, terms: LeaseTerms | None = None) -> None:
        show_warnings()
        super().__init__(terms)
        self._config = config
        self._failure: BaseException | None = None

    def start(self) -> PeerAddress:
        """Load the model and serve; returns where the worker is reached. Raises ConfigError for what the user can mend.

        The constructor does not do this: Ray reports its errors as the death of an actor with a page of traceback.
        """
        config = self._config
        if config.cpu_cores:
            os.sched_setaffinity(0, config.cpu_cores)  # before torch starts its threads, which inherit it
        if not config.host:
            config = config_on_node(config, ray.util.get_node_ip_address())
        started: Future[Worker] = Future()
        self._thread = threading.Thread(target=self._run, args=(config, started), name="worker", daemon=True)
        self._thread.start()
        self._worker = started.result()
        return self._worker.address

    def watch(self, owner: str = "") -> str | WatchNews:
        """Block until the loop has ended or there is news; returns which. The call raises if the process dies."""
        while self._thread.is_alive():
            if (news := self._news(owner)) is not None:
                return news
            self._thread.join(WATCH_S)
        return "stopped" if self._failure is None else f"failed: {self._failure}"

    def status(self) -> WorkerStatus:
        """Current load and unfinished work: handoffs, leases, reads."""
        return self._running.call(self._running.status)

    def set_role(self, role: Role) -> None:
        """Serve in another role from now on."""
        self._running.call(lambda: self._running.set_role(role))

    def peer_given_up(self, peer: PeerAddress) -> None:
        """That process is about to be ended, and may not be gone yet."""
        self._running.call(lambda: self._running.peer_given_up(peer))

    def peer_died(self, peer: PeerAddress) -> None:
        """That process is gone for certain."""
        self._running.call(lambda: self._running.peer_died(peer))

    def check_integrity(self, idle: bool) -> str:
        """ "" if all books agree (and, with `idle`, nothing is held), else what is wrong."""
        try:
            self._running.call(lambda: self._running.check_integrity(idle=idle))
        except AssertionError as exc:
            return str(exc)
        return ""

    def stop(self) -> None:
        """End the worker's loop and wait for it."""
        self._running.stop()
        self._thread.join(timeout=10.0)
        if self._thread.is_alive():
            raise WorkerError("the worker's loop did not end within 10 s")

    @property
    def _running(self) -> Worker:
        if self._worker is None:
            raise WorkerError(f"worker {self._config.worker_id} has not been started")
        return self._worker

    @override
    def _obey(self, router_key: str) -> tuple[WorkerConfig, PeerAddress | None, Role]:
        worker = self._worker
        if worker is None:
            return self._config, None, self._config.role
        worker.call(lambda: worker.obey(router_key))
        return self._config, worker.address, worker.role

    def _run(self, config: WorkerConfig, started: Future[Worker]) -> None:
        # The worker is built in the thread that runs it. Each computing thread gets an OpenMP team of its own, and with
        # more threads than cores OpenMP lets them sleep between two operations instead of spin, which took the whole
        # gain of the second core.
        try:
            from tandem.worker.loop import Worker  # here: it imports torch, which the supervisor does not need

            worker = Worker(config)
            freeze_startup_heap()
            started.set_result(worker)
            worker.run()
        except BaseException as exc:  # `start` raises it, or `watch` reports it, in the thread that waits for it
            if started.done():
                logger.exception("worker %s failed", config.worker_id)
                self._failure = exc
            else:
                started.set_exception(exc)
