"""One worker of a cluster: its Ray actor through all its lives, and the calls that are made to it.

`WorkerMember` is a worker with Tandem's own engine. `EngineMember` (engines/member.py) is a server of another engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import ray
from ray.exceptions import RayActorError, RayError

from tandem.cluster.actor import WorkerActor
from tandem.cluster.openmp import preload_of
from tandem.cluster.owned_actor import Survivor, WatchNews, WorkerClaim
from tandem.cluster.ownership import Owner, Tenure
from tandem.cluster.placement import Bundle
from tandem.cluster.process_end import ProcessIdentity
from tandem.cluster.restarts import RestartBudget
from tandem.protocol.config import WorkerConfig
from tandem.protocol.errors import ServingError, WorkerError
from tandem.protocol.messages import PeerAddress, Role, WorkerState
from tandem.router.workers.client import WorkerClient
from tandem.runtime.idle_timeout import answered_in_time
from tandem.scheduling.workers.registry import Registry
from tandem.worker.status import WorkerStatus

__all__ = ["Member", "Requests", "WorkerMember", "call", "first_line", "kind_of", "member_of"]

logger = logging.getLogger(__name__)

_PLACE_TIMEOUT_S = 600.0  # a cluster may have to start a machine
_LOAD_TIMEOUT_S = 3600.0  # fetching a large model and loading it from a cold disk
# A process answers while it loads, unless it is stopped or hangs: imports and copies let other threads run.
_SILENT_START_S = 60.0
_LOOK_AT_START_S = 5.0
_PLACE_NOTICE_S = 20.0  # after this the user is told what Ray has no room for
_REPLACE_NOTICE_S = 5.0  # the same for a worker that has served: others may have to do its work until there is room
_PLACE_AGAIN_S = 1.0
_NEVER_RAN = "The actor never ran"  # in Ray's error for an actor that had no process yet
_CALL_TIMEOUT_S = 15.0
_TELL_AGAIN_S = 1.0  # until a worker that did not answer is told again
_DRAIN_TIMEOUT_S = 120.0
_DRAIN_POLL_S = 0.1
_ACTOR_THREADS = 8

Requests = frozenset[Any]  # the requests of one worker at one time, by whatever identifies them there


class Member(ABC):
    """The place of one worker. Its process is replaced when it dies."""

    load_timeout_s = _LOAD_TIMEOUT_S
    can_cover = True  # whether it can serve alone, so that it may take over for a pool without workers
    fixed_role = ""  # why it cannot change its role; "" = it can
    ends_if_given_up = True  # whether its process is ended when the router has lost it

    def __init__(self, worker_id: str, role: Role, restarts: RestartBudget) -> None:
        self.worker_id = worker_id  # the same for all its processes
        self.role = role
        self.restarts = restarts
        self.actor: Any = None
        self.process: ProcessIdentity | None = None
        self.address: PeerAddress | None = None  # of the present process, if peers must be told about its end
        self.pid = 0
        self.up_since = math.inf
        self.has_served = False
        self.waits_for_room = False  # whether Ray has no node for it now
        self.departs: Literal["", "leave", "restart"] = ""  # what follows when its process ends on purpose
        self.bundle: Bundle | None = None  # where its processes run
        self.is_added = False  # whether it came later: if it cannot start, the others go on serving
        self.owner: Owner | None = None  # set if it may outlive its server
        self.survivor: Survivor | None = None  # the process that an earlier server left, until it is taken over
        self.given_up = ""  # why nobody waits any more for a process that does not serve; "" = somebody does
        self.start_s = 0.0  # duration of its latest start, from asking for a place until it served; 0 = not known
        self.home_role: Role | None = None  # what it was before it took over for a pool without workers
        self.flips_to: Role | None = None  # the role that the latest flip under way gives it
        self.flip_lock = asyncio.Lock()  # one flip at a time
        self.is_up = asyncio.Event()
        self.has_left = asyncio.Event()  # set once it has left for good, and nobody looks after it
        self._is_given_up = asyncio.Event()

    async def start(self, bundle: Bundle, *, on_no_room: Callable[[str], None], on_placed: Callable[[], None]) -> None:
        """Start a process in this bundle, load the model and make the worker known to the router.

        The first time, a survivor takes the place of a new process.
        """
        began_s = time.monotonic()
        survivor, self.survivor = self.survivor, None
        if survivor is not None:
            self.actor, self.process = survivor.actor, survivor.claim.process
            started = self._taken_over(survivor.claim)
        else:
            options = bundle.options | {
                "max_concurrency": _ACTOR_THREADS,
                "max_restarts": 0,  # a restart is a new epoch with a new address: the supervisor does it
            }
            tenure = None
            if self.owner is not None:
                name = f"{self.worker_id}-{uuid.uuid4().hex[:8]}"
                options |= {"lifetime": "detached", "namespace": self.owner.namespace, "name": name}
                tenure = Tenure(owner=self.owner, place=bundle.place, is_added=self.is_added)
            together = "" if self.has_served or self.is_added else " (Ray places all workers of a start together)"
            needs = f"{bundle} for {self.worker_id}{together}"
            self.process = await self._first_process(options, tenure, needs, on_no_room)
            on_placed()
            started = await self._loaded()
        self.pid = self.process.process.pid
        await self._join(started)
        self.up_since, self.has_served = time.monotonic(), True
        if survivor is None:
            self.start_s = self.up_since - began_s
        self.is_up.set()

    @property
    def role_to_be(self) -> Role:
        """Its role once the flips under way are over."""
        return self.flips_to or self.role

    @property
    def has_been_up(self) -> bool:
        """Whether it has served under this server: one that is being taken over has not."""
        return math.isfinite(self.up_since)

    @abstractmethod
    def another(self, worker_id: str, role: Role) -> Member:
        """One more worker like this one."""

    @abstractmethod
    def is_like(self, claim: WorkerClaim) -> bool:
        """Whether a worker that an earlier server left was started as this one would be."""

    def _taken_over(self, claim: WorkerClaim) -> Any:
        """Go on with a worker that an earlier server left. Returns what its `start` returned."""
        if self.role is Role.PREFILL is not claim.role:
            self.home_role = self.role  # it may be covering for a pool whose workers died
        self.role = claim.role
        return claim.started

    @abstractmethod
    def _create_actor(self, options: dict[str, Any], tenure: Tenure | None) -> Any:
        """Ask Ray for a process with these options."""

    @abstractmethod
    async def _join(self, started: Any) -> None:
        """Make the worker known to the router. `started` is what its actor's `start` returned."""

    @abstractmethod
    async def leave(self, reason: str) -> None:
        """Let the router forget the worker: its requests end with an error. Later calls change nothing."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the router places requests on it."""

    @abstractmethod
    def withdraw(self, reason: str, *, is_fallback: bool = False) -> None:
        """Stop the router from placing anything more on it; what runs there goes on, or moves.

        One that `is_fallback` still gets what no other worker can serve, until a call that says it is not.
        """

    @abstractmethod
    async def play(self, role: Role, reason: str) -> Requests:
        """Let the worker serve in this role from now on. Returns the requests that it still has from its old one."""

    @abstractmethod
    async def running(self) -> Requests:
        """The requests that it has now."""

    @abstractmethod
    async def check_integrity(self) -> str:
        """What is wrong with, or held by, a worker that should be idle; "" where nothing is."""

    @abstractmethod
    async def tell(self, address: PeerAddress | None, method: str, peer: PeerAddress) -> None:
        """Tell the process at `address` of another's death until it has heard it or is dead itself."""

    async def is_idle(self) -> bool:
        """Whether it has nothing to do, for clients or for other workers."""
        return not await self.running()

    async def finish(self, requests: Requests) -> None:
        """Wait until the worker has nothing left of these requests. Raises WorkerError if that takes too long."""
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        while await self.running() & requests:
            if time.monotonic() > deadline:
                raise WorkerError(f"{self.worker_id} did not finish its work in {_DRAIN_TIMEOUT_S} s")
            await asyncio.sleep(_DRAIN_POLL_S)

    async def ended(self, on_asked_to_leave: Callable[[], None]) -> str:
        """Wait for the end of the worker or of its process; returns the reason.

        Does not return for a worker that another server has claimed: the renewal of its lease notices that.
        """
        owner = self.owner.name if self.owner is not None else ""
        while True:
            try:
                end = await self.actor.watch.remote(owner)
            except RayError as exc:
                return first_line(exc)
            if end is WatchNews.ASKED_TO_LEAVE:
                on_asked_to_leave()
            elif end is WatchNews.CLAIMED:
                await asyncio.get_running_loop().create_future()
            else:
                return self._reason_of(end)

    def _reason_of(self, end: Any) -> str:
        """The reason in what its actor's `watch` returned."""
        return str(end)

    async def stop(self) -> None:
        """Let the worker end in good order."""
        await call(self.actor.stop)

    def give_up(self, reason: str) -> None:
        """End the wait for a process that does not serve yet."""
        self.given_up = reason
        self._is_given_up.set()

    async def pause(self, delay_s: float) -> None:
        """Wait before the next start, unless the worker is given up."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_given_up.wait(), delay_s)

    def kill(self) -> None:
        """Let Ray end the process."""
        if self.actor is None:
            return
        try:
            ray.kill(self.actor, no_restart=True)
        except (RayError, ValueError) as exc:  # Ray may know nothing of it any more
            logger.warning("Ray could not kill %s: %s", self.worker_id, first_line(exc))

    async def _first_process(
        self, options: dict[str, Any], tenure: Tenure | None, needs: str, on_no_room: Callable[[str], None]
    ) -> ProcessIdentity:
        """Create actors until one has a process; returns which process.

        Ray notices a dead node some seconds late, and may have chosen it: that does not count as a death of the worker.
        """
        for is_last in (False, False, True):
            self.actor = self._create_actor(options, tenure)
            try:
                return await self._placed(needs, on_no_room)
            except RayActorError as exc:
                if is_last or self.given_up or _NEVER_RAN not in str(exc):
                    raise
            await asyncio.sleep(_PLACE_AGAIN_S)
        raise AssertionError("the last try returns or raises")

    async def _placed(self, needs: str, on_no_room: Callable[[str], None]) -> ProcessIdentity:
        """Wait until Ray has given the worker a process; returns which one. Tells the user when that takes long.

        Without a living node it never will: the node of a private cluster, once dead, does not come back.
        """
        identity = asyncio.ensure_future(call(self.actor.identity, timeout_s=_PLACE_TIMEOUT_S))
        identity.add_done_callback(lambda found: found.cancelled() or found.exception())  # marks it as seen
        given_up = asyncio.ensure_future(self._is_given_up.wait())
        try:
            notice_s = _REPLACE_NOTICE_S if self.has_served else _PLACE_NOTICE_S
            waits = {identity, given_up}
            while not (await asyncio.wait(waits, timeout=notice_s, return_when=asyncio.FIRST_COMPLETED))[0]:
                if not await asyncio.to_thread(_has_nodes):
                    raise WorkerError("no node of the Ray cluster is alive")
                if not self.waits_for_room:
                    self.waits_for_room = True
                    on_no_room(
                        f"waiting for a process with {needs}; the cluster has {await asyncio.to_thread(_resources)}"
                    )
            if given_up.done():
                raise WorkerError(self.given_up)
            process: ProcessIdentity = await identity
        except TimeoutError:
            raise WorkerError(
                f"Ray found no {needs} in {_PLACE_TIMEOUT_S:.0f} s; the cluster has "
                f"{await asyncio.to_thread(_resources)}. Lower num_cpus_per_worker or num_gpus_per_worker, or add nodes"
            ) from None
        finally:
            self.waits_for_room = False
            identity.cancel()
            given_up.cancel()
        return process

    async def _loaded(self) -> Any:
        """Wait until the worker has loaded its model, however long that takes, but only while its process answers."""
        start = asyncio.ensure_future(call(self.actor.start, timeout_s=self.load_timeout_s))
        try:
            while not (await asyncio.wait({start}, timeout=_LOOK_AT_START_S))[0]:
                answer = asyncio.ensure_future(call(self.actor.identity, timeout_s=self.load_timeout_s))
                try:
                    if not await answered_in_time(answer, _SILENT_START_S):
                        raise WorkerError(f"it said nothing for {_SILENT_START_S:g} s while it loaded its model")
                    await answer
                finally:
                    answer.cancel()
            return await start
        finally:
            start.cancel()


class WorkerMember(Member):
    """A worker with Tandem's own engine."""

    def __init__(
        self,
        config: WorkerConfig,
        restarts: RestartBudget,
        workers: WorkerClient,
        registry: Registry,
    ) -> None:
        super().__init__(config.worker_id, config.role, restarts)
        self._config = config
        self._workers = workers
        self._registry = registry

    def another(self, worker_id: str, role: Role) -> WorkerMember:
        """As `Member.another`. It gets no cores of its own: those of the machine are given out at the start."""
        config = replace(self._config, worker_id=worker_id, role=role, cpu_cores=())
        return WorkerMember(config, RestartBudget(self.restarts.max_restarts), self._workers, self._registry)

    def is_like(self, claim: WorkerClaim) -> bool:
        """As `Member.is_like`."""
        return bool(self._comparable(self._config) == self._comparable(claim.config))

    @staticmethod
    def _comparable(config: WorkerConfig) -> WorkerConfig:
        return replace(config, worker_id="", role=kind_of(config.role), router_key="", cpu_cores=())

    def _create_actor(self, options: dict[str, Any], tenure: Tenure | None) -> Any:
        variables = {"OMP_NUM_THREADS": str(self._config.engine.num_threads or 1)}
        if self._config.socket_folder and not options["num_gpus"] and "LD_PRELOAD" not in os.environ:
            variables |= preload_of(sys.executable)  # on this machine, whose files are known
        options |= {"runtime_env": {"env_vars": variables}}
        return ray.remote(WorkerActor).options(**options).remote(replace(self._config, role=self.role), tenure)

    async def _join(self, started: PeerAddress) -> None:
        self.address = started
        self.pid = (await self._workers.add_worker(started)).pid

    async def leave(self, reason: str) -> None:
        """As `Member.leave`."""
        if self.address is not None:
            self._workers.mark_dead(self.worker_id, reason)
        self.address = None

    @property
    def is_ready(self) -> bool:
        """As `Member.is_ready`."""
        worker = self._registry.get(self.worker_id)
        return worker is not None and worker.state is WorkerState.READY

    def withdraw(self, reason: str, *, is_fallback: bool = False) -> None:
        """As `Member.withdraw`: its answers move to other workers that have room."""
        self._registry.set_state(self.worker_id, WorkerState.DRAINING, reason, is_fallback=is_fallback)

    async def is_idle(self) -> bool:
        """As `Member.is_idle`: peers may still read KV of answers that moved, or write some into it."""
        status: WorkerStatus = await call(self.actor.status)
        worker = self._registry.get(self.worker_id)
        if worker is not None and worker.is_booked:  # requests may be on their way to it
            return False
        return not (status.request_ids or status.num_open_handoffs or status.num_open_leases or status.num_open_reads)

    async def play(self, role: Role, reason: str) -> Requests:
        """As `Member.play`. One that is to decode gets work meanwhile: it may be the only one that is left."""
        is_leaving_pool = role is Role.PREFILL  # its answers leave at once
        if is_leaving_pool:
            self._registry.set_state(self.worker_id, WorkerState.DRAINING, reason)
        outcome = "the flip failed"
        try:
            await call(self.actor.set_role, role)
            self._registry.set_role(self.worker_id, role)
            self.role = role
            left = await self.running()
            outcome = "it plays its new role"
            return left
        finally:
            if is_leaving_pool:
                self._registry.set_state(self.worker_id, WorkerState.READY, outcome)

    async def running(self) -> Requests:
        """As `Member.running`: ids of requests."""
        status: WorkerStatus = await call(self.actor.status)
        return status.request_ids

    async def check_integrity(self) -> str:
        """As `Member.check_integrity`."""
        return str(await call(self.actor.check_integrity, True))

    async def tell(self, address: PeerAddress | None, method: str, peer: PeerAddress) -> None:
        """As `Member.tell`: the end of a peer's process frees the blocks that it may have written to."""
        while self.is_up.is_set() and self.address == address:
            try:
                await call(getattr(self.actor, method), peer)
                return
            except (RayError, ServingError, TimeoutError) as exc:
                logger.warning("%s could not be told about %s yet: %s", self.worker_id, peer.worker_id, first_line(exc))
            await asyncio.sleep(_TELL_AGAIN_S)


def kind_of(role: Role) -> Role:
    """A key that is the same for all roles between which a worker can change."""
    return role if role is Role.COLOCATED else Role.DECODE


def member_of(members: Mapping[str, Member], worker_id: str) -> Member | None:
    """The member of a worker that the router knows by this name. NAME.dp1 is a data-parallel rank of member NAME."""
    return members.get(worker_id) or members.get(worker_id.rpartition(".dp")[0])


async def call(method: Any, *args: Any, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
    """Call an actor's method and wait for its answer, for a bounded time."""
    return await asyncio.wait_for(method.remote(*args), timeout_s)


def first_line(exc: BaseException) -> str:
    """The line of an error that a user needs.

    Ray puts pages of traceback before what an actor raised, and a list of possible causes after the report of a death.
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
    return " and ".join(
        f"{round(free.get(kind, 0), 2):g} of {total.get(kind, 0):g} {kind}s free" for kind in ("CPU", "GPU")
    )
