"""What a decision depends on: workers, their work and capacity, and what clients ask for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.protocol.messages import Role, WorkerState
from tandem.scheduling.autoscaling.prediction import Backlog, Capacity
from tandem.scheduling.cost_model import CostModel, StepCosts
from tandem.scheduling.workers.demand import Demand
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import RegisteredWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What the autoscaler knows about one worker."""

    worker_id: str
    role: Role
    is_ready: bool = True
    num_running: int = 0  # requests that a flip would leave unfinished in the old role
    num_queued_tokens: int = 0
    num_kv_tokens: int = 0  # tokens of the sequences on this worker

    @property
    def server(self) -> str:
        """The process that moves as one: it may have several data-parallel ranks, each of which is a worker here."""
        return server_of(self.worker_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What the router does not know: processes that do not serve yet, and how the move in flight fares."""

    coming: frozenset[str] = frozenset()  # servers that are being started, including restarts after a death
    num_unplaced: int = 0  # how many of these were added and have found no room
    setback: str = ""  # why the move in flight cannot be completed; "" = it can
    spared: frozenset[str] = frozenset()  # servers that leave last: their machines would stay reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Workers, their work, and what clients have asked for since the start."""

    workers: tuple[WorkerView, ...]
    demand: Demand
    capacity: Capacity
    backlog: Backlog
    expected_output_tokens: float
    fleet: Fleet = field(default_factory=Fleet)

    @property
    def servers(self) -> frozenset[str]:
        """All processes that run or are being started."""
        return self.fleet.coming.union(view.server for view in self.workers)


def server_of(worker_id: str) -> str:
    """The name of a worker's process. NAME.dp1 is a data-parallel rank of NAME."""
    name, _, rank = worker_id.rpartition(".dp")
    return name if name and rank.isdecimal() else worker_id


def observe(
    registry: Registry, costs: CostModel, expected_output_tokens: float, fleet: Fleet | None = None
) -> Observation:
    """What `decide` needs, from the router's registry and cost model, and from those who start workers."""
    workers = list(registry)
    ready = [worker for worker in workers if worker.state == WorkerState.READY]
    decoders = [worker for worker in ready if worker.role != Role.PREFILL]
    views = tuple(
        WorkerView(
            worker_id=worker.worker_id,
            role=worker.role,
            is_ready=worker.state == WorkerState.READY,
            num_running=worker.num_booked_seqs,
            num_queued_tokens=worker.uncomputed_tokens,
            num_kv_tokens=worker.booked_kv_tokens - worker.awaited_kv_tokens,
        )
        for worker in workers
    )
    num_seqs, kv_tokens = _decoding(decoders)
    return Observation(
        workers=views,
        demand=registry.demand.total,
        capacity=_capacity(ready, costs),
        backlog=Backlog(
            prompt_tokens=sum(worker.uncomputed_tokens for worker in workers) + registry.demand.num_waiting_tokens,
            num_seqs=num_seqs,
            kv_tokens_per_seq=kv_tokens / num_seqs if num_seqs else 0.0,
        ),
        expected_output_tokens=expected_output_tokens,
        fleet=fleet or Fleet(),
    )


def pool_of(observation: Observation, role: Role) -> list[WorkerView]:
    """The ready workers of this role."""
    return [view for view in observation.workers if view.role == role and view.is_ready]


class Server(NamedTuple):
    """A process, with all its ranks."""

    name: str
    num_ranks: int
    num_running: int = 0
    num_queued_tokens: int = 0
    num_kv_tokens: int = 0


def cheapest_servers(observation: Observation, role: Role) -> list[Server]:
    """The servers of a pool, those with least to lose first."""
    servers = [
        Server(
            name,
            len(ranks),
            sum(view.num_running for view in ranks),
            sum(view.num_queued_tokens for view in ranks),
            sum(view.num_kv_tokens for view in ranks),
        )
        for name, ranks in by_server(pool_of(observation, role)).items()
    ]
    spared = observation.fleet.spared
    return sorted(servers, key=lambda one: (one.name in spared, one.num_running, one.num_queued_tokens, one.name))


def by_server(views: Sequence[WorkerView]) -> dict[str, list[WorkerView]]:
    """The ranks of each process."""
    servers: dict[str, list[WorkerView]] = {}
    for view in views:
        servers.setdefault(view.server, []).append(view)
    return servers


def _decoding(decoders: Collection[RegisteredWorker]) -> tuple[int, int]:
    """Sequences that the decode pool has to serve now, running or without room, and their tokens."""
    num_awaited = sum(worker.num_awaited_seqs for worker in decoders)
    awaited_tokens = sum(worker.awaited_kv_tokens for worker in decoders)
    num_for_room = sum(worker.load.num_waiting_for_room for worker in decoders)
    num_held = min(num_for_room, num_awaited)  # their prompts are computed, so they wait for the decode pool
    num_seqs = sum(worker.num_booked_seqs for worker in decoders) - num_awaited + num_held
    tokens = sum(worker.booked_kv_tokens for worker in decoders) - awaited_tokens
    return num_seqs, tokens + awaited_tokens * num_held // max(num_awaited, 1)


def _capacity(workers: Collection[RegisteredWorker], costs: CostModel) -> Capacity:
    """The capacity of the mean worker."""
    if not workers:
        return Capacity(StepCosts(0.0, 0.0, 0.0, 0.0, 0.0), 1, 1, 0)
    num = len(workers)
    rows = [costs.steps(worker.card.kind).costs for worker in workers]
    return Capacity(
        costs=StepCosts(*(sum(column) / num for column in zip(*rows, strict=True))),
        step_tokens=max(sum(worker.card.max_num_batched_tokens for worker in workers) // num, 1),
        kv_tokens=max(sum(worker.card.num_blocks * worker.card.block_size for worker in workers) // num, 1),
        num_seats=sum(worker.card.max_num_seqs for worker in workers) // num,
    )
