"""A worker with Tandem's own engine: its settings, and what the router knows of it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError
from typing_extensions import override

from tandem.cluster.actor import WorkerActor
from tandem.cluster.member import Member, Requests, call, first_line, kind_of
from tandem.cluster.owned_actor import WorkerClaim
from tandem.cluster.ownership import LeaseTerms
from tandem.cluster.restarts import RestartBudget
from tandem.cluster.worker_layout import preload_of
from tandem.protocol.config import WorkerConfig
from tandem.protocol.errors import ServingError
from tandem.protocol.messages import PeerAddress, Role, WorkerState
from tandem.router.workers.client import WorkerClient
from tandem.scheduling.workers.registry import Registry
from tandem.worker.status import WorkerStatus

logger = logging.getLogger(__name__)

_TELL_AGAIN_S = 1.0  # before a worker that did not answer is told again


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

    def _copy(self, worker_id: str, role: Role) -> WorkerMember:
        config = replace(self._config, worker_id=worker_id, role=role, cpu_cores=())
        return WorkerMember(config, self.restarts.renewed(), self._workers, self._registry)

    @override
    def is_like(self, claim: WorkerClaim) -> bool:
        return bool(self._comparable(self._config) == self._comparable(claim.config))

    @staticmethod
    def _comparable(config: WorkerConfig) -> WorkerConfig:
        return replace(config, worker_id="", role=kind_of(config.role), router_key="", cpu_cores=())

    def _create_actor(self, options: dict[str, Any], terms: LeaseTerms | None) -> Any:
        # Torch's threads would go on spinning after each of its operations, on cores that our own threads need.
        passive = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
        variables = {"OMP_NUM_THREADS": str(self._config.engine.num_threads or 1), **passive}
        if self._config.socket_folder and not options["num_gpus"] and "LD_PRELOAD" not in os.environ:
            variables |= preload_of(sys.executable)  # on this machine, whose files are known
        options |= {"runtime_env": {"env_vars": variables}}
        return ray.remote(WorkerActor).options(**options).remote(replace(self._config, role=self.role), terms)

    async def _join(self, started: PeerAddress) -> None:
        self.address = started
        self.pid = (await self._workers.add_worker(started)).pid

    @override
    async def leave(self, reason: str) -> None:
        if self._registry.get(self.worker_id) is not None:
            self._workers.mark_dead(self.worker_id, reason)

    @property
    @override
    def is_ready(self) -> bool:
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

    async def switch_role(self, role: Role, reason: str) -> Requests:
        """As `Member.switch_role`. One that is to decode gets work meanwhile: it may be the only one that is left."""
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

    @override
    async def check_integrity(self) -> str:
        return str(await call(self.actor.check_integrity, True))

    async def tell(self, address: PeerAddress | None, method: str, peer: PeerAddress) -> None:
        """As `Member.tell`: the end of a peer's process frees the blocks that it may have written to."""
        while self.is_up and self.address == address:
            try:
                await call(getattr(self.actor, method), peer)
                return
            except (RayError, ServingError, TimeoutError) as exc:
                logger.warning("%s could not be told about %s yet: %s", self.worker_id, peer.worker_id, first_line(exc))
            await asyncio.sleep(_TELL_AGAIN_S)
