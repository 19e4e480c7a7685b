"""What operators ask the hub to do with its workers: our own ones, or engines that it manages."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from tandem.frontend.processes.hub_client import HubClient
from tandem.protocol.messages import Role

__all__ = ["AddWorker", "DrainWorker", "Migrate", "RemoteWorkers", "SetRole", "WorkerQuestion", "answer_of_workers"]


class _WorkerQuestion(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class SetRole(_WorkerQuestion, frozen=True):
    """`WorkerManager.set_role`."""

    worker: str
    role: Role


class DrainWorker(_WorkerQuestion, frozen=True):
    """`WorkerManager.drain`."""

    worker: str
    grace_s: float
    restart: bool


class AddWorker(_WorkerQuestion, frozen=True):
    """`WorkerManager.add_worker`."""

    role: Role


class Migrate(_WorkerQuestion, frozen=True):
    """`Backend.migrate`, `Dispatcher.migrate`."""

    worker: str
    to: str
    request_id: str


WorkerQuestion = SetRole | DrainWorker | AddWorker | Migrate


class OperatedWorkers(Protocol):
    """What a `Backend` and a `Dispatcher` let operators do."""

    async def set_role(self, worker: str, role: Role) -> dict[str, Any]:
        """As `WorkerManager.set_role`."""

    async def drain(self, worker: str, grace_s: float, *, restart: bool) -> dict[str, Any]:
        """As `WorkerManager.drain`."""

    async def add_worker(self, role: Role) -> dict[str, Any]:
        """As `WorkerManager.add_worker`."""

    async def migrate(self, worker: str, to: str, request_id: str) -> dict[str, Any]:
        """As `Backend.migrate`."""


async def answer_of_workers(workers: OperatedWorkers, question: WorkerQuestion) -> dict[str, Any]:
    """Do in the hub what an edge process asks for. Raises a `ServingError`."""
    match question:
        case SetRole(worker, role):
            return await workers.set_role(worker, role)
        case DrainWorker(worker, grace_s, restart):
            return await workers.drain(worker, grace_s, restart=restart)
        case AddWorker(role):
            return await workers.add_worker(role)
        case Migrate(worker, to, request_id):
            return await workers.migrate(worker, to, request_id)


class RemoteWorkers:
    """The hub's `OperatedWorkers`, asked from an edge process."""

    def __init__(self, hub: HubClient) -> None:
        self._hub = hub

    async def set_role(self, worker: str, role: Role) -> dict[str, Any]:
        """As `WorkerManager.set_role`."""
        return await self._hub.ask(SetRole(worker, role), dict[str, Any])

    async def drain(self, worker: str, grace_s: float, *, restart: bool) -> dict[str, Any]:
        """As `WorkerManager.drain`."""
        return await self._hub.ask(DrainWorker(worker, grace_s, restart), dict[str, Any])

    async def add_worker(self, role: Role) -> dict[str, Any]:
        """As `WorkerManager.add_worker`."""
        return await self._hub.ask(AddWorker(role), dict[str, Any])

    async def migrate(self, worker: str, to: str, request_id: str) -> dict[str, Any]:
        """As `Backend.migrate`."""
        return await self._hub.ask(Migrate(worker, to, request_id), dict[str, Any])
