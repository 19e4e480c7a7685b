"""One trace through one policy on one cluster: arrivals, decisions, bookings, handoffs, and what the router learns.

Does at virtual times what router/workers/flow.py does around placement; the workers are simulator.worker.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.loadtest.traces import TRACE_BLOCK_SIZE, TraceRequest
from tandem.protocol.messages import HOST_TIER, Role, TierLoad, WorkerState
from tandem.scheduling.admission.answer_lengths import AnswerLengths
from tandem.scheduling.cost_model import prefill_attention
from tandem.scheduling.workers.bookings import Booking
from tandem.scheduling.workers.load import RequestLoad
from tandem.simulator.clock import Clock
from tandem.simulator.cluster import Cluster
from tandem.simulator.fleet import SimulatedFleet
from tandem.simulator.policies import POLICIES, RoutingChoice, RoutingRequest
from tandem.simulator.prefix_cache import PrefixCache
from tandem.simulator.scaling import ScalingPlan, Scene
from tandem.simulator.steps import Run
from tandem.simulator.worker import Job, SimulatedWorker

_MAX_OUTPUT_TOKENS = 1 << 20  # traces do not say what a client would have allowed


class Gaps(NamedTuple):
    """Inter-token gaps of one run of steps; they change evenly from the first to the last step."""

    end_s: float
    first_s: float
    last_s: float
    num_gaps: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a simulation. Times are virtual seconds from the first arrival on."""

    policy: str
    cluster: Cluster
    seed: int
    jobs: Sequence[Job]  # all served to their end, in order of arrival
    num_refused: int  # prompts that no worker's pool could hold
    gaps: Sequence[Gaps]
    busy_s: dict[str, float]  # by worker
    prefilled_tokens: dict[str, int]  # by worker
    num_events: int
    wall_s: float  # real time of the simulation
    place_s: float  # real time in the policy
    step_error: float  # relative error of the router's step model at the end
    worker_s: float = 0.0  # worker-seconds until the last arrival, including starting and leaving workers
    num_moves: int = 0


def simulate(
    requests: Sequence[TraceRequest],
    cluster: Cluster,
    policy: str,
    seed: int = 0,
    on_arrival: Callable[[], object] = lambda: None,
    scaling: ScalingPlan | None = None,
) -> Outcome:
    """Serve the requests with one of `POLICIES`. They must be in order of arrival, from second 0 on.

    `on_arrival` is called for each that is served. With `scaling`, workers flip, come and go meanwhile.
    """
    return _Simulation(requests, cluster, policy, seed, on_arrival, scaling).run()


@dataclass(eq=False, slots=True)
class _Open:
    """A request that has been dispatched and not finished."""

    choice: RoutingChoice
    booking: Booking
    room_s: float | None = None  # when the decode worker had room for the KV


class _Simulation:
    """The simulation. It is also the listener of all workers."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        cluster: Cluster,
        policy: str,
        seed: int,
        on_arrival: Callable[[], object],
        scaling: ScalingPlan | None,
    ) -> None:
        self._scaling = scaling
        self._num_added = self._num_moves = 0
        self._worker_s = 0.0
        self._changed_s = 0.0  # when the number of workers changed last
        self._on_arrival = on_arrival
        self._cluster = cluster
        self._machine = cluster.machine
        self._clock = Clock()
        self._fleet = SimulatedFleet()
        self._workers: dict[str, SimulatedWorker] = {}
        for card in cluster.cards():
            self._fleet.join(card)
            worker = SimulatedWorker(card, self._machine, self._clock, self)
            self._workers[worker.worker_id] = worker
        self._hosts = {
            worker_id: PrefixCache(cluster.host_cache_tokens // TRACE_BLOCK_SIZE) for worker_id in self._workers
        }
        if cluster.host_cache_tokens:
            block_s = self._machine.block_bytes / self._machine.host_bytes_per_s
            for worker_id in self._workers:
                self._fleet.add_tier(worker_id, TierLoad(name=HOST_TIER, block_s=block_s))
        self._policy_name = policy
        self._seed = seed
        self._policy = POLICIES[policy](self._fleet, random.Random(seed))
        self._open: dict[Job, _Open] = {}
        self._jobs_done: list[Job] = []  # since the scaler decided last
        self._computing: set[SimulatedWorker] = set()  # workers that may have progress to report
        self._lengths = AnswerLengths()
        self._gaps: list[Gaps] = []
        self._place_s = 0.0
        capacity = self._machine.pool_tokens // TRACE_BLOCK_SIZE * TRACE_BLOCK_SIZE
        fitting = [r for r in requests if r.num_prompt_tokens + r.num_output_tokens <= capacity]
        self._num_refused = len(requests) - len(fitting)
        digests: dict[int, bytes] = {}
        self._jobs = [_job(number, request, digests) for number, request in enumerate(fitting)]
        self._end_s = self._jobs[-1].arrival_s if self._jobs else 0.0

    def run(self) -> Outcome:
        started = time.perf_counter()
        for job in self._jobs:
            self._clock.at(job.arrival_s, self._arrive, job)
        if self._scaling is not None:
            self._clock.at(self._scaling.interval_s, self._scale)
        self._clock.run()
        self._count_worker_s()
        assert not self._open, f"{len(self._open)} requests never finished"
        for worker in self._workers.values():
            worker.check_integrity()
        return Outcome(
            policy=self._policy_name,
            cluster=self._cluster,
            seed=self._seed,
            jobs=self._jobs,
            num_refused=self._num_refused,
            gaps=self._gaps,
            busy_s={worker_id: worker.busy_s for worker_id, worker in self._workers.items()},
            prefilled_tokens={worker_id: worker.num_prefilled_tokens for worker_id, worker in self._workers.items()},
            num_events=self._clock.num_events,
            wall_s=time.perf_counter() - started,
            place_s=self._place_s,
            step_error=self._fleet.costs.steps(self._machine.kind).relative_error,
            worker_s=self._worker_s,
            num_moves=self._num_moves,
        )

    def _scale(self) -> None:
        """Let the scaler decide, and carry its decision out."""
        assert self._scaling is not None
        plan, now, registry = self._scaling, self._clock.now, self._fleet.registry
        for worker in self._computing:
            self._fleet.note_computed(worker.worker_id, worker.take_progress())
        self._let_idle_leave()
        scene = Scene(registry, self._fleet.costs, self._lengths.mean_tokens, now, tuple(self._jobs_done))
        for move in plan.scaler.decide(scene):
            self._num_moves += 1
            for worker_id in move.worker_ids:
                if move.kind == "flip":
                    registry.set_role(worker_id, move.role)
                else:
                    registry.set_state(worker_id, WorkerState.DRAINING, "the scaler removes it")
            for _ in range(move.num_added):
                self._start_worker(move.role, plan.start_s)
        self._jobs_done.clear()
        if now + plan.interval_s <= self._end_s:
            self._clock.at(now + plan.interval_s, self._scale)

    def _start_worker(self, role: Role, start_s: float) -> None:
        self._count_worker_s()
        self._num_added += 1
        card = self._cluster.card(f"a{self._num_added}", role)
        worker_id = card.address.worker_id
        self._fleet.join(card, is_ready=False)
        self._workers[worker_id] = SimulatedWorker(card, self._machine, self._clock, self)
        self._hosts[worker_id] = PrefixCache(self._cluster.host_cache_tokens // TRACE_BLOCK_SIZE)
        self._clock.at(self._clock.now + start_s, self._ready, worker_id)

    def _ready(self, worker_id: str) -> None:
        worker = self._fleet.registry.get(worker_id)
        if worker is not None and worker.state == WorkerState.STARTING:
            self._fleet.registry.set_state(worker_id, WorkerState.READY, "started")

    def _let_idle_leave(self) -> None:
        """Workers that drain leave once nothing is booked on them, and none of their KV is in transit."""
        for worker in list(self._fleet.registry):
            is_booked = worker.num_booked_seqs or worker.prompts
            simulated = self._workers[worker.worker_id]
            if worker.state == WorkerState.DRAINING and not is_booked and simulated.is_at_rest:
                self._count_worker_s()
                self._fleet.leave(worker.worker_id)

    def _count_worker_s(self) -> None:
        """Account for the time since the number of workers changed, up to the last arrival."""
        now = min(self._clock.now, self._end_s)
        self._worker_s += len(self._fleet.registry) * max(now - self._changed_s, 0.0)
        self._changed_s = max(now, self._changed_s)

    def _arrive(self, job: Job) -> None:
        self._on_arrival()
        started = time.perf_counter()
        for worker in self._computing:
            self._fleet.note_computed(worker.worker_id, worker.take_progress())
        request = RoutingRequest(job.num_prompt_tokens, self._lengths.expected("", _MAX_OUTPUT_TOKENS), job.digests)
        choice = self._policy.choose(request, self._clock.now)
        self._place_s += time.perf_counter() - started
        prefill_id, decode_id = choice.prefill.worker_id, choice.decode.worker_id
        job.prefill_worker_id, job.decode_worker_id = prefill_id, decode_id
        holders = {prefill_id} if job.num_output_tokens == 1 else {prefill_id, decode_id}
        self._fleet.index.speculate(holders, job.digests, self._clock.now)
        self._fleet.add_prompts(prefill_id, 1)
        num_cached, num_kv = choice.num_cached_tokens, job.num_prompt_tokens + request.expected_output_tokens
        slo = self._scaling.slo if self._scaling is not None else (None, None)
        self._fleet.registry.demand.note(job.num_prompt_tokens, num_cached, *slo)
        load = RequestLoad(prefill_id, decode_id, job.num_prompt_tokens - num_cached, num_cached, num_kv)
        self._open[job] = _Open(choice, self._fleet.registry.reserve(load))
        self._load_and_submit(job, choice)

    def _is_handed_over(self, job: Job) -> bool:
        """An answer of one token comes from the prefill worker alone."""
        return job.is_pair and job.num_output_tokens > 1

    def _load_and_submit(self, job: Job, choice: RoutingChoice) -> None:
        """Give the worker its prompt, after the KV to be read from host memory or a peer has arrived."""
        worker = self._workers[choice.prefill.worker_id]
        digests = job.digests[: job.num_usable_blocks(TRACE_BLOCK_SIZE)]
        num_own = worker.pool.count_cached(digests)
        load_s, num_blocks = self._host_load(worker, digests, num_own)
        if choice.candidate is not None and choice.candidate.holder is not None:
            holder = self._workers[choice.candidate.holder.worker.worker_id]
            peer_s, num_peer_blocks = self._peer_load(holder, digests, num_own)
            if num_peer_blocks > max(num_blocks, num_own):
                load_s, num_blocks = peer_s, num_peer_blocks
                self._clock.at(self._clock.now + load_s, holder.pool.demote, digests[:num_blocks])
        if num_blocks <= num_own:
            worker.submit(job)
            return
        job.num_readable_tokens = num_blocks * TRACE_BLOCK_SIZE
        self._clock.at(self._clock.now + load_s, worker.submit, job)

    def _host_load(self, worker: SimulatedWorker, digests: Sequence[bytes], num_own: int) -> tuple[float, int]:
        """Seconds to load from host memory, and up to which block; (0, 0) where computing is faster."""
        num_blocks = self._hosts[worker.worker_id].count(digests) if self._cluster.host_cache_tokens else 0
        load_s = max(num_blocks - num_own, 0) * self._machine.block_bytes / self._machine.host_bytes_per_s
        num_tokens, num_context = (num_blocks - num_own) * TRACE_BLOCK_SIZE, num_own * TRACE_BLOCK_SIZE
        costs = self._machine.costs
        compute_s = costs.prefill_token_s * num_tokens + costs.attention_s * prefill_attention(num_tokens, num_context)
        return (load_s, num_blocks) if load_s < compute_s else (0.0, 0)

    def _peer_load(self, holder: SimulatedWorker, digests: Sequence[bytes], num_own: int) -> tuple[float, int]:
        """The same from a peer's pool. A peer answers between two of its steps."""
        num_blocks = holder.pool.count_cached(digests)
        num_bytes = max(num_blocks - num_own, 0) * self._machine.block_bytes
        read_s = self._machine.link_latency_s + num_bytes / self._machine.link_bytes_per_s
        return holder.rest_of_step_s() + read_s, num_blocks

    def stepped(self, worker: SimulatedWorker, run: Run, num_prompt_tokens: int) -> None:
        """Learn from the steps, as the router does from each step's report."""
        self._fleet.costs.steps(worker.card.kind).observe(run.mean_stats())
        self._fleet.note_computed(worker.worker_id, num_prompt_tokens)
        self._note_gaps(run)

    def _note_gaps(self, run: Run) -> None:
        """Record the gaps that last one step; `decoding` records those that contain a handoff."""
        first_s, end_s = run.duration_s(1), self._clock.now
        if run.num_seqs > run.num_joined:
            self._gaps.append(Gaps(end_s, first_s, first_s, run.num_seqs - run.num_joined))
        if run.num_seqs and run.num_steps > 1:
            second_s = run.duration_s(2) - first_s
            last_s = run.duration_s(run.num_steps) - run.duration_s(run.num_steps - 1)
            self._gaps.append(Gaps(end_s, second_s, last_s, run.num_seqs * (run.num_steps - 1)))

    def started(self, worker: SimulatedWorker, run: Run) -> None:
        """Note whether a run will have progress to report before it ends."""
        if run.chunk_tokens and run.num_steps > 1:
            self._computing.add(worker)
        else:
            self._computing.discard(worker)

    def admitted(self, worker: SimulatedWorker, job: Job) -> None:
        """Reserve room to decode as late as the transfer allows: blocks that wait for a long prompt are wasted."""
        if self._is_handed_over(job):
            decode = self._workers[job.decode_worker_id]
            self._clock.at(self._clock.now + self._until_room_is_needed_s(job), decode.reserve, job)

    def _until_room_is_needed_s(self, job: Job) -> float:
        """Until the last chunk but one begins, as a grant is read a step later; sooner if the transfer is longer."""
        machine, chunk = self._machine, self._cluster.step_tokens

        def compute_s(num_tokens: int) -> float:
            attention = prefill_attention(num_tokens, job.num_computed_tokens)
            steps_s = -(-num_tokens // chunk) * machine.costs.base_s
            return steps_s + machine.costs.prefill_work_s(float(num_tokens), attention)

        num_bytes = -(-job.num_prompt_tokens // TRACE_BLOCK_SIZE) * machine.block_bytes
        transfer_s = machine.link_latency_s + num_bytes / machine.link_bytes_per_s
        early_chunks = max((job.num_new_tokens - 1) // chunk - 1, 0) * chunk
        return max(min(compute_s(early_chunks), compute_s(job.num_new_tokens) - transfer_s), 0.0)

    def prefilled(self, worker: SimulatedWorker, job: Job) -> None:
        """The first token came."""
        self._fleet.add_prompts(worker.worker_id, -1)
        request = self._open[job]
        request.booking.prefill_done()
        if self._cluster.host_cache_tokens:
            stored, removed = self._hosts[worker.worker_id].store(job.digests)
            self._fleet.announce(worker.worker_id, stored, removed, HOST_TIER)
        if request.room_s is not None:
            self._hand_over(job, request.room_s)

    def has_room(self, worker: SimulatedWorker, job: Job) -> None:
        """The decode worker has room: the KV may be sent from now on."""
        self._open[job].room_s = self._clock.now
        if job.first_token_s is not None:
            self._hand_over(job, self._clock.now)

    def _hand_over(self, job: Job, room_s: float) -> None:
        """Plan the arrival of the last block: a chunk is sent while the next is computed, the last one after that."""
        assert job.prefill_start_s is not None
        assert job.first_token_s is not None
        assert job.decode_blocks is not None
        machine = self._machine
        num_bytes = (-(-job.num_prompt_tokens // TRACE_BLOCK_SIZE) - job.decode_blocks.num_hits) * machine.block_bytes
        chunk_bytes = self._cluster.step_tokens / TRACE_BLOCK_SIZE * machine.block_bytes
        all_sent_s = max(job.prefill_start_s, room_s) + num_bytes / machine.link_bytes_per_s
        last_sent_s = max(job.first_token_s, room_s) + min(num_bytes, chunk_bytes) / machine.link_bytes_per_s
        arrival_s = max(all_sent_s, last_sent_s) + machine.link_latency_s
        exposed_s = arrival_s - max(job.first_token_s, room_s)
        self._clock.at(arrival_s, self._arrived, job, exposed_s)

    def _arrived(self, job: Job, exposed_s: float) -> None:
        """All KV has arrived; the sender reports how much of the transfer was exposed."""
        exposed_bytes = (exposed_s - self._machine.link_latency_s) * self._machine.link_bytes_per_s
        self._fleet.costs.transfer(self._machine.kind, self._machine.kind).observe(exposed_bytes, exposed_s)
        self._workers[job.prefill_worker_id].release_prompt(job)
        self._workers[job.decode_worker_id].join(job)

    def decoding(self, worker: SimulatedWorker, job: Job) -> None:
        """Record the gap that contains the handoff."""
        assert job.first_token_s is not None
        assert job.second_token_s is not None
        gap_s = job.second_token_s - job.first_token_s
        self._gaps.append(Gaps(job.second_token_s, gap_s, gap_s, 1))

    def finished(self, worker: SimulatedWorker, job: Job) -> None:
        """The answer is complete."""
        self._open.pop(job).booking.release()
        self._lengths.note("", job.num_output_tokens)
        self._fleet.registry.demand.note_answer(job.num_output_tokens)
        if self._scaling is not None:
            self._jobs_done.append(job)

    def cached(self, worker: SimulatedWorker, stored: list[bytes], removed: list[bytes]) -> None:
        """Pass on the worker's block events."""
        self._fleet.announce(worker.worker_id, stored, removed)


def _job(number: int, request: TraceRequest, digests: dict[int, bytes]) -> Job:
    """A request of the trace as a job. Only full blocks are cached; a block id becomes its digest."""
    num_full = request.num_prompt_tokens // TRACE_BLOCK_SIZE
    block_ids = request.block_ids[:num_full]
    return Job(
        request_id=number,
        arrival_s=request.arrival_s,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=max(request.num_output_tokens, 1),
        digests=tuple(digests.setdefault(block_id, block_id.to_bytes(16)) for block_id in block_ids),
    )
