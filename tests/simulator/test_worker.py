"""The closed-form worker equals a step-by-step one, and serves in the engine's order."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from tandem.protocol.messages import Role
from tandem.scheduling.cost_model import StepCosts
from tandem.simulator.clock import Clock
from tandem.simulator.fleet import make_card
from tandem.simulator.machine import Machine
from tandem.simulator.steps import Run
from tandem.simulator.worker import Job, SimulatedWorker

COSTS = StepCosts(20e-3, 1e-4, 2e-9, 1e-4, 1e-7)
BLOCK_SIZE = 512


@dataclass(frozen=True)
class Arrival:
    """A request without any cached prefix; `handed_over` ones arrive with their KV and first token."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    handed_over: bool = False


@dataclass
class _Sequence:
    number: int
    arrival: Arrival
    num_computed: int = 0
    num_outputs: int = 0


def serve(
    arrivals: list[Arrival], costs: StepCosts, *, step_tokens: int, max_num_seqs: int, pool_blocks: int, block_size: int
) -> tuple[dict[int, float], dict[int, float]]:
    """The oracle: one step at a time. Times of the first token and of the last token, by position in `arrivals`."""
    pending = [_Sequence(number, arrival) for number, arrival in enumerate(arrivals)]
    waiting: list[_Sequence] = []
    prompts: list[_Sequence] = []
    decoding: list[_Sequence] = []
    first_s: dict[int, float] = {}
    end_s: dict[int, float] = {}
    now = 0.0

    def num_blocks(sequence: _Sequence) -> int:
        arrival = sequence.arrival
        return -(-(arrival.num_prompt_tokens + arrival.num_output_tokens) // block_size)

    while pending or waiting or prompts or decoding:
        if not waiting and not prompts and not decoding:
            now = max(now, min(sequence.arrival.arrival_s for sequence in pending))
        due = sorted(
            (sequence for sequence in pending if sequence.arrival.arrival_s <= now),
            key=lambda sequence: sequence.arrival.arrival_s,
        )
        for sequence in due:
            pending.remove(sequence)
            if sequence.arrival.handed_over:
                sequence.num_computed, sequence.num_outputs = sequence.arrival.num_prompt_tokens, 1
                decoding.append(sequence)
            else:
                waiting.append(sequence)
        budget = step_tokens - len(decoding)
        chunks: list[tuple[_Sequence, int]] = []
        for sequence in prompts:
            chunk = min(budget, sequence.arrival.num_prompt_tokens - sequence.num_computed)
            if chunk:
                chunks.append((sequence, chunk))
            budget -= chunk
        while budget and waiting and len(prompts) + len(decoding) < max_num_seqs:
            used = sum(num_blocks(sequence) for sequence in prompts + decoding)
            if used + num_blocks(waiting[0]) > pool_blocks:
                break
            sequence = waiting.pop(0)
            prompts.append(sequence)
            chunks.append((sequence, min(budget, sequence.arrival.num_prompt_tokens)))
            budget -= chunks[-1][1]
        now += costs.base_s
        for sequence, chunk in chunks:
            now += costs.prefill_token_s * chunk + costs.attention_s * chunk * (sequence.num_computed + chunk / 2)
        for sequence in decoding:
            length = sequence.arrival.num_prompt_tokens + sequence.num_outputs
            now += costs.decode_seq_s + costs.kv_token_s * length
            sequence.num_outputs += 1
        for sequence, chunk in chunks:
            sequence.num_computed += chunk
            if sequence.num_computed == sequence.arrival.num_prompt_tokens:
                prompts.remove(sequence)
                sequence.num_outputs = 1
                first_s[sequence.number] = now
                decoding.append(sequence)
        for sequence in list(decoding):
            if sequence.num_outputs == sequence.arrival.num_output_tokens:
                decoding.remove(sequence)
                end_s[sequence.number] = now
    return first_s, end_s


class Recorder:
    """Records a worker's events and its steps."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.num_gaps = 0
        self.num_prompt_tokens = 0
        self.stored: list[bytes] = []
        self.removed: list[bytes] = []

    def started(self, worker: SimulatedWorker, run: Run) -> None:
        pass

    def stepped(self, worker: SimulatedWorker, run: Run, num_prompt_tokens: int) -> None:
        self.runs.append(run)
        self.num_gaps += run.num_seqs * run.num_steps - run.num_joined
        self.num_prompt_tokens += num_prompt_tokens

    def admitted(self, worker: SimulatedWorker, job: Job) -> None:
        pass

    def prefilled(self, worker: SimulatedWorker, job: Job) -> None:
        pass

    def has_room(self, worker: SimulatedWorker, job: Job) -> None:
        pass

    def decoding(self, worker: SimulatedWorker, job: Job) -> None:
        self.num_gaps += 1

    def finished(self, worker: SimulatedWorker, job: Job) -> None:
        pass

    def cached(self, worker: SimulatedWorker, stored: list[bytes], removed: list[bytes]) -> None:
        self.stored += stored
        self.removed += removed


def make_worker(
    *, step_tokens: int = 2048, pool_blocks: int = 1000, max_num_seqs: int = 16
) -> tuple[SimulatedWorker, Recorder]:
    machine = Machine(
        kind="toy",
        costs=COSTS,
        kv_token_bytes=1,
        pool_tokens=pool_blocks * BLOCK_SIZE,
        step_tokens=step_tokens,
        colocated_step_tokens=step_tokens,
        max_num_seqs=max_num_seqs,
        link_latency_s=0.0,
        link_bytes_per_s=1e9,
        host_bytes_per_s=1e9,
    )
    card = make_card(
        "w0",
        Role.COLOCATED,
        kind="toy",
        num_blocks=pool_blocks,
        block_size=BLOCK_SIZE,
        block_bytes=BLOCK_SIZE,
        max_num_batched_tokens=step_tokens,
    )
    recorder = Recorder()
    return SimulatedWorker(card, machine, Clock(), recorder), recorder


def make_job(
    number: int = 0, *, prompt: int = 1000, outputs: int = 4, arrival_s: float = 0.0, chain: str | None = None
) -> Job:
    """Prompts of one `chain` share their blocks; without one a prompt shares nothing."""
    name = f"only {number}" if chain is None else chain
    digests = tuple(f"{name} {idx}".encode() for idx in range(prompt // BLOCK_SIZE))
    return Job(number, arrival_s, prompt, outputs, digests)


def random_arrivals(rng: random.Random, num_requests: int, mean_gap_s: float) -> list[Arrival]:
    now, arrivals = 0.0, []
    for _ in range(num_requests):
        now += rng.choice([1e-6, rng.expovariate(1 / mean_gap_s)])
        prompt = rng.choice([1, 511, 512, 513, 2047, 2048, 2049, rng.randint(1, 20_000)])
        handed_over = rng.random() < 0.2
        arrivals.append(Arrival(now, prompt, rng.randint(2 if handed_over else 1, 300), handed_over))
    return arrivals


@pytest.mark.parametrize("seed", range(12))
def test_runs_of_steps_equal_single_steps(seed: int) -> None:
    rng = random.Random(seed)
    step_tokens = rng.choice([256, 2048, 8192])
    arrivals = random_arrivals(rng, 60, rng.choice([0.05, 0.5, 3.0]))
    worker, recorder = make_worker(step_tokens=step_tokens, max_num_seqs=100)
    jobs = [
        make_job(number, prompt=arrival.num_prompt_tokens, outputs=arrival.num_output_tokens)
        for number, arrival in enumerate(arrivals)
    ]
    for job, arrival in zip(jobs, arrivals, strict=True):
        if arrival.handed_over:
            worker.clock.at(arrival.arrival_s, take_over, worker, job)
        else:
            worker.clock.at(arrival.arrival_s, worker.submit, job)
    worker.clock.run()
    first_s, end_s = serve(
        arrivals, COSTS, step_tokens=step_tokens, max_num_seqs=100, pool_blocks=10**9, block_size=BLOCK_SIZE
    )
    for job, arrival in zip(jobs, arrivals, strict=True):
        if not arrival.handed_over:
            assert job.first_token_s == pytest.approx(first_s[job.request_id], rel=1e-9)
        assert job.end_s == pytest.approx(end_s[job.request_id], rel=1e-9)
    assert recorder.num_gaps == sum(arrival.num_output_tokens - 1 for arrival in arrivals)
    assert recorder.num_prompt_tokens == sum(a.num_prompt_tokens for a in arrivals if not a.handed_over)
    assert worker.busy_s == pytest.approx(sum(run.duration_s(run.num_steps) for run in recorder.runs))
    worker.check_integrity()


def take_over(worker: SimulatedWorker, job: Job) -> None:
    worker.reserve(job)
    job.first_token_s = worker.clock.now
    worker.join(job)


@pytest.mark.parametrize("pool_blocks", [45, 60, 100])
def test_prompts_wait_for_room_as_step_by_step(pool_blocks: int) -> None:
    rng = random.Random(pool_blocks)
    arrivals = [Arrival(0.2 * idx, rng.randint(1, 20_000), rng.randint(1, 200)) for idx in range(30)]
    worker, _ = make_worker(pool_blocks=pool_blocks)
    jobs = [
        make_job(number, prompt=arrival.num_prompt_tokens, outputs=arrival.num_output_tokens)
        for number, arrival in enumerate(arrivals)
    ]
    for job, arrival in zip(jobs, arrivals, strict=True):
        worker.clock.at(arrival.arrival_s, worker.submit, job)
    worker.clock.run()
    first_s, end_s = serve(
        arrivals, COSTS, step_tokens=2048, max_num_seqs=16, pool_blocks=pool_blocks, block_size=BLOCK_SIZE
    )
    assert [job.first_token_s for job in jobs] == pytest.approx([first_s[n] for n in range(30)], rel=1e-9)
    assert [job.end_s for job in jobs] == pytest.approx([end_s[n] for n in range(30)], rel=1e-9)


def test_long_runs_take_few_events() -> None:
    worker, recorder = make_worker()
    worker.submit(make_job(prompt=100_000, outputs=10_000))
    worker.clock.run()
    assert len(recorder.runs) == 3  # full chunks, the last one, decoding
    assert sum(run.num_steps for run in recorder.runs) == 49 + 9_999


def test_a_prompt_finds_the_blocks_of_an_earlier_one() -> None:
    worker, recorder = make_worker()
    jobs = [make_job(0, prompt=5 * 512, chain="a"), make_job(1, prompt=5 * 512, chain="a", arrival_s=50.0)]
    for job in jobs:
        worker.clock.at(job.arrival_s, worker.submit, job)
    worker.clock.run()
    assert [job.num_cached_tokens for job in jobs] == [0, 4 * 512]  # the last token is computed again
    assert recorder.stored == list(jobs[0].digests)


def test_a_prompt_waits_for_its_prefix_that_is_being_computed() -> None:
    worker, recorder = make_worker(step_tokens=2048)
    jobs = [make_job(number, prompt=10_300, chain="a") for number in range(2)]
    for job in jobs:
        worker.submit(job)
    worker.clock.run()
    assert [job.num_cached_tokens for job in jobs] == [0, 20 * 512]
    assert recorder.num_prompt_tokens == 10_300 + 60


def test_progress_is_reported_once() -> None:
    worker, recorder = make_worker(step_tokens=1000)
    told = []
    worker.submit(make_job(prompt=10_000))
    for time_s in (0.2, 0.5, 0.51, 0.9):
        worker.clock.at(time_s, lambda: told.append(worker.take_progress()))
    worker.clock.run()
    assert sum(told) > 0
    assert sum(told) + recorder.num_prompt_tokens == 10_000


def test_reserved_room_is_given_in_order() -> None:
    worker, _ = make_worker(pool_blocks=10)
    given: list[int] = []
    worker.listener.has_room = lambda _, job: given.append(job.request_id)  # type: ignore[method-assign]
    jobs = [make_job(number, prompt=prompt, outputs=2) for number, prompt in enumerate([3000, 3000, 100])]
    for job in jobs:
        worker.reserve(job)
    assert given == [0]  # the third would fit, but waits behind the second
    jobs[0].first_token_s = 0.0
    worker.join(jobs[0])
    worker.clock.run()
    assert given == [0, 1, 2]
