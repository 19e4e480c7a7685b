"""Keeps the workers of a cluster alive: starts their actors, notices deaths, replaces them, flips their roles.

The registry of the router stays the one place that says what a worker's state is; the supervisor reports to it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from tandem.cluster.actor import WorkerActor
from tandem.cluster.process_end import ProcessIdentity, until_gone
from tandem.cluster.restarts import RestartBudget
from tandem.protocol.config import ClusterConfig, WorkerConfig
from tandem.protocol.errors import ConfigError, ServingError, WorkerError
from tandem.protocol.messages import PeerAddress, Role, WorkerState
from tandem.router.workers.client import WorkerClient
from tandem.router.workers.flow import RequestFlow
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.idle_timeout import answered_in_time
from tandem.scheduling.autoscaler import AutoscalerState, Decision, Flip, decide, observe
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.registry import Registry
from tandem.scheduling.workers import WorkerChange
from tandem.worker.status import WorkerStatus

__all__ = ["Supervisor"]

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 600.0  # loading a large model from a cold disk
# A process that loads answers all the while, unless it is stopped or hangs: imports and copies let other threads run.
_SILENT_START_S = 60.0
_LOOK_AT_START_S = 5.0
_PLACE_NOTICE_S = 20.0  # a person is told what Ray has no room for
_CALL_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 15.0
# A sender whose lost writes keep this share of a peer's pool in quarantine for this long is replaced: its end is proof.
_MAX_QUARANTINED_SHARE = 0.05
_QUARANTINE_S = 60.0
_LOOK_AT_QUARANTINES_S = 5.0
_TELL_AGAIN_S = 1.0  # to a survivor that did not answer
_GONE_TIMEOUT_S = 5.0  # how long a replacement waits for the room that a dead worker's process may still take
_DRAIN_TIMEOUT_S = 120.0
_DRAIN_POLL_S = 0.1
_NUM_REMEMBERED_FLIPS = 20
_LOST = "it died; the answer is lost, send the request again"  # told to the clients of a dead worker
_ACTOR_THREADS = 8


@dataclass(eq=False, slots=True)
class _Member:
    config: WorkerConfig
    restarts: RestartBudget
    actor: Any = None
    process: ProcessIdentity | None = None
    address: PeerAddress | None = None
    pid: int = 0
    up_since: float = math.inf
    has_served: bool = False
    home_role: Role | None = None  # what it was before it took over for a pool without workers
    is_up: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """All workers of one `tandem serve`. Lives in the router's event loop; `on_progress(line)` tells a person."""

    def __init__(
        self,
        config: ClusterConfig,
        registry: Registry,
        costs: CostModel,
        workers: WorkerClient,
        flow: RequestFlow,
        *,
        on_progress: Callable[[str], None],
    ) -> None:
        self._config = config
        self._registry = registry
        self._costs = costs
        self._workers = workers
        self._flow = flow
        self._on_progress = on_progress
        self._members: dict[str, _Member] = {}
        self._background = BackgroundTasks()
        self._is_stopping = False
        self._is_ray_dead = False
        self._flips: deque[dict[str, object]] = deque(maxlen=_NUM_REMEMBERED_FLIPS)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure.add_done_callback(lambda failure: failure.cancelled() or failure.exception())  # marks it as seen
        flow.integrity_check = partial(self.check_integrity, idle=True)
        registry.listen(self._on_change)

    async def start(self, configs: list[WorkerConfig]) -> None:
        """Start all workers at once and return when each is connected. Raises ConfigError if one cannot be built."""
        for config in configs:
            self._members[config.worker_id] = _Member(config, RestartBudget(self._config.max_restarts))
        for member in self._members.values():
            self._background.start(
                f"the supervision of {member.config.worker_id}", partial(self._keep_alive, member), self._crashed
            )
        ups = asyncio.create_task(self._all_up())
        await asyncio.wait([ups, self._failure], return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            ups.cancel()
            self._failure.result()
        self._background.keep("the watch of quarantines", self._watch_quarantines)
        if self._config.autoscale:
            self._background.keep("the autoscaler", self._autoscale)

    @property
    def failure(self) -> asyncio.Future[None]:
        """Ends, with an error that says why, when nothing can be served any more: no worker lives or will come back."""
        return self._failure

    @property
    def flips(self) -> list[dict[str, object]]:
        """The latest flips, oldest first, as `/v1/pools` shows them."""
        return list(self._flips)

    def ray_died(self, error: WorkerError) -> None:
        """Nothing can be asked of Ray any more, which would only block: give up. Call it in the event loop."""
        self._is_stopping = self._is_ray_dead = True
        self._fail(error)

    async def close(self) -> None:
        """Stop every worker this supervisor started; those that do not stop in time are killed.

        Without Ray that is left to whoever ends what was started here.
        """
        self._is_stopping = True
        up = [] if self._is_ray_dead else [m.actor for m in self._members.values() if m.is_up.is_set()]
        stops = [asyncio.ensure_future(_call(actor.stop)) for actor in up]  # one that still loads is only killed
        if stops:
            await asyncio.wait(stops, timeout=_STOP_TIMEOUT_S)
        for stop in stops:
            stop.cancel()
        await asyncio.gather(self._background.close(), *stops, return_exceptions=True)
        for member in self._members.values():
            self._kill(member)

    async def check_integrity(self, *, idle: bool) -> dict[str, str]:
        """What is wrong with each worker's books, "" where nothing is."""
        up = {worker_id: member for worker_id, member in self._members.items() if member.is_up.is_set()}
        calls = (_call(member.actor.check_integrity, idle) for member in up.values())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return {
            worker_id: f"no answer: {_first_line(answer)}" if isinstance(answer, BaseException) else answer
            for worker_id, answer in zip(up, answers, strict=True)
        }

    async def flip(self, flip: Flip, reason: str) -> None:
        """Give a worker another role; its cache stays.

        It is given nothing more of its old role, serves in the new one within milliseconds, and finishes what it still
        has beside that: any worker can do both, and placement counts what it delays there. Ends when that is done.
        """
        member, worker = self._members[flip.worker_id], self._registry.get(flip.worker_id)
        if worker is None:
            return
        started = time.monotonic()
        record: dict[str, object] = {
            "worker": flip.worker_id,
            "from": worker.role,
            "to": flip.to_role,
            "reason": reason,
        }
        self._flips.append(record)
        try:
            left = await self._play(member, flip.to_role, reason)
        except (RayError, ServingError, TimeoutError, KeyError) as exc:
            logger.warning("%s did not flip to %s: %s", flip.worker_id, flip.to_role, exc)
            record["failed"] = str(exc) or type(exc).__name__
            return
        record["serving_after_s"] = round(time.monotonic() - started, 4)
        try:
            await self._finished(member, left)
        except (RayError, ServingError, TimeoutError) as exc:
            logger.warning("%s serves as %s, but is not drained: %s", flip.worker_id, flip.to_role, exc)
            record["not_drained"] = str(exc) or type(exc).__name__
        else:
            record["drained_after_s"] = round(time.monotonic() - started, 4)

    async def _play(self, member: _Member, role: Role, reason: str) -> frozenset[str]:
        """Let a worker serve in this role from now on; the requests that it still has from the old one."""
        worker_id = member.config.worker_id
        self._registry.set_state(worker_id, WorkerState.DRAINING, reason)
        outcome = "the flip failed"
        try:
            await _call(member.actor.set_role, role)
            self._registry.set_role(worker_id, role)
            member.config = replace(member.config, role=role)
            left = (await self._status(member)).request_ids
            outcome = "it plays its new role"
            return left
        finally:
            self._registry.set_state(worker_id, WorkerState.READY, outcome)

    async def _all_up(self) -> None:
        for member in self._members.values():
            await member.is_up.wait()

    async def _keep_alive(self, member: _Member) -> None:
        """Start the worker; when it dies, tell everyone and start it again."""
        worker_id = member.config.worker_id
        while not self._is_stopping:
            ended = await self._live(member)
            if self._is_stopping:
                return
            was_up = member.is_up.is_set()
            gone = self._bury(member)
            if not was_up and not member.has_served and not member.restarts.num_deaths:
                self._fail(ConfigError(f"worker {worker_id} did not start: {ended}"))
                return
            member.restarts.died(time.monotonic() - member.up_since if was_up else 0.0)
            is_used_up = member.restarts.is_used_up
            logger.log(logging.ERROR if is_used_up else logging.WARNING, "%s", self._obituary(member, was_up, ended))
            if all(other.restarts.is_used_up and not other.is_up.is_set() for other in self._members.values()):
                died = f"{worker_id} died {member.restarts.num_deaths} times, at last: {ended}"
                self._fail(WorkerError(f"no worker is left that could serve: {died}"))
                return
            self._cover()
            await asyncio.gather(asyncio.sleep(member.restarts.delay_s), asyncio.wait({gone}, timeout=_GONE_TIMEOUT_S))

    async def _live(self, member: _Member) -> str:
        """Start the worker and wait for its end; how it ended."""
        try:
            await self._bring_up(member)
            return await self._until_dead(member)
        except (RayError, ServingError, TimeoutError) as exc:
            return _first_line(exc)
        except Exception as exc:
            logger.exception("worker %s is given up", member.config.worker_id)
            return _first_line(exc)

    def _obituary(self, member: _Member, was_up: bool, reason: str) -> str:
        died = f"(pid {member.pid}) died" if was_up else "did not start"
        budget = member.restarts
        count = f"{budget.num_deaths} of {budget.max_restarts}"
        if budget.is_used_up:
            count = f"more often than max_restarts={budget.max_restarts} allows, so later each time"
        then = f"starting it again in {budget.delay_s:g} s ({count})"
        return f"worker {member.config.worker_id} {died}: {reason}; {then}"

    def _cover(self) -> None:
        """Let a prefill worker do both where no worker can decode and none will before long.

        It goes back once the pool that it left has no worker and another one can decode.
        """
        up = [member for member in self._members.values() if member.is_up.is_set()]
        down = [member for member in self._members.values() if not member.is_up.is_set()]
        decoders = [member for member in up if member.config.role is not Role.PREFILL]
        is_one_coming = any(m.config.role is not Role.PREFILL and not m.restarts.is_used_up for m in down)
        if up and not decoders and not is_one_coming:
            up[0].home_role = up[0].config.role
            flip = Flip(up[0].config.worker_id, Role.DECODE)
            self._spawn_flip(flip, "no decode worker is left: it serves alone until one is back")
        covering = next((member for member in decoders if member.home_role is not None), None)
        if covering is not None and covering.home_role is not None and len(decoders) > 1:
            home, covering.home_role = covering.home_role, None
            if len(decoders) == len(up):
                flip = Flip(covering.config.worker_id, home)
                self._spawn_flip(flip, f"a decode worker is back, and no {home} worker is there")

    async def _bring_up(self, member: _Member) -> None:
        options = {
            "num_cpus": self._config.num_cpus_per_worker,
            "num_gpus": self._config.num_gpus_per_worker,
            "max_concurrency": _ACTOR_THREADS,
            "max_restarts": 0,  # a restart is a new epoch with a new address: the supervisor does it
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(member.config.engine.num_threads or 1)}},
        }
        member.actor = ray.remote(WorkerActor).options(**options).remote(member.config)
        member.process = await self._placed(member)
        member.address = await self._loaded(member)
        member.pid = (await self._workers.add_worker(member.address)).pid
        member.up_since, member.has_served = time.monotonic(), True
        member.is_up.set()
        self._cover()
        self._on_progress(f"{member.config.role} worker {member.config.worker_id} is ready")

    async def _placed(self, member: _Member) -> ProcessIdentity:
        """Wait until Ray has given the worker a process; which one. Tells a person when that takes long.

        Without a living node it never will: the node of a private cluster, once dead, does not come back.
        """
        config, worker_id = self._config, member.config.worker_id
        wish = f"{config.num_cpus_per_worker:g} cores and {config.num_gpus_per_worker:g} GPUs for {worker_id}"
        identity = asyncio.ensure_future(_call(member.actor.identity, timeout_s=_START_TIMEOUT_S))
        try:
            is_told = False
            while not (await asyncio.wait({identity}, timeout=_PLACE_NOTICE_S))[0]:
                if not await asyncio.to_thread(_has_nodes):
                    raise WorkerError("no node of the Ray cluster is alive")
                if not is_told:
                    self._on_progress(f"waiting for {wish}; the cluster has {await asyncio.to_thread(_resources)}")
                is_told = True
            process: ProcessIdentity = await identity
        except TimeoutError:
            raise WorkerError(
                f"Ray found no {wish} in {_START_TIMEOUT_S:.0f} s; the cluster has "
                f"{await asyncio.to_thread(_resources)}. Lower num_cpus_per_worker or num_gpus_per_worker, or add nodes"
            ) from None
        finally:
            identity.cancel()
        return process

    async def _loaded(self, member: _Member) -> PeerAddress:
        """Wait until the worker has loaded its model, for long if need be, but only while its process answers."""
        start = asyncio.ensure_future(_call(member.actor.start, timeout_s=_START_TIMEOUT_S))
        try:
            while not (await asyncio.wait({start}, timeout=_LOOK_AT_START_S))[0]:
                answer = asyncio.ensure_future(_call(member.actor.identity, timeout_s=_START_TIMEOUT_S))
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

    async def _until_dead(self, member: _Member) -> str:
        try:
            return str(await member.actor.watch.remote())
        except RayError as exc:
            return _first_line(exc)

    def _bury(self, member: _Member) -> asyncio.Task[None]:
        """Give the worker up: its requests end now. What it may still write to is freed when its process is gone.

        The task ends when the process is known to be gone.
        """
        member.is_up.clear()
        self._kill(member)
        process, member.process = member.process, None
        address, member.address = member.address, None
        if address is not None:
            self._workers.mark_dead(address.worker_id, _LOST)
        name = f"the end of {member.config.worker_id}"
        gone = self._background.keep(name, partial(_prove_gone, process))
        if address is not None:
            self._background.keep(f"telling of {name}", partial(self._tell_of_death, address, gone))
        return gone

    async def _tell_of_death(self, address: PeerAddress, gone: asyncio.Task[None]) -> None:
        # Workers that start after this have had nothing to do with it.
        survivors = [(other, other.address) for other in self._members.values() if other.is_up.is_set()]
        await asyncio.gather(*(self._tell(*survivor, "peer_given_up", address) for survivor in survivors))
        await asyncio.shield(gone)
        await asyncio.gather(*(self._tell(*survivor, "peer_died", address) for survivor in survivors))

    async def _tell(self, survivor: _Member, epoch: PeerAddress | None, method: str, about: PeerAddress) -> None:
        """Tell one worker of another's death until it has heard it or is dead itself: it waits for this word."""
        while survivor.is_up.is_set() and survivor.address == epoch:
            try:
                await _call(getattr(survivor.actor, method), about)
                return
            except (RayError, ServingError, TimeoutError) as exc:
                name = survivor.config.worker_id
                logger.warning("%s could not be told of %s yet: %s", name, about.worker_id, _first_line(exc))
            await asyncio.sleep(_TELL_AGAIN_S)

    def _kill(self, member: _Member) -> None:
        if member.actor is None or self._is_ray_dead:
            return
        try:
            ray.kill(member.actor, no_restart=True)
        except (RayError, ValueError) as exc:  # Ray may know nothing of it any more
            logger.warning("Ray could not kill %s: %s", member.config.worker_id, _first_line(exc))

    async def _finished(self, member: _Member, request_ids: frozenset[str]) -> None:
        """Wait until the worker has nothing left of these requests."""
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        while (await self._status(member)).request_ids & request_ids:
            if time.monotonic() > deadline:
                raise WorkerError(f"{member.config.worker_id} did not finish its work in {_DRAIN_TIMEOUT_S} s")
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _status(self, member: _Member) -> WorkerStatus:
        status: WorkerStatus = await _call(member.actor.status)
        return status

    async def _autoscale(self) -> None:
        state = AutoscalerState()
        while True:
            await asyncio.sleep(self._config.autoscale_interval_s)
            observation = observe(self._registry, self._costs, self._flow.mean_output_tokens)
            decision, state = decide(observation, time.monotonic(), state)
            self._show(decision)
            if decision.flip is not None:
                logger.info("%s", decision.reason)
                self._spawn_flip(decision.flip, decision.reason)

    def _show(self, decision: Decision) -> None:
        self._flow.autoscaler_status = {
            "reason": decision.reason,
            "prefill_wait_s": decision.prefill_wait_s,
            "decode_wait_s": decision.decode_wait_s,
            "flips": self.flips,
        }

    async def _watch_quarantines(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_AT_QUARANTINES_S)
            for sender in self._senders_to_replace():
                await self._replace(sender)

    def _senders_to_replace(self) -> list[_Member]:
        """Members whose lost writes take too much of a peer's pool, where no transport can prove that they are over."""
        members = {m.address: m for m in self._members.values() if m.is_up.is_set() and m.address is not None}
        addresses = {(address.worker_id, address.epoch): member for address, member in members.items()}
        found = [
            addresses.get((quarantine.sender_id, quarantine.sender_epoch))
            for worker in self._registry
            for quarantine in worker.quarantines
            if quarantine.oldest_s >= _QUARANTINE_S
            and quarantine.num_blocks >= _MAX_QUARANTINED_SHARE * worker.card.num_blocks
        ]
        return list(dict.fromkeys(member for member in found if member is not None))

    async def _replace(self, member: _Member) -> None:
        """End a worker whose lost writes nobody can vouch for, once what it runs is done; a new one is started."""
        worker_id, address = member.config.worker_id, member.address
        logger.warning("%s is replaced: lost writes of it keep too many blocks of its peers in quarantine", worker_id)
        self._registry.set_state(worker_id, WorkerState.DRAINING, "its lost writes keep blocks in quarantine")
        try:
            await self._finished(member, (await self._status(member)).request_ids)
        except (RayError, ServingError, TimeoutError) as exc:
            logger.warning("%s is replaced before it has finished: %s", worker_id, _first_line(exc))
        if member.address == address:
            self._kill(member)

    def _on_change(self, change: WorkerChange) -> None:
        """A worker the router gave up (it is silent) may still have a process: end it, and a new one is started."""
        member = self._members.get(change.worker.worker_id)
        is_given_up = change.worker.state is WorkerState.DEAD and not self._is_stopping
        if is_given_up and member is not None and member.is_up.is_set():
            self._kill(member)

    def _crashed(self, exc: Exception) -> None:
        """A worker that nobody looks after any more is no state to serve in."""
        self._fail(WorkerError(f"the supervision of a worker failed, see the log: {_first_line(exc)}"))

    def _fail(self, error: ServingError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _spawn_flip(self, flip: Flip, reason: str) -> None:
        self._background.start(f"the flip of {flip.worker_id}", lambda: self.flip(flip, reason))


async def _prove_gone(process: ProcessIdentity | None) -> None:
    if process is not None:
        await until_gone(process)


def _has_nodes() -> bool:
    return any(node["Alive"] for node in ray.nodes())


def _resources() -> str:
    """What Ray has for new workers."""
    total, free = ray.cluster_resources(), ray.available_resources()
    return " and ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s free" for kind in ("CPU", "GPU"))


async def _call(method: Any, *args: Any, timeout_s: float = _CALL_TIMEOUT_S) -> Any:
    """Call an actor's method and wait for its answer, but not for ever."""
    return await asyncio.wait_for(method.remote(*args), timeout_s)


def _first_line(exc: BaseException) -> str:
    """The part of an error a person wants. Ray wraps what an actor raised in pages of traceback, and follows the news
    of a death with a list of what may have caused it."""
    cause = getattr(exc, "cause", None) or exc
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    line = (lines[-1] if lines else "") or type(exc).__name__
    return line.partition(". ")[0].rstrip(".") if isinstance(cause, RayActorError) else line
