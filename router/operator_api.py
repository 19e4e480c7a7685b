"""What operators are shown of the deciding process and may tell it: the same of our own workers and of other engines.

Every `Backend` and every `Dispatcher` is an `OperatorApi`. The supervisor manages the workers; `UnmanagedWorkers`
stand in its place where others run them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tandem.protocol.errors import AddRefused, DrainRefused, RoleRefused
from tandem.protocol.messages import Role


class ManagedWorkers(Protocol):
    """The worker processes, as operators may change them."""

    async def set_role(self, worker: str, role: Role) -> dict[str, Any]:
        """Let a worker serve in another role from now on. Returns the flip as JSON.

        Raises `WorkerNotFound`, `RoleRefused`, or a `WorkerError` if the worker does not answer.
        """

    async def drain(self, worker: str, grace_s: float, *, restart: bool) -> dict[str, Any]:
        """Begin to let a worker leave: its work ends or moves within `grace_s`, then its process ends.

        With `restart` it is started again. Returns what has begun, as JSON. Raises `WorkerNotFound` or `DrainRefused`.
        """

    async def add_worker(self, role: Role) -> dict[str, Any]:
        """Begin to start one more worker. Returns what has begun, as JSON. Raises `AddRefused`."""

    async def check_integrity(self) -> dict[str, str]:
        """By worker, what is wrong with it or what it holds although it should be idle; "" = nothing."""


class WorkerManager(ManagedWorkers, Protocol):
    """Whatever runs the worker processes."""

    @property
    def autoscaler_status(self) -> dict[str, object]:
        """The autoscaler's latest decision, as JSON."""


class OperatorApi(Protocol):
    """What is shown of the deciding process, and what it may be told."""

    @property
    def manager(self) -> ManagedWorkers:
        """The workers. If others run them, every change is refused."""

    async def decisions(self) -> list[dict[str, Any]]:
        """The latest decisions, newest first, as JSON."""

    async def pools(self) -> dict[str, Any]:
        """Body of `/v1/pools`: the state of all workers or engines."""

    async def overview(self) -> dict[str, Any]:
        """What the dashboard shows of the deciding process (`router/overview.py`), as JSON."""

    async def migrate(self, worker: str, to: str, request_id: str) -> dict[str, Any]:
        """Move the answers that a worker decodes to another one: `to`, if given. `request_id` limits it to one request.

        Returns the ids of the requests that are `moving` and of those `staying`. Raises `WorkerNotFound`, or
        `NotServed` if the answers are those of other engines.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmanagedWorkers:
    """The `WorkerManager` of workers that others run: it refuses every change. `{worker}` in a text is the name."""

    role_refusal: str
    drain_refusal: str
    add_refusal: str

    @property
    def autoscaler_status(self) -> dict[str, object]:
        """There is none."""
        return {}

    async def set_role(self, worker: str, role: Role) -> dict[str, Any]:
        """Raises `RoleRefused`."""
        raise RoleRefused(self.role_refusal.format(worker=worker[:100]))

    async def drain(self, worker: str, grace_s: float, *, restart: bool) -> dict[str, Any]:
        """Raises `DrainRefused`."""
        raise DrainRefused(self.drain_refusal.format(worker=worker[:100]), code="not_managed")

    async def add_worker(self, role: Role) -> dict[str, Any]:
        """Raises `AddRefused`."""
        raise AddRefused(self.add_refusal)

    async def check_integrity(self) -> dict[str, str]:
        """Nothing is known of them."""
        return {}
