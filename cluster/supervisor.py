"""Keeps the workers of a cluster alive: starts their actors, notices deaths, replaces them, flips their roles.

The registry of the router stays the one place that says what a worker's state is; the supervisor reports to it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from cluster.actor import WorkerActor
from cluster.autoscaler import AutoscalerState, Decision, Flip, decide, observe
from cluster.status import WorkerStatus
from protocol.config import ClusterConfig, WorkerConfig
from protocol.errors import ConfigError, ServingError, WorkerError
from protocol.messages import PeerAddress, WorkerState
from router.cost_model import CostModel
from router.flow import RequestFlow
from router.registry import Registry, WorkerChange
from router.worker_client import WorkerClient

__all__ = ["Supervisor"]

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 600.0  # loading a large model from a cold disk
_CALL_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 15.0
_DRAIN_TIMEOUT_S = 120.0
_DRAIN_POLL_S = 0.1
_RESTART_DELAY_S = 1.0
_STABLE_AFTER_S = 300.0  # a worker that ran this long starts with no restarts counted
_NUM_REMEMBERED_FLIPS = 20
_LOST = "it died; the answer is lost, send the request again"  # told to the clients of a dead worker
_ACTOR_THREADS = 8


@dataclass(eq=False, slots=True)
class _Member:
    config: WorkerConfig
    actor: Any = None
    address: PeerAddress | None = None
    pid: int = 0
    num_restarts: int = 0  # since it last ran for a while
    up_since: float = math.inf
    task: asyncio.Task[None] | None = None
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
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._flips: deque[dict[str, object]] = deque(maxlen=_NUM_REMEMBERED_FLIPS)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        flow.integrity_check = partial(self.check_integrity, idle=True)
        registry.listen(self._on_change)

    async def start(self, configs: list[WorkerConfig]) -> None:
        """Start all workers at once and return when each is connected. Raises ConfigError if one cannot be built."""
        for config in configs:
            member = _Member(config)
            self._members[config.worker_id] = member
            member.task = asyncio.create_task(self._keep_alive(member))
        ups = asyncio.create_task(self._all_up())
        await asyncio.wait([ups, self._failure], return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            ups.cancel()
            self._failure.result()
        if self._config.autoscale:
            self._spawn(self._autoscale())

    async def close(self) -> None:
        """Stop every worker this supervisor started; those that do not stop in time are killed."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        actors = [member.actor for member in self._members.values() if member.actor is not None]
        up = [member.actor for member in self._members.values() if member.is_up.is_set()]
        stops = [asyncio.ensure_future(_call(actor.stop)) for actor in up]  # one that still loads is only killed
        if stops:
            await asyncio.wait(stops, timeout=_STOP_TIMEOUT_S)
        for stop in stops:
            stop.cancel()
        tasks = [member.task for member in self._members.values() if member.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*stops, *tasks, *self._tasks, return_exceptions=True)
        for actor in actors:
            ray.kill(actor, no_restart=True)

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
        started, old_role = time.monotonic(), worker.role
        record: dict[str, object] = {"worker": flip.worker_id, "from": old_role, "to": flip.to_role, "reason": reason}
        self._flips.append(record)
        self._registry.set_state(flip.worker_id, WorkerState.DRAINING, reason)
        try:
            await _call(member.actor.set_role, flip.to_role)
            self._registry.set_role(flip.worker_id, flip.to_role)
            member.config = replace(member.config, role=flip.to_role)
            left = (await self._status(member)).request_ids
            self._registry.set_state(flip.worker_id, WorkerState.READY, "it plays its new role")
            record["serving_after_s"] = round(time.monotonic() - started, 4)
            await self._finished(member, left)
            record["drained_after_s"] = round(time.monotonic() - started, 4)
        except (RayError, ServingError, TimeoutError, KeyError) as exc:
            logger.warning("%s did not flip to %s: %s", flip.worker_id, flip.to_role, exc)
            record["failed"] = str(exc) or type(exc).__name__
        finally:
            self._registry.set_state(flip.worker_id, WorkerState.READY, "the flip is over")

    async def _all_up(self) -> None:
        for member in self._members.values():
            await member.is_up.wait()

    async def _keep_alive(self, member: _Member) -> None:
        """Start the worker; when it dies, tell everyone and start it again."""
        worker_id = member.config.worker_id
        while not self._is_stopping:
            try:
                await self._bring_up(member)
                ended = await self._until_dead(member)
            except (RayError, ServingError, TimeoutError) as exc:
                ended = _first_line(exc)
            if self._is_stopping:
                return
            was_up = member.is_up.is_set()
            if time.monotonic() - member.up_since > _STABLE_AFTER_S:
                member.num_restarts = 0
            await self._bury(member)
            if not was_up and not member.num_restarts:
                self._fail(ConfigError(f"worker {worker_id} did not start: {ended}"))
                return
            member.num_restarts += 1
            is_given_up = member.num_restarts > self._config.max_restarts
            logger.log(logging.ERROR if is_given_up else logging.WARNING, "%s", self._obituary(member, was_up, ended))
            if is_given_up:
                return
            await asyncio.sleep(_RESTART_DELAY_S)

    def _obituary(self, member: _Member, was_up: bool, reason: str) -> str:
        died = f"(pid {member.pid}) died" if was_up else "did not start"
        limit = self._config.max_restarts
        count = f"({member.num_restarts} of {limit})"
        then = f"starting it again {count}" if member.num_restarts <= limit else f"giving it up after {limit} restarts"
        return f"worker {member.config.worker_id} {died}: {reason}; {then}"

    async def _bring_up(self, member: _Member) -> None:
        options = {
            "num_cpus": self._config.num_cpus_per_worker,
            "num_gpus": self._config.num_gpus_per_worker,
            "max_concurrency": _ACTOR_THREADS,
            "max_restarts": 0,  # a restart is a new epoch with a new address: the supervisor does it
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(member.config.engine.num_threads or 1)}},
        }
        member.actor = ray.remote(WorkerActor).options(**options).remote(member.config)
        member.address = await _call(member.actor.start, timeout_s=_START_TIMEOUT_S)
        member.pid = (await self._workers.add_worker(member.address)).pid
        member.up_since = time.monotonic()
        member.is_up.set()
        self._on_progress(f"{member.config.role} worker {member.config.worker_id} is ready")

    async def _until_dead(self, member: _Member) -> str:
        try:
            return str(await member.actor.watch.remote())
        except RayError as exc:
            return _first_line(exc)

    async def _bury(self, member: _Member) -> None:
        member.is_up.clear()
        if member.actor is not None:
            ray.kill(member.actor, no_restart=True)
        address, member.address = member.address, None
        if address is None:
            return
        self._workers.mark_dead(address.worker_id, _LOST)
        survivors = [other for other in self._members.values() if other.is_up.is_set()]
        tellings = (_call(other.actor.peer_died, address) for other in survivors)
        for result in await asyncio.gather(*tellings, return_exceptions=True):
            if isinstance(result, BaseException):
                logger.warning("a survivor could not be told of %s: %s", address.worker_id, result)

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
                self._spawn(self.flip(decision.flip, decision.reason))

    def _show(self, decision: Decision) -> None:
        self._flow.autoscaler_status = {
            "reason": decision.reason,
            "prefill_wait_s": decision.prefill_wait_s,
            "decode_wait_s": decision.decode_wait_s,
            "flips": list(self._flips),
        }

    def _on_change(self, change: WorkerChange) -> None:
        """A worker the router gave up (it is silent) may still have a process: end it, and a new one is started."""
        member = self._members.get(change.worker.worker_id)
        is_given_up = change.worker.state is WorkerState.DEAD and not self._is_stopping
        if is_given_up and member is not None and member.is_up.is_set():
            ray.kill(member.actor, no_restart=True)

    def _fail(self, error: ServingError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


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
