"""One engine server of a cluster, through all its lives."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import ray
from typing_extensions import override

from tandem.cluster.engines.actor import EngineActor, EngineEnd, EngineStarted
from tandem.cluster.engines.dialect import dialect_of
from tandem.cluster.engines.role_switch import RoleIsLost, switch_role
from tandem.cluster.engines.server import EngineServer
from tandem.cluster.member import Member, Requests, kind_of
from tandem.cluster.owned_actor import WorkerClaim
from tandem.cluster.ownership import LeaseTerms
from tandem.cluster.restarts import RestartBudget
from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import PeerAddress, Role, WorkerState
from tandem.router.engines.config import EngineSpec, ranks_of
from tandem.router.engines.engine import RemoteEngine
from tandem.router.engines.engine_fleet import EngineFleet

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 60.0  # for the router's first probes of a server that has generated a token
_JOIN_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the router is told about a server besides its address."""

    hardware: str
    kv_bytes_per_token: int  # gives the size of a handoff; 0 = only its latency is learned


class EngineMember(Member):
    """A server of vLLM or SGLang.

    It has no `address`: its peers need not be told of its end, and the router's verdict does not end it. The router's
    probes find it again, and its actor notices if it has stalled.
    """

    def __init__(
        self,
        server: EngineServer,
        role: Role,
        restarts: RestartBudget,
        fleet: EngineFleet,
        facts: EngineFacts,
    ) -> None:
        super().__init__(server.worker_id, role, restarts)
        self.load_timeout_s = server.start_timeout_s + _JOIN_TIMEOUT_S  # beyond it the actor itself hangs
        self._server = server
        self._is_half = server.kind == "sglang" and role is not Role.COLOCATED
        self.can_cover = not self._is_half
        self.fixed_role = dialect_of(server.kind).fixed_role(server) if self._is_half else ""
        self._fleet = fleet
        self._facts = facts

    def _copy(self, worker_id: str, role: Role) -> EngineMember:
        server = replace(self._server, worker_id=worker_id, cpu_cores=())
        return EngineMember(server, role, self.restarts.renewed(), self._fleet, self._facts)

    def is_like(self, claim: WorkerClaim) -> bool:
        """As `Member.is_like`. The present role of half of an SGLang pair is not known."""
        return not self._is_half and self._comparable(self._server) == self._comparable(claim.config)

    @staticmethod
    def _comparable(server: EngineServer) -> EngineServer:
        return replace(server, worker_id="", role=kind_of(server.role), cpu_cores=(), api_key="")

    def _taken_over(self, claim: WorkerClaim) -> Any:
        """As `Member._taken_over`: the server keeps the key that it was started with."""
        self._server = replace(self._server, api_key=claim.config.api_key)
        return super()._taken_over(claim)

    def _create_actor(self, options: dict[str, Any], terms: LeaseTerms | None) -> Any:
        return ray.remote(EngineActor).options(**options).remote(replace(self._server, role=self.role), terms)

    async def _join(self, started: EngineStarted | EngineEnd) -> None:
        if isinstance(started, EngineEnd):
            raise WorkerError(self._reason_of(started))
        self.pid = started.pid
        engines = self._fleet.add_all(ranks_of(self._spec(started)), is_complete=False)
        deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
        while late := [engine for engine in engines if engine.state is not WorkerState.READY]:
            if time.monotonic() > deadline_s:
                raise WorkerError(f"the router cannot use the server at {started.url}: {late[0].reason}")
            await asyncio.sleep(_JOIN_POLL_S)

    @override
    async def leave(self, reason: str) -> None:
        for engine in self._engines():
            await self._fleet.lose(engine.name, reason)

    @property
    @override
    def is_ready(self) -> bool:
        engines = self._engines()
        return bool(engines) and all(engine.state is WorkerState.READY for engine in engines)

    def withdraw(self, reason: str, *, is_fallback: bool = False) -> None:
        """As `Member.withdraw`. Answers of other engines do not move."""
        for engine in self._engines():
            is_there = engine.state is WorkerState.READY
            engine.set_state(WorkerState.DRAINING, reason, is_fallback=is_fallback and is_there)

    async def switch_role(self, role: Role, reason: str) -> Requests:
        """As `Member.switch_role`. A server of vLLM can do both, so it serves in its new role at once.

        Half of an SGLang pair is drained first, because it switches only while it is idle.
        """
        if self._is_half:
            await self._switch(role, reason)
        for engine in self._engines():
            self._fleet.set_role(engine.name, role)
        self.role = role
        return await self.running()

    async def _switch(self, role: Role, reason: str) -> None:
        """Give the server its other role. On `WorkerError` it goes on serving in the old one, or is started again."""
        if self.fixed_role:
            raise WorkerError(self.fixed_role)
        engines = self._engines()
        for engine in engines:
            engine.set_state(WorkerState.DRAINING, reason)
        with ExitStack() as at_end:
            at_end.callback(self._serve_on, engines)
            await self.finish(await self.running())
            decoding = (one.spec for one in self._fleet.engines if one.spec.role is Role.DECODE and one not in engines)
            try:
                await switch_role(engines[0].spec, role, next(decoding, None))
            except RoleIsLost:
                at_end.pop_all()
                self.kill()  # the supervisor starts it again, in its old role
                raise

    def _serve_on(self, engines: list[RemoteEngine]) -> None:
        for engine in engines:
            if engine.state is WorkerState.DRAINING:
                engine.set_state(WorkerState.READY, "")

    @override
    async def running(self) -> Requests:
        return frozenset(request for engine in self._engines() for request in engine.running)

    @override
    async def check_integrity(self) -> str:
        num_running = len(await self.running())
        return f"{num_running} requests run on it" if num_running else ""

    async def tell(self, address: PeerAddress | None, method: str, peer: PeerAddress) -> None:
        """As `Member.tell`. Servers find out by themselves that another one is gone."""

    def _engines(self) -> list[RemoteEngine]:
        """Its data-parallel ranks, each of which is an engine of the fleet."""
        return [engine for engine in self._fleet.engines if engine.spec.server == self.worker_id]

    def _spec(self, started: EngineStarted) -> EngineSpec:
        server = self._server
        return EngineSpec(
            name=self.worker_id,
            url=started.url,
            model=server.served_model_name,
            kind="vllm" if server.kind == "vllm" else "sglang",
            role=self.role,
            hardware=self._facts.hardware,
            kv_bytes_per_token=self._facts.kv_bytes_per_token,
            host_cache_gb=server.host_cache_bytes / 1e9,
            kv_events=started.events,
            kv_replay=started.replay,
            headers={"authorization": f"Bearer {server.api_key}"} if server.api_key else {},
            data_parallel_size=server.parallelism.num_caches,
            bootstrap_port=started.side_channel_port if server.kind == "sglang" and self._is_half else 0,
        )

    def _reason_of(self, end: EngineEnd) -> str:
        """As `Member._reason_of`, in one line; the log gets the lines that the server wrote last."""
        if end.tail and not end.reason.endswith("stopped"):
            logger.error("the last lines of %s:\n  %s", self.worker_id, "\n  ".join(end.tail))
        return end.reason
