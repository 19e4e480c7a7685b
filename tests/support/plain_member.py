"""A worker of a cluster without a model, a router's link and a process, unless a test gives it one."""

from __future__ import annotations

from typing import Any

from tandem.cluster.member import Member, Requests
from tandem.cluster.owned_actor import WorkerClaim
from tandem.cluster.ownership import LeaseTerms
from tandem.cluster.restarts import RestartBudget
from tandem.protocol.messages import PeerAddress, Role
from tandem.scheduling.workers.registry import Registry
from tests.support.builders import add_ready, make_card


class PlainMember(Member):
    """It is READY in the registry once it has joined, if there is one."""

    def __init__(self, worker_id: str, role: Role, registry: Registry | None = None) -> None:
        super().__init__(worker_id, role, RestartBudget(0))
        self._registry = registry

    def _copy(self, worker_id: str, role: Role) -> PlainMember:
        return type(self)(worker_id, role, self._registry)

    def is_like(self, claim: WorkerClaim) -> bool:
        return False

    def _create_actor(self, options: dict[str, Any], terms: LeaseTerms | None) -> Any:
        raise NotImplementedError

    async def _join(self, started: Any) -> None:
        if self._registry is not None:
            add_ready(self._registry, make_card(self.worker_id, self.role))

    async def leave(self, reason: str) -> None:
        pass

    @property
    def is_ready(self) -> bool:
        return True

    def withdraw(self, reason: str, *, is_fallback: bool = False) -> None:
        pass

    async def switch_role(self, role: Role, reason: str) -> Requests:
        self.role = role
        return frozenset()

    async def running(self) -> Requests:
        return frozenset()

    async def check_integrity(self) -> str:
        return ""

    async def tell(self, address: PeerAddress | None, method: str, peer: PeerAddress) -> None:
        pass
