"""Workers in virtual time behind the real placement, cost model and admission: a small discrete-event model.

A worker runs steps as the engine does (a chunk of prompts, in order of priority, and a token of every sequence)
whose duration is that of the CPU's prior times noise. KV moves instantly, nothing is cached, and memory is unlimited.
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import Overloaded, ServingError
from tandem.protocol.messages import Role, StepStats
from tandem.scheduling.admission.admission import Admission, Dispatch, Drop
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.cost_model import CPU_PRIOR, CostModel, prefill_attention
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.request import NO_DIGESTS, ServiceClass
from tandem.scheduling.workers.bookings import Booking
from tandem.scheduling.workers.registry import Registry
from tests.support.builders import add_ready, make_card

CHUNK_TOKENS = 512
NOISE = 0.1  # standard deviation of the logarithm of a step's duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request and its arrival time."""

    time_s: float
    tenant: str = "default"
    num_prompt_tokens: int = 512
    num_output_tokens: int = 32
    priority: int = 0
    slo_s: float = math.inf
    leaves_s: float = math.inf  # the client leaves at this time if it has no first token
    num_retries: int = 0  # retries after a refusal, at the time it was told


@dataclass(eq=False, slots=True)
class Job:
    """The outcome of an arrival."""

    arrival: Arrival
    ttft_s: float = math.nan
    ended_s: float = math.nan
    error: ServingError | None = None
    is_refused: bool = False  # immediately, not after waiting
    retry: Job | None = None
    num_left: int = 0  # prompt tokens to compute
    num_outputs: int = 0
    dispatch: Dispatch | None = None
    booking: Booking | None = None

    @property
    def is_in_time(self) -> bool:
        """Whether its first token came within the SLO."""
        return self.ttft_s <= self.arrival.slo_s


@dataclass(eq=False, slots=True)
class _Machine:
    worker_id: str
    prompts: list[Job] = field(default_factory=list)
    batch: list[Job] = field(default_factory=list)
    is_running: bool = False


class VirtualCluster:
    """Pools of equal workers and a router, from time 0 on."""

    def __init__(self, *, num_prefill: int = 2, num_decode: int = 2, seed: int = 0) -> None:
        self.now = 0.0
        self.registry, self.costs = Registry(), CostModel()
        index, config = PrefixIndex(), RouterConfig(routing="cost,pairs")
        placer = Placer(self.registry, index, self.costs, config)
        self.admission = Admission(self.registry, self.costs, placer, Tenants(), config)
        self.jobs: list[Job] = []
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._machines: dict[str, _Machine] = {}
        roles = [Role.PREFILL] * num_prefill + [Role.DECODE] * num_decode if num_prefill else []
        for role in roles or [Role.COLOCATED] * num_decode:
            self._add(f"{role}-{len(self._machines)}", role)

    def run(self, arrivals: Iterable[Arrival], until_s: float = math.inf) -> list[Job]:
        """Run until this time, or until no event is left; returns the jobs in order of arrival."""
        for arrival in arrivals:
            self._submit(arrival)
        while self._events and self._events[0][0] <= until_s:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return self.jobs

    def at(self, time_s: float, happen: Callable[[], None]) -> None:
        """Schedule an event."""
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, happen))

    def _submit(self, arrival: Arrival) -> Job:
        job = Job(arrival)
        self.jobs.append(job)
        self.at(arrival.time_s, lambda: self._arrive(job))
        return job

    def _add(self, worker_id: str, role: Role) -> None:
        add_ready(self.registry, make_card(worker_id, role, num_blocks=1 << 16, max_model_len=1 << 17))
        self._machines[worker_id] = _Machine(worker_id)

    def _arrive(self, job: Job) -> None:
        arrival = job.arrival
        service_class = ServiceClass(arrival.tenant, arrival.priority, arrival.slo_s)
        request = self.admission.placement_request(
            service_class, num_prompt_tokens=arrival.num_prompt_tokens, digests=NO_DIGESTS, max_tokens=1 << 16
        )
        try:
            waiting = self.admission.enter(request, self.admission.forecast(request, self.now), self.now, job)
        except ServingError as exc:
            self._refuse(job, exc)
            job.is_refused = True
            return
        self._decide()
        if arrival.leaves_s < math.inf:
            self.at(arrival.leaves_s, lambda: self._leave(job))
        if waiting.deadline_s < math.inf and job.dispatch is None:
            self.at(waiting.latest_start_s + 1e-3, self._decide)

    def _decide(self) -> None:
        while (decided := self.admission.next(self.now)) is not None:
            job: Job = decided.queued.payload
            if isinstance(decided, Drop):
                self._refuse(job, decided.error)
                continue
            job.dispatch, job.num_left = decided, decided.placement.num_new_tokens
            job.booking = self.registry.reserve(decided.placement.load, decided.worker_priority)
            machine = self._machines[decided.placement.best.prefill.worker_id]
            insort(machine.prompts, job, key=_order)
            self._start_step(machine)

    def _refuse(self, job: Job, error: ServingError) -> None:
        job.error, job.ended_s = error, self.now
        if job.arrival.num_retries and isinstance(error, Overloaded):
            again = {name: getattr(job.arrival, name) for name in Arrival.__slots__}
            again |= {"time_s": self.now + error.retry_after_s, "num_retries": job.arrival.num_retries - 1}
            job.retry = self._submit(Arrival(**again))

    def _leave(self, job: Job) -> None:
        if math.isnan(job.ended_s) and math.isnan(job.ttft_s):
            job.ended_s = self.now
            for waiting in [one for one in self.admission.requests if one.payload is job]:
                self.admission.leave(waiting, "client_gone")
            self._end(job)
            self._decide()

    def _start_step(self, machine: _Machine) -> None:
        if machine.is_running or not (machine.prompts or machine.batch):
            return
        room, attention = CHUNK_TOKENS, 0.0
        chunks: list[tuple[Job, int]] = []
        for job in machine.prompts:
            assert job.dispatch is not None
            limit = job.dispatch.worker_priority.max_step_tokens or CHUNK_TOKENS
            num = min(job.num_left, room, limit - (CHUNK_TOKENS - room))
            if num <= 0:
                break
            attention += prefill_attention(num, job.arrival.num_prompt_tokens - job.num_left)
            chunks.append((job, num))
            room -= num
        batch = list(machine.batch)
        num_kv = sum(job.arrival.num_prompt_tokens + job.num_outputs for job in batch)
        num_tokens = CHUNK_TOKENS - room
        duration_s = CPU_PRIOR.base_s + CPU_PRIOR.prefill_token_s * num_tokens + CPU_PRIOR.attention_s * attention
        duration_s += CPU_PRIOR.decode_seq_s * len(batch) + CPU_PRIOR.kv_token_s * num_kv
        duration_s *= math.exp(self._rng.gauss(0, NOISE))
        stats = StepStats(
            duration_s=duration_s,
            num_prefill_tokens=num_tokens,
            prefill_attention=attention,
            num_decode_seqs=len(batch),
            num_decode_kv_tokens=num_kv,
        )
        machine.is_running = True
        self.at(self.now + duration_s, lambda: self._end_step(machine, stats, chunks, batch))

    def _end_step(self, machine: _Machine, stats: StepStats, chunks: list[tuple[Job, int]], batch: list[Job]) -> None:
        self.costs.steps("cpu-1").observe(stats)
        self.registry.note_step(machine.worker_id, stats)
        for job, num in chunks:
            job.num_left -= num
            if job.num_left == 0:
                machine.prompts.remove(job)
                self._first_token(job)
        for job in batch:
            job.num_outputs += 1
            if job.num_outputs >= job.arrival.num_output_tokens:
                machine.batch.remove(job)
                self._end(job)
        machine.is_running = False
        self._start_step(machine)
        self._decide()

    def _first_token(self, job: Job) -> None:
        if job.booking is None or job.dispatch is None or not math.isnan(job.ended_s):
            return  # the client has left
        job.ttft_s, job.num_outputs = self.now - job.arrival.time_s, 1
        job.booking.prefill_done()
        if job.arrival.num_output_tokens == 1:
            self._end(job)
            return
        machine = self._machines[job.dispatch.placement.best.decode.worker_id]
        machine.batch.append(job)
        self._start_step(machine)

    def _end(self, job: Job) -> None:
        job.ended_s = self.now
        if job.booking is None or job.dispatch is None:
            return
        job.booking.release()
        if job.num_outputs:
            self.admission.lengths.note(job.arrival.tenant, job.num_outputs)


def _order(job: Job) -> float:
    assert job.dispatch is not None
    return job.dispatch.worker_priority.order


def poisson(
    rng: random.Random, tenant: str, rate: float, duration_s: float, *, slo_s: float = math.inf, num_retries: int = 0
) -> list[Arrival]:
    """Independent arrivals, `rate` a second: prompts of even spread, answers of 32 tokens on average."""
    arrivals, now = [], rng.expovariate(rate)
    while now < duration_s:
        arrivals.append(
            Arrival(
                time_s=now,
                tenant=tenant,
                num_prompt_tokens=rng.randint(64, 1024),
                num_output_tokens=1 + int(rng.expovariate(1 / 32)),
                slo_s=slo_s,
                num_retries=num_retries,
            )
        )
        now += rng.expovariate(rate)
    return arrivals
