"""A simulated worker: chunked prefill and decoding in mixed steps over a block pool, in virtual time.

Schedules as the engine does, but advances a run of equal steps at a time (simulator.steps). In each step every decoding
sequence gets one token, and prompts get the remaining tokens in order of arrival.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.protocol.messages import WorkerCard
from tandem.simulator.clock import Clock
from tandem.simulator.machine import Machine
from tandem.simulator.pool import Allocation, Pool
from tandem.simulator.steps import Chunk, Run


@dataclass(eq=False, slots=True)
class Job:
    """One request's work and its outcome. A prompt is computed on one worker and decoded there or on another."""

    request_id: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    digests: Sequence[bytes]  # digests of the prompt's full blocks
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    num_readable_tokens: int = 0  # leading tokens whose KV was read from a peer or a tier before admission
    num_loaded_tokens: int = 0  # those of them that the pool lacked
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # found in the pool
    prompt_blocks: Allocation | None = None
    decode_blocks: Allocation | None = None
    prefill_start_s: float | None = None
    first_token_s: float | None = None
    second_token_s: float | None = None
    end_s: float | None = None

    @property
    def is_pair(self) -> bool:
        """Whether the prompt is computed on one worker and decoded on another."""
        return self.prefill_worker_id != self.decode_worker_id

    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens that still have to be computed."""
        return self.num_prompt_tokens - self.num_computed_tokens

    def num_usable_blocks(self, block_size: int) -> int:
        """Blocks that may come from a cache. The last token is always computed, for its logits."""
        return min((self.num_prompt_tokens - 1) // block_size, len(self.digests))


class WorkerListener(Protocol):
    """Receives a worker's events, in order, at the end of a step."""

    def started(self, worker: SimulatedWorker, run: Run) -> None:
        """A run of steps began; it may be cut short."""

    def stepped(self, worker: SimulatedWorker, run: Run, num_prompt_tokens: int) -> None:
        """A run of steps ended. `num_prompt_tokens` were computed beyond those that `take_progress` returned."""

    def admitted(self, worker: SimulatedWorker, job: Job) -> None:
        """The next step computes the first chunk of the prompt's uncached rest."""

    def prefilled(self, worker: SimulatedWorker, job: Job) -> None:
        """The prompt is computed: it has its first token."""

    def has_room(self, worker: SimulatedWorker, job: Job) -> None:
        """Blocks for the KV of a prompt that is computed elsewhere are reserved."""

    def decoding(self, worker: SimulatedWorker, job: Job) -> None:
        """A sequence handed over to this worker has its first token here."""

    def finished(self, worker: SimulatedWorker, job: Job) -> None:
        """The sequence has its last token."""

    def cached(self, worker: SimulatedWorker, stored: list[bytes], removed: list[bytes]) -> None:
        """The cached blocks of the worker's pool have changed."""


@dataclass(eq=False)
class SimulatedWorker:
    """An engine with a queue. Every method is called at the clock's present time."""

    card: WorkerCard
    machine: Machine
    clock: Clock
    listener: WorkerListener
    busy_s: float = 0.0
    num_prefilled_tokens: int = 0  # by steps that have ended
    _run: Run | None = None
    _run_number: int = 0
    _waiting: deque[Job] = field(default_factory=deque)
    _prefilling: list[Job] = field(default_factory=list)
    _awaiting_room: deque[Job] = field(default_factory=deque)
    _num_steps: int = 0  # steps that have ended
    _num_reported: int = 0  # steps of the present run that were reported to the router
    _num_decoding: int = 0
    _kv_tokens: int = 0  # KV tokens of the decoding sequences
    _endings: list[tuple[int, int, Job]] = field(default_factory=list)  # step of the last token, tie break, job
    _ties: itertools.count[int] = field(default_factory=itertools.count)
    _arrived: deque[Job] = field(default_factory=deque)  # sequences handed over, before they join the batch
    _joined: list[Job] = field(default_factory=list)  # sequences that joined the batch with the present run
    _is_between_steps: bool = False  # the listener is being called; the next step is composed after that

    def __post_init__(self) -> None:
        self.pool = Pool(self.card.num_blocks)

    @property
    def worker_id(self) -> str:
        """The id on its card."""
        return self.card.address.worker_id

    def submit(self, job: Job) -> None:
        """Queue a prompt."""
        self._waiting.append(job)
        if self._run is None or not self._run.chunks:
            self._interrupt()

    def reserve(self, job: Job) -> None:
        """Request room for KV that another worker computes; `has_room` answers, in order."""
        self._awaiting_room.append(job)
        self._give_room()

    def join(self, job: Job) -> None:
        """Decode a sequence whose KV has arrived in its reserved blocks."""
        assert job.decode_blocks is not None, f"request {job.request_id} has no blocks to decode in"
        self._publish(job.decode_blocks, len(job.digests))
        self._arrived.append(job)
        self._interrupt()

    def release_prompt(self, job: Job) -> None:
        """The KV of a prompt computed here was handed over."""
        assert job.prompt_blocks is not None, f"request {job.request_id} has no prompt blocks"
        self.pool.release(job.prompt_blocks)
        self._give_room()
        if self._waiting and not self._prefilling:
            self._interrupt()

    def rest_of_step_s(self) -> float:
        """Seconds until the step in progress ends."""
        run = self._run
        if run is None:
            return 0.0
        num_done = min(run.num_done(self.clock.now) + 1, run.num_steps)
        return max(run.start_s + run.duration_s(num_done) - self.clock.now, 0.0)

    def take_progress(self) -> int:
        """Prompt tokens computed since the last call by steps of the run in progress."""
        run = self._run
        if run is None or not run.chunk_tokens or run.num_steps == 1:
            return 0
        num_done = run.num_done(self.clock.now)
        num_new, self._num_reported = num_done - self._num_reported, num_done
        return num_new * run.chunk_tokens

    @property
    def is_at_rest(self) -> bool:
        """Whether it has nothing to compute, to receive or to send."""
        return self._run is None and not self._awaiting_room and not self.pool.num_in_use

    def check_integrity(self) -> None:
        """Raise AssertionError unless nothing is left: no work, and no blocks in use."""
        queues = (self._waiting, self._prefilling, self._awaiting_room, self._arrived, self._endings)
        left = sum(len(queue) for queue in queues)
        assert left == 0, f"{self.worker_id} has {left} requests left"
        assert self._kv_tokens == 0, f"{self.worker_id} counts {self._kv_tokens} KV tokens with nothing to decode"
        self.pool.check_integrity()

    def _interrupt(self) -> None:
        """Let new work join: now if idle, else after the step in progress."""
        if self._is_between_steps:
            return
        if self._run is None:
            self._start()
        elif self._run.cut(self.clock.now):
            self._plan_end()

    def _plan_end(self) -> None:
        assert self._run is not None
        self._run_number += 1
        self.clock.at(max(self._run.end_s, self.clock.now), self._end, self._run_number)

    def _start(self) -> None:
        """Compose the next step, and as many more as will be equal."""
        while self._arrived and self._has_seat:
            self._joined.append(self._arrived.popleft())
            self._decode(self._joined[-1])
        chunks = self._schedule()
        if not chunks and not self._num_decoding:
            self._run = None
            return
        self._run = Run(
            costs=self.machine.costs,
            start_s=self.clock.now,
            num_steps=self._num_equal_steps(chunks),
            num_seqs=self._num_decoding,
            kv_tokens=self._kv_tokens,
            chunks=chunks,
            num_joined=len(self._joined),
        )
        self._num_reported = 0
        self.listener.started(self, self._run)
        self._plan_end()

    def _schedule(self) -> list[Chunk]:
        budget = self.card.max_num_batched_tokens - self._num_decoding
        chunks = []
        for job in self._prefilling:
            chunks.append(Chunk(min(budget, job.num_new_tokens), job.num_computed_tokens))
            budget -= chunks[-1].num_tokens
            if budget == 0:
                return chunks
        while budget > 0 and self._waiting and self._has_seat and self._try_admit(self._waiting[0]):
            job = self._waiting.popleft()
            self._prefilling.append(job)
            chunks.append(Chunk(min(budget, job.num_new_tokens), job.num_computed_tokens))
            budget -= chunks[-1].num_tokens
        return chunks

    @property
    def _has_seat(self) -> bool:
        return self._num_decoding + len(self._prefilling) < self.machine.max_num_seqs

    def _num_equal_steps(self, chunks: Sequence[Chunk]) -> int:
        """Steps until a sequence ends or a prompt's last chunk is due, which makes a step of its own."""
        until_ending = self._endings[0][0] - self._num_steps if self._endings else None
        if not chunks:
            assert until_ending is not None
            return until_ending
        until_last_chunk = -(-self._prefilling[0].num_new_tokens // chunks[0].num_tokens) - 1
        is_alone = len(chunks) == 1 and until_last_chunk > 0
        num_steps = until_last_chunk if is_alone else 1
        return num_steps if until_ending is None else min(num_steps, until_ending)

    def _try_admit(self, job: Job) -> bool:
        """Give a prompt its cached prefix and room, or change nothing."""
        block_size = self.card.block_size
        num_usable = job.num_usable_blocks(block_size)
        num_cached = self.pool.count_cached(job.digests[:num_usable])
        if num_cached < num_usable and self._is_being_computed(job.digests[num_cached], num_cached):
            return False
        num_tokens = job.num_prompt_tokens + (0 if job.is_pair else job.num_output_tokens)
        blocks = self.pool.try_allocate(job.digests, num_usable, -(-num_tokens // block_size))
        if blocks is None:
            return False
        job.prompt_blocks = blocks
        job.num_cached_tokens = blocks.num_hits * block_size
        job.num_loaded_tokens = max(job.num_readable_tokens - job.num_cached_tokens, 0)
        job.num_computed_tokens = job.num_cached_tokens + job.num_loaded_tokens
        job.prefill_start_s = self.clock.now
        self._publish(blocks, job.num_computed_tokens // block_size)
        self.listener.admitted(self, job)
        return True

    def _is_being_computed(self, digest: bytes, position: int) -> bool:
        """Whether a running prompt computes this block: waiting avoids computing it twice."""
        return any(len(job.digests) > position and job.digests[position] == digest for job in self._prefilling)

    def _end(self, run_number: int) -> None:
        if run_number != self._run_number:
            return  # the run was cut
        run = self._run
        assert run is not None
        self._is_between_steps = True
        self._num_steps += run.num_steps
        self._kv_tokens += run.num_seqs * run.num_steps
        self.busy_s += run.duration_s(run.num_steps)
        self.num_prefilled_tokens += run.num_steps * run.chunk_tokens
        self.listener.stepped(self, run, (run.num_steps - self._num_reported) * run.chunk_tokens)
        self._note_joined(run)
        self._end_sequences()
        self._advance_prompts(run)
        self._give_room()
        self._is_between_steps = False
        self._start()

    def _note_joined(self, run: Run) -> None:
        for job in self._joined:
            job.second_token_s = run.start_s + run.duration_s(1)
            self.listener.decoding(self, job)
        self._joined.clear()

    def _end_sequences(self) -> None:
        while self._endings and self._endings[0][0] == self._num_steps:
            job = heapq.heappop(self._endings)[-1]
            self._num_decoding -= 1
            self._kv_tokens -= job.num_prompt_tokens + job.num_output_tokens
            blocks = job.decode_blocks or job.prompt_blocks
            assert blocks is not None, f"request {job.request_id} decoded without blocks"
            self._finish(job, blocks)

    def _advance_prompts(self, run: Run) -> None:
        """Count what was computed. Prompts are in the order of their chunks; later prompts had no chunk."""
        jobs = self._prefilling[: len(run.chunks)]
        for job, chunk in zip(jobs, run.chunks, strict=True):
            job.num_computed_tokens += chunk.num_tokens * run.num_steps
            assert job.prompt_blocks is not None, f"request {job.request_id} was computed without blocks"
            self._publish(job.prompt_blocks, job.num_computed_tokens // self.card.block_size)
            if job.num_new_tokens == 0:
                self._prefilling.remove(job)
                self._end_prompt(job, job.prompt_blocks)

    def _end_prompt(self, job: Job, blocks: Allocation) -> None:
        job.first_token_s = self.clock.now
        self.listener.prefilled(self, job)
        if job.num_output_tokens == 1:
            self._finish(job, blocks)
        elif not job.is_pair:
            self._decode(job)

    def _decode(self, job: Job) -> None:
        """Add a sequence with one output token to the batch, from the next step on."""
        self._num_decoding += 1
        self._kv_tokens += job.num_prompt_tokens + 1
        last_step = self._num_steps + job.num_output_tokens - 1
        heapq.heappush(self._endings, (last_step, next(self._ties), job))

    def _finish(self, job: Job, blocks: Allocation) -> None:
        job.end_s = self.clock.now
        self.pool.release(blocks)
        self.listener.finished(self, job)

    def _publish(self, blocks: Allocation, num_full: int) -> None:
        self.pool.publish(blocks, min(num_full, len(blocks.digests)))
        self._tell_cached()

    def _tell_cached(self) -> None:
        stored, removed = self.pool.take_events()
        if stored or removed:
            self.listener.cached(self, stored, removed)

    def _give_room(self) -> None:
        """Reserve blocks for handoffs, in order, as long as there is room."""
        block_size = self.card.block_size
        while self._awaiting_room:
            job = self._awaiting_room[0]
            num_blocks = -(-(job.num_prompt_tokens + job.num_output_tokens) // block_size)
            job.decode_blocks = self.pool.try_allocate(job.digests, job.num_usable_blocks(block_size), num_blocks)
            if job.decode_blocks is None:
                return
            self._awaiting_room.popleft()
            self._tell_cached()
            self.listener.has_room(self, job)
