"""The Ray actor around a worker: its process, its cores, and the control calls of the supervisor.

Control only. Requests, tokens and KV never pass through Ray.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace

import ray

from cluster.worker import Worker, WorkerStatus
from protocol.config import WorkerConfig
from protocol.errors import WorkerError
from protocol.messages import PeerAddress, Role

__all__ = ["WorkerActor"]

logger = logging.getLogger(__name__)


class WorkerActor:
    """Owns one worker. Its methods run on Ray's threads; the worker's loop has a thread of its own."""

    def __init__(self, config: WorkerConfig) -> None:
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
        if config.cpu_cores:
            os.sched_setaffinity(0, config.cpu_cores)
        if not config.host:
            config = replace(config, host=ray.util.get_node_ip_address())
        self._worker = Worker(config)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def address(self) -> PeerAddress:
        """Where the worker is reached. Answered once the model is loaded."""
        return self._worker.address

    def watch(self) -> str:
        """Block until the worker's loop has ended; the reason. The process' death ends the call too, as an error."""
        self._thread.join()
        return "stopped" if self._failure is None else f"failed: {self._failure}"

    def status(self) -> WorkerStatus:
        """Load and open business."""
        return self._worker.call(self._worker.status)

    def set_role(self, role: Role) -> None:
        """Play another role from now on."""
        self._worker.call(lambda: self._worker.set_role(role))

    def peer_died(self, peer: PeerAddress) -> None:
        """That process is gone for certain."""
        self._worker.call(lambda: self._worker.peer_died(peer))

    def check_integrity(self, idle: bool) -> str:
        """ "" if all books agree (and, with `idle`, nothing is held), else what is wrong."""
        try:
            self._worker.call(lambda: self._worker.check_integrity(idle=idle))
        except AssertionError as exc:
            return str(exc)
        return ""

    def stop(self) -> None:
        """End the worker's loop and wait for it."""
        self._worker.stop()
        self._thread.join(timeout=10.0)
        if self._thread.is_alive():
            raise WorkerError("the worker's loop did not end in 10 s")

    def _run(self) -> None:
        try:
            self._worker.run()
        except BaseException as exc:
            self._failure = exc
