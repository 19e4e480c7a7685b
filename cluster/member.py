"""One worker of a cluster: its Ray actor through all its lives, and the calls that are made to it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from tandem.cluster.actor import WorkerActor
from tandem.cluster.placement import Bundle
from tandem.cluster.process_end import ProcessIdentity
from tandem.cluster.restarts import RestartBudget
from tandem.protocol.config import WorkerConfig
from tandem.protocol.errors import ServingError, WorkerError
from tandem.protocol.messages import PeerAddress, Role
from tandem.runtime.idle_timeout import answered_in_time
from tandem.worker.status import WorkerStatus

__all__ = ["Member", "call", "first_line"]

logger = logging.getLogger(__name__)

_PLACE_TIMEOUT_S = 600.0  # a cluster may have to start a machine
_LOAD_TIMEOUT_S = 3600.0  # fetching a large model and loading it from a cold disk
# A process answers while it loads, unless it is stopped or hangs: imports and copies let other threads run.
_SILENT_START_S = 60.0
_LOOK_AT_START_S = 5.0
_PLACE_NOTICE_S = 20.0  # after this the user is told what Ray has no room for
_REPLACE_NOTICE_S = 5.0  # the same for a worker that served: others may have to do its work until there is room
_CALL_TIMEOUT_S = 15.0
_TELL_AGAIN_S = 1.0  # to a worker that did not answer
_DRAIN_TIMEOUT_S = 120.0
_DRAIN_POLL_S = 0.1
_ACTOR_THREADS = 8


@dataclass(eq=False, slots=True)
class Member:
    """The place of one worker. Its process is replaced when it dies; `address` names the present one."""

    config: WorkerConfig
    bundle: Bundle
    restarts: RestartBudget
    actor: Any = None
    process: ProcessIdentity | None = None
    address: PeerAddress | None = None
    pid: int = 0
    up_since: float = math.inf
    has_served: bool = False
    waits_for_room: bool = False  # Ray has no node for it now
    home_role: Role | None = None  # what it was before it took over for a pool without workers
    is_up: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def worker_id(self) -> str:
        """Name of the worker, the same in all its lives."""
        return self.config.worker_id

    async def start(self, *, on_no_room: Callable[[str], None]) -> PeerAddress:
        """Start a process and load the model; where the worker is reached."""
        options = self.bundle.options | {
            "max_concurrency": _ACTOR_THREADS,
            "max_restarts": 0,  # a restart is a new epoch with a new address: the supervisor does it
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(self.config.engine.num_threads or 1)}},
        }
        self.actor = ray.remote(WorkerActor).options(**options).remote(self.config)
        self.process = await self._placed(f"{self.bundle} for {self.worker_id}", on_no_room)
        self.address = await self._loaded()
        return self.address

    async def ended(self) -> str:
        """Wait for the end of the worker's loop or process; the reason."""
        try:
            return str(await self.actor.watch.remote())
        except RayError as exc:
            return first_line(exc)

    def kill(self) -> None:
        """Let Ray end the process."""
        if self.actor is None:
            return
        try:
            ray.kill(self.actor, no_restart=True)
        except (RayError, ValueError) as exc:  # Ray may know nothing of it any more
            logger.warning("Ray could not kill %s: %s", self.worker_id, first_line(exc))

    async def status(self) -> WorkerStatus:
        """Load and open business."""
        status: WorkerStatus = await call(self.actor.status)
        return status

    async def finish(self, request_ids: frozenset[str]) -> None:
        """Wait until the worker has nothing left of these requests. Raises WorkerError if that takes too long."""
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        while (await self.status()).request_ids & request_ids:
            if time.monotonic() > deadline:
                raise WorkerError(f"{self.worker_id} did not finish its work in {_DRAIN_TIMEOUT_S} s")
            await asyncio.sleep(_DRAIN_POLL_S)

    async def tell(self, address: PeerAddress | None, method: str, peer: PeerAddress) -> None:
        """Tell the process at `address` of another's death until it has heard it or is dead itself: it waits for it."""
        while self.is_up.is_set() and self.address == address:
            try:
                await call(getattr(self.actor, method), peer)
                return
            except (RayError, ServingError, TimeoutError) as exc:
                logger.warning("%s could not be told of %s yet: %s", self.worker_id, peer.worker_id, first_line(exc))
            await asyncio.sleep(_TELL_AGAIN_S)

    async def _placed(self, needs: str, on_no_room: Callable[[str], None]) -> ProcessIdentity:
        """Wait until Ray has given the worker a process; which one. Tells the user when that takes long.

        Without a living node it never will: the node of a private cluster, once dead, does not come back.
        """
        identity = asyncio.ensure_future(call(self.actor.identity, timeout_s=_PLACE_TIMEOUT_S))
        try:
            notice_s = _REPLACE_NOTICE_S if self.has_served else _PLACE_NOTICE_S
            while not (await asyncio.wait({identity}, timeout=notice_s))[0]:
                if not await asyncio.to_thread(_has_nodes):
                    raise WorkerError("no node of the Ray cluster is alive")
                if not self.waits_for_room:
                    self.waits_for_room = True
                    on_no_room(f"waiting for {needs}; the cluster has {await asyncio.to_thread(_resources)}")
            process: ProcessIdentity = await identity
        except TimeoutError:
            raise WorkerError(
                f"Ray found no {needs} in {_PLACE_TIMEOUT_S:.0f} s; the cluster has "
                f"{await asyncio.to_thread(_resources)}. Lower num_cpus_per_worker or num_gpus_per_worker, or add nodes"
            ) from None
        finally:
            self.waits_for_room = False
            identity.cancel()
        return process

    async def _loaded(self) -> PeerAddress:
        """Wait until the worker has loaded its model, however long that takes, but only while its process answers."""
        start = asyncio.ensure_future(call(self.actor.start, timeout_s=_LOAD_TIMEOUT_S))
        try:
            while not (await asyncio.wait({start}, timeout=_LOOK_AT_START_S))[0]:
                answer = asyncio.ensure_future(call(self.actor.identity, timeout_s=_LOAD_TIMEOUT_S))
                try:
                    if not await answered_in_time(answer, _SILENT_START_S):
                        raise WorkerError(f"it said nothing for {_SILENT_START_S:g} s while it loaded its model")
                    await answer
                finally:
                    answer.cancel()
            address: PeerAddress = await start
        finally:
            start.cancel()
        return address


async def call(method: Any, *args: Any, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
    """Call an actor's method and wait for its answer, for a bounded time."""
    return await asyncio.wait_for(method.remote(*args), timeout_s)


def first_line(exc: BaseException) -> str:
    """The line of an error that a user needs.

    Ray puts pages of traceback before what an actor raised, and a list of possible causes after the news of a death.
    """
    cause = getattr(exc, "cause", None) or exc
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    line = (lines[-1] if lines else "") or type(exc).__name__
    return line.partition(". ")[0].rstrip(".") if isinstance(cause, RayActorError) else line


def _has_nodes() -> bool:
    return any(node["Alive"] for node in ray.nodes())


def _resources() -> str:
    """What Ray has for new workers."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return " and ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s free" for kind in ("CPU", "GPU"))
