"""One worker of a cluster: its Ray actor through all its lives, and the calls that are made to it.

`WorkerMember` (worker_member.py) has Tandem's own engine, `EngineMember` (engines/member.py) a server of another one.
Only the methods of `Member` change its state; everybody else reads it and calls them:

             begin           serve         drain
     DOWN --------> STARTING -----> UP ----------> DRAINING
      ^ |             |  |           |               |   |
      | | give_up     |  | give_up   | die           |   | die, to leave
      | |             |  |           |               |   |
      | +-------------|--+-----------|---------------|---+--> LEAVING --> GONE
      |               | die          |               | die, to restart      forget
      +---------------+--------------+---------------+

Ray's watch, a router that hears nothing more, or a drain may see a death first; the first one reports it with `die`.
Later reports find the worker in another state and change nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from tandem.cluster.bundles import Bundle
from tandem.cluster.owned_actor import OrphanedWorker, WatchNews, WorkerClaim
from tandem.cluster.ownership import LeaseTerms, Owner
from tandem.cluster.process_end import ProcessIdentity
from tandem.cluster.restarts import RestartBudget
from tandem.protocol.errors import WorkerError, WorkerNotFound
from tandem.protocol.messages import PeerAddress, Role
from tandem.runtime.idle_timeout import answered_in_time

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
_DRAIN_TIMEOUT_S = 120.0
_DRAIN_POLL_S = 0.1
_ACTOR_THREADS = 8
_NUM_REMEMBERED = 20  # flips, drains and joins, of each

Requests = frozenset[Any]  # the requests of one worker at one time, by whatever identifies them there


class MemberState(Enum):
    """Where a worker is in its life."""

    DOWN = "down"  # it has no process; the next one is started soon
    STARTING = "starting"  # its process is being placed, loads the model, or joins the router
    UP = "up"  # it serves
    DRAINING = "draining"  # it finishes its work; then its process ends
    LEAVING = "leaving"  # it has no process, or one that is being ended, and no other one follows
    GONE = "gone"  # no longer supervised


_TRANSITIONS: dict[MemberState, frozenset[MemberState]] = {
    MemberState.DOWN: frozenset({MemberState.STARTING, MemberState.LEAVING}),
    MemberState.STARTING: frozenset({MemberState.UP, MemberState.DOWN, MemberState.LEAVING}),
    MemberState.UP: frozenset({MemberState.DRAINING, MemberState.DOWN}),
    MemberState.DRAINING: frozenset({MemberState.DOWN, MemberState.LEAVING}),
    MemberState.LEAVING: frozenset({MemberState.GONE}),
    MemberState.GONE: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one process, or of the wait for it."""

    reason: str
    before: MemberState  # what the worker was until then
    served_s: float  # how long the process served; 0 if it never did


class Member(ABC):
    """The place of one worker. Its process is replaced when it dies."""

    load_timeout_s = _LOAD_TIMEOUT_S
    can_cover = True  # whether it can serve alone, so that it may take over for a pool without workers
    fixed_role = ""  # why it cannot change its role; "" = it can

    def __init__(self, worker_id: str, role: Role, restarts: RestartBudget) -> None:
        self.worker_id = worker_id  # the same for all its processes
        self.role = role
        self.restarts = restarts
        self.state = MemberState.DOWN
        self.given_up = ""  # why a process that does not serve is no longer waited for; "" = it is
        self.bundle: Bundle | None = None  # where its processes run
        self.is_added = False  # whether it came later: if it cannot start, the others go on serving
        self.orphan: OrphanedWorker | None = None  # the process that an earlier server left, until it is taken over
        self.actor: Any = None
        self.process: ProcessIdentity | None = None
        self.address: PeerAddress | None = None  # of the present process, if peers must be told about its end
        self.pid = 0
        self.up_since = math.inf
        self.start_s = 0.0  # duration of its latest start, from asking for a place until it served; 0 = not known
        self.has_served = False
        self.waits_for_room = False  # whether Ray has no node for it now
        self.home_role: Role | None = None  # what it was before it took over for a pool without workers
        self._next_role: Role | None = None  # the role that the latest flip under way gives it
        self._flip_lock = asyncio.Lock()  # one flip at a time
        self._owner: Owner | None = None  # set if it may outlive its server
        self._is_restarting = False  # whether another process follows the one that drains
        self._death: asyncio.Future[Death] | None = None  # of the present process
        self._has_moved = asyncio.Event()  # set, and replaced, at each change of state

    # -- transitions --------------------------------------------------------------------------------------

    def supervise(self, bundle: Bundle, owner: Owner | None) -> None:
        """Fix where its processes run, and who owns them if they may outlive their server."""
        self.bundle, self._owner = bundle, owner

    def adopt(self, orphan: OrphanedWorker) -> None:
        """Take over this process, which an earlier server left, instead of starting the first one."""
        assert self.state is MemberState.DOWN, f"{self.worker_id} is {self.state.value}"
        self.orphan, self.has_served = orphan, True

    def begin(self) -> asyncio.Future[Death]:
        """A process is about to be started: from DOWN. The result is done when it has died or is given up."""
        self._go(MemberState.STARTING)
        self._death = asyncio.get_running_loop().create_future()
        return self._death

    def serve(self) -> None:
        """The process has joined the router: from STARTING. Raises `WorkerError` if it has died or is given up."""
        if self.state in (MemberState.DOWN, MemberState.LEAVING):
            raise WorkerError(self.given_up or f"{self.worker_id} died while it started")
        self._go(MemberState.UP)
        self.up_since, self.has_served = time.monotonic(), True

    def drain(self, *, restart: bool) -> None:
        """Its process ends on purpose, once its work is done: from UP. With `restart` another one follows."""
        self._go(MemberState.DRAINING)
        self._is_restarting = restart

    def give_up(self, reason: str) -> None:
        """A process that does not serve is no longer waited for: from DOWN or STARTING."""
        assert self.is_coming, f"{self.worker_id} is {self.state.value}"
        self.given_up = reason
        self._end(MemberState.LEAVING, reason)

    def die(self, reason: str) -> None:
        """Its process has died, or must be ended. If it has none, the death is already known."""
        if self.state in (MemberState.STARTING, MemberState.UP, MemberState.DRAINING):
            is_last = self.state is MemberState.DRAINING and not self._is_restarting
            self._end(MemberState.LEAVING if is_last else MemberState.DOWN, reason)

    def forget(self) -> None:
        """It is no longer supervised: from LEAVING."""
        self._go(MemberState.GONE)

    def release(self) -> tuple[ProcessIdentity | None, PeerAddress | None]:
        """Hand out the process that died and its address: they are the worker's no longer."""
        assert not self.is_up, f"{self.worker_id} is {self.state.value}"
        released = self.process, self.address
        self.process = self.address = None
        return released

    def _go(self, state: MemberState) -> None:
        assert state in _TRANSITIONS[self.state], f"{self.worker_id} cannot go from {self.state.value} to {state.value}"
        self.state = state
        self._has_moved.set()
        self._has_moved = asyncio.Event()

    def _end(self, state: MemberState, reason: str) -> None:
        death = Death(reason, self.state, time.monotonic() - self.up_since if self.is_up else 0.0)
        self._go(state)
        if self.home_role is not None:  # its next process need not cover for others
            self.role, self.home_role = self.home_role, None
        if self._death is not None and not self._death.done():
            self._death.set_result(death)

    # -- roles --------------------------------------------------------------------------------------------

    def cover(self) -> None:
        """Note that the flip that follows is for a pool without workers, and ends when that has one again."""
        self.home_role = self.role

    def end_cover(self) -> Role:
        """Note that the flip that follows ends the cover. Returns the role to go back to."""
        assert self.home_role is not None, f"{self.worker_id} covers for nobody"
        home, self.home_role = self.home_role, None
        return home

    def plan_flip(self, role: Role) -> None:
        """Note that a flip to this role is about to begin."""
        self._next_role = role

    @asynccontextmanager
    async def flipping(self, role: Role) -> AsyncIterator[None]:
        """Wait for other flips, and keep them away while the block runs."""
        self._next_role = role
        try:
            async with self._flip_lock:
                yield
        finally:
            if self._next_role is role:
                self._next_role = None

    # -- what others read ---------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether it serves."""
        return self.state in (MemberState.UP, MemberState.DRAINING)

    @property
    def is_coming(self) -> bool:
        """Whether it does not serve yet, or not now, but will."""
        return self.state in (MemberState.DOWN, MemberState.STARTING)

    @property
    def is_flipping(self) -> bool:
        """Whether it is taking another role just now."""
        return self._flip_lock.locked()

    @property
    def role_to_be(self) -> Role:
        """Its role once the flips under way are over."""
        return self._next_role or self.role

    @property
    def has_been_up(self) -> bool:
        """Whether it has served under this server: one that is being taken over has not."""
        return math.isfinite(self.up_since)

    async def until(self, *states: MemberState) -> None:
        """Wait until it is in one of these states."""
        while self.state not in states:
            await self._has_moved.wait()

    async def pause(self, delay_s: float) -> None:
        """Wait before the next start, unless it is given up."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.until(MemberState.LEAVING), delay_s)

    # -- its processes ------------------------------------------------------------------------------------

    async def start(self, *, on_no_room: Callable[[str], None], on_placed: Callable[[], None]) -> None:
        """Start a process in its bundle, load the model and make the worker known to the router: from STARTING to UP.

        The first time, an orphaned one takes the place of a new process.
        """
        began_s, bundle = time.monotonic(), self.bundle
        assert bundle is not None, "it is supervised"
        orphan, self.orphan = self.orphan, None
        if orphan is not None:
            self.actor, self.process = orphan.actor, orphan.claim.process
            started = self._taken_over(orphan.claim)
        else:
            options = bundle.options | {
                "max_concurrency": _ACTOR_THREADS,
                "max_restarts": 0,  # a restart is a new epoch with a new address: the supervisor does it
            }
            terms = None
            if self._owner is not None:
                name = f"{self.worker_id}-{uuid.uuid4().hex[:8]}"
                options |= {"lifetime": "detached", "namespace": self._owner.namespace, "name": name}
                terms = LeaseTerms(owner=self._owner, place=bundle.place, is_added=self.is_added)
            together = "" if self.has_served or self.is_added else " (Ray places all workers of a start together)"
            needs = f"{bundle} for {self.worker_id}{together}"
            self.process = await self._first_process(options, terms, needs, on_no_room)
            on_placed()
            started = await self._loaded()
        self.pid = self.process.process.pid
        await self._join(started)
        self.serve()
        if orphan is None:
            self.start_s = self.up_since - began_s

    def another(self, worker_id: str, role: Role) -> Member:
        """One more worker like this one."""
        member = self._copy(worker_id, role)
        member.is_added = True
        return member

    @abstractmethod
    def _copy(self, worker_id: str, role: Role) -> Member:
        """A worker with the same settings. It gets no cores of its own: the machine's are given out at the start."""

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
    def _create_actor(self, options: dict[str, Any], terms: LeaseTerms | None) -> Any:
        """Ask Ray for a process with these options."""

    @abstractmethod
    async def _join(self, started: Any) -> None:
        """Make the worker known to the router. `started` is what its actor's `start` returned."""

    @abstractmethod
    async def leave(self, reason: str) -> None:
        """Let the router forget the worker, unless it has done so: its requests end with an error."""

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
    async def switch_role(self, role: Role, reason: str) -> Requests:
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
        owner = self._owner.name if self._owner is not None else ""
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

    def kill(self) -> None:
        """Let Ray end the process."""
        if self.actor is not None:
            end_actor(self.actor, self.worker_id)

    async def _first_process(
        self, options: dict[str, Any], terms: LeaseTerms | None, needs: str, on_no_room: Callable[[str], None]
    ) -> ProcessIdentity:
        """Create actors until one has a process; returns which process.

        Ray notices a dead node some seconds late, and may have chosen it: that does not count as a death of the worker.
        """
        for is_last in (False, False, True):
            self.actor = self._create_actor(options, terms)
            try:
                return await self._placed(needs, on_no_room)
            except RayActorError as exc:
                if is_last or _NEVER_RAN not in str(exc):
                    raise
            await asyncio.sleep(_PLACE_AGAIN_S)
        raise AssertionError("the last try returns or raises")

    async def _placed(self, needs: str, on_no_room: Callable[[str], None]) -> ProcessIdentity:
        """Wait until Ray has given the worker a process; returns which one. Tells the user when that takes long.

        Without a living node it never will: the node of a private cluster, once dead, does not come back.
        """
        identity = asyncio.ensure_future(call(self.actor.identity, timeout_s=_PLACE_TIMEOUT_S))
        identity.add_done_callback(lambda found: found.cancelled() or found.exception())  # marks it as seen
        try:
            notice_s = _REPLACE_NOTICE_S if self.has_served else _PLACE_NOTICE_S
            while not (await asyncio.wait({identity}, timeout=notice_s))[0]:
                if not await asyncio.to_thread(_has_nodes):
                    raise WorkerError("no node of the Ray cluster is alive")
                if not self.waits_for_room:
                    self.waits_for_room = True
                    on_no_room(
                        f"waiting for a process with {needs}; the cluster has {await asyncio.to_thread(_resources)}"
                    )
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


def kind_of(role: Role) -> Role:
    """A key that is the same for all roles between which a worker can change."""
    return role if role is Role.COLOCATED else Role.DECODE


def member_of(members: Mapping[str, Member], worker_id: str) -> Member | None:
    """The member of a worker that the router knows by this name. NAME.dp1 is a data-parallel rank of member NAME."""
    return members.get(worker_id) or members.get(worker_id.rpartition(".dp")[0])


def named(members: Mapping[str, Member], worker: str) -> Member:
    """The member of this name. Raises `WorkerNotFound`."""
    if worker not in members:
        raise WorkerNotFound(f"There is no worker '{worker[:100]}'; there are: {', '.join(members)}.")
    return members[worker]


def remember(latest: list[dict[str, object]], record: dict[str, object]) -> None:
    """Add a record to the latest of its kind, oldest first, as `/v1/pools` shows them."""
    latest.append(record)
    del latest[:-_NUM_REMEMBERED]


def end_actor(actor: Any, name: str) -> None:
    """Let Ray end an actor's process."""
    try:
        ray.kill(actor, no_restart=True)
    except (RayError, ValueError) as exc:  # Ray may no longer know it
        logger.warning("Ray could not end %s: %s", name, first_line(exc))


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
