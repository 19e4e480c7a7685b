"""The engine: one `step()` computes one mixed batch. Requests in, tokens out; ids only, no text, no I/O."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from msgspec import structs
from torch import Tensor

from tandem.engine import pool_memory
from tandem.engine.block_pool import BlockPool
from tandem.engine.device import Mark, make_stream
from tandem.engine.finish_rules import FinishRules
from tandem.engine.graphs.capture import GraphPlan, MakeRecorder, plan_graphs, record_graphs
from tandem.engine.graphs.recorder import make_recorder
from tandem.engine.kv_pool import paged_view
from tandem.engine.model_runner import LateTokens
from tandem.engine.number_tokens import TokenMask
from tandem.engine.sampling.prompt_scoring import LaunchedScores
from tandem.engine.sampling.sampler import LaunchedSample, SampledToken, Sampler
from tandem.engine.scheduler import Scheduler
from tandem.engine.sequence import Phase, ScheduledChunk, Sequence, SequenceStatus
from tandem.engine.sequence_blocks import ComputedBlocks
from tandem.engine.sequence_factory import SequenceFactory
from tandem.engine.speculation.speculator import Speculator
from tandem.engine.step_result import SequenceFailure, SequenceOutput, StepResult, step_stats
from tandem.engine.structured_output import MaskRequest, StructuredOutput
from tandem.engine.tensor_parallel.group import RanksLost
from tandem.engine.tensor_parallel.ranks import make_ranks
from tandem.protocol.config import EngineConfig
from tandem.protocol.digest import namespace_digest
from tandem.protocol.errors import RequestError
from tandem.protocol.fault_boundary import error_of, outcome_of, undone_on_error
from tandem.protocol.messages import (
    FinishReason,
    TokenLogprobs,
    WorkerLoad,
)

logger = logging.getLogger(__name__)

_STEP_TOKENS = 512  # the default without a role's own choice
_SCORED_BYTES = 64 << 20  # float32 logits of the prompt tokens that a step scores
_MIN_SCORED = 16
_MAX_RUN = 64  # tokens that one step gives a sequence: a sampled one, and those that its grammar forces after it
_MAX_LAUNCHED = 2  # steps: one that computes and the next one; more would make new requests wait
_MAX_FAILED_STEPS = 3  # in a row, each failing for every sequence: then the engine is at fault, not the sequences


# Whose tokens are sampled, and its draft: the next one, and one behind each token of the draft. None: its mask is late,
# so the tokens are not used.
_Sampling = tuple[Sequence | None, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A step that the device may still compute, between two marks of its stream."""

    scheduled: list[ScheduledChunk]
    chunks: list[ScheduledChunk]  # without those that could not be computed
    computed: list[ComputedBlocks]
    sampling: list[_Sampling]
    sample: LaunchedSample | None  # their tokens
    scores: LaunchedScores | None
    failures: list[SequenceFailure]
    begin: Mark
    end: Mark
    void: set[Sequence] = field(default_factory=set)  # computed from a token that turned out to be another one


def _nothing() -> None:
    """Default of a step's callbacks."""


class Engine:
    """A model, a block pool and a scheduler. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        kv_codec: str = "raw",
        clock: Callable[[], float] = time.perf_counter,
        make_recorder: MakeRecorder = make_recorder,
    ) -> None:
        """`kv_codec` becomes part of the digests, so that KV from a lossy codec never mixes with exact KV."""
        torch.set_num_threads(_threads_of_a_rank(config))
        self._resources = contextlib.ExitStack()
        self._team = make_ranks(config, torch.get_num_threads())
        self._resources.callback(self._team.close)
        with undone_on_error(self.close):
            self._load(config, kv_codec, clock, make_recorder)

    def _load(
        self, config: EngineConfig, kv_codec: str, clock: Callable[[], float], make_recorder: MakeRecorder
    ) -> None:
        model, backend = self._team.load(config)
        num_tokens = config.max_num_batched_tokens or max(_STEP_TOKENS, config.max_num_seqs)
        config = replace(config, max_num_batched_tokens=num_tokens)
        plan = GraphPlan(0, {})
        if self._team.can_record_graphs:
            plan = plan_graphs(config, model, backend, make_recorder)
        num_allocated = pool_memory.num_blocks(config, model, plan.num_bytes)
        num_blocks = num_allocated - bool(plan.sizes)  # the last one is the scratch block of the graphs
        self.config = replace(config, max_model_len=pool_memory.max_model_len(config, model, num_blocks))
        self.model = model
        self.stream = make_stream(model.device, clock)
        self.pool = BlockPool(num_blocks)
        self.kv = self._team.allocate_pool(config, model, num_allocated)
        self.runner = self._team.make_runner(model, backend, paged_view(self.kv.shards[0]))
        graphs = []
        if plan.sizes and (recorder := make_recorder(model.device)) is not None:
            graphs = record_graphs(self.runner, plan, self.config.max_model_len, recorder)
        self.runner.graphs = graphs
        # Where steps of one token of each sequence are recorded and others are not, they are faster than these.
        self.max_run = _MAX_RUN if not graphs or any(kind.takes_runs for kind in graphs) else 1
        self.scheduler = Scheduler(
            self.pool,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_num_scored=max(_SCORED_BYTES // (4 * model.vocab_size), _MIN_SCORED),
            copy_block=self.kv.copy,
        )
        self.speculator = self._make_speculator()
        self.sampler = Sampler(model.eos_token_ids)
        self.structured_output = StructuredOutput(Path(config.model), model.vocab_size, model.eos_token_ids)
        self._resources.callback(self.structured_output.close)
        self._finish_rules = FinishRules(model.eos_token_ids, self.config.max_model_len)
        self.sequences: dict[str, Sequence] = {}
        self.namespace = namespace_digest(
            model_revision=model.revision,
            kv_dtype=model.kv_type,
            codec=kv_codec,
            block_size=config.block_size,
            attention=model.attention,
            kernels=model.kernels,
        )
        self.factory = SequenceFactory(
            self.structured_output,
            namespace=self.namespace,
            max_model_len=self.config.max_model_len,
            vocab_size=model.vocab_size,
        )
        self._launched: deque[_LaunchedStep] = deque()
        self._num_failed_steps = 0  # in a row

    def _make_speculator(self) -> Speculator | None:
        """None if nothing is drafted: it takes kernels for which no row of a step depends on how many there are."""
        speculate = self.config.speculate
        if speculate == "off" or not self.model.is_exact:
            return None
        return Speculator(
            speculate,
            max_model_len=self.config.max_model_len,
            max_tokens=self.config.max_num_batched_tokens,
            max_rows=self.scheduler.max_num_scored,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.kv.block_bytes

    @property
    def has_work(self) -> bool:
        """Whether a step could compute anything, or has results to come."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._launched)

    @property
    def is_computing(self) -> bool:
        """Whether the device may still compute a step."""
        return bool(self._launched)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence with its forks; from now on the engine owns its blocks."""
        for one in (sequence, *sequence.forks):
            assert one.request_id not in self.sequences, f"request {one.request_id} is already here"
            self.sequences[one.request_id] = one
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its blocks. Returns False if it is unknown or has ended.

        If its forks wait for its prompt, the first one computes it for itself and the others.
        """
        sequence = self.sequences.get(request_id)
        if sequence is None:
            return False
        sequence.finish_reason = FinishReason.ABORT
        forks = sequence.take_forks()
        self._remove(sequence)
        if forks:
            heir, heir.forks = forks[0], forks[1:]
            for fork in heir.forks:
                fork.leader = heir
            heir.status = SequenceStatus.WAITING
            self.scheduler.add(heir)
        return True

    def withdraw(self, sequence: Sequence) -> None:
        """Drop a PREFILL_ONLY sequence with its forks, if it is here. Its blocks are the caller's."""
        if self.sequences.get(sequence.request_id) is sequence:
            for one in (sequence, *sequence.take_forks()):
                self._remove(one, keep_blocks=True)

    def step(
        self, *, before_compute: Callable[[], None] = _nothing, between_layers: Callable[[], None] = _nothing
    ) -> list[StepResult]:
        """Launch the next step, and return the results of the steps that are complete, in order.

        On a CPU that is the step's own result, or nothing if there was nothing to compute. On a GPU it comes from a
        later call, and the next step is launched meanwhile: its input tokens never leave the device. What it computes
        for a sequence that turns out to have ended is dropped. If a sequence's next token depends on the ones before it
        in other ways than through the model (a penalty), its step is waited for.

        `before_compute` is called once when the chunks, and the sequences that were admitted, are known.
        `between_layers` is called in each layer, for work that must not wait for the end of a long step.

        A PREFILL_ONLY sequence leaves with its first token, or fails, but keeps its blocks: the caller releases them by
        `scheduler.blocks.release` when the handoff is over.

        An exception of one sequence ends that sequence and is listed in the failures. The step itself raises only
        errors of the device, and the error with which all sequences of several steps in a row failed.
        """
        self._team.check()
        results = self._take_complete()
        if len(self._launched) < _MAX_LAUNCHED:
            self._launch(before_compute, between_layers)
            results += self._take_complete()
        return results

    def load(self) -> WorkerLoad:
        """The current load: queues and memory."""
        waiting, running = self.scheduler.waiting, self.scheduler.running
        return WorkerLoad(
            num_waiting=len(waiting),
            num_running=len(running),
            num_waiting_tokens=sum(s.num_uncomputed_tokens for s in (*waiting, *running) if not s.is_decoding),
            num_kv_tokens=sum(s.num_computed_tokens for s in running),
            num_free_blocks=self.pool.num_available,
            pool_slots=self.scheduler.pool_slots,
            num_free_seats=max(self.scheduler.admission.num_free_seats, 0),
            num_waiting_for_room=self.scheduler.num_waiting_for_room,
            num_preemptions=self.scheduler.num_preemptions,
            num_drafted_tokens=0 if self.speculator is None else self.speculator.num_drafted,
            num_accepted_tokens=0 if self.speculator is None else self.speculator.num_accepted,
        )

    def close(self) -> None:
        """End the engine's threads, and the processes of other ranks, if there are any. Closing twice is fine."""
        self._resources.close()

    def check_integrity(self, *, idle: bool = False) -> None:
        """Raise AssertionError unless pool and sequences agree; with `idle`, also if any block or sequence is left."""
        self.pool.check_integrity(idle=idle)
        queued = [*self.scheduler.waiting, *self.scheduler.running]
        expected = {name for name, s in self.sequences.items() if s.status is not SequenceStatus.FORKING}
        assert {s.request_id for s in queued} == expected, "a sequence is lost or left behind"
        forks = {fork.request_id for s in queued for fork in s.forks}
        assert forks <= self.sequences.keys() - expected, f"forks were left behind: {sorted(forks)}"
        if idle:
            assert not self.sequences, f"{len(self.sequences)} sequences are still queued"
            assert not self._launched, f"{len(self._launched)} steps are still computed"

    def _launch(self, before_compute: Callable[[], None], between_layers: Callable[[], None]) -> None:
        """Schedule a step, launch it, and count its tokens as computed: later work of the stream sees their KV."""
        begin = self.stream.record()
        self._begin_costly_masks()
        scheduled = self.scheduler.schedule()
        if not scheduled:
            return
        before_compute()
        scheduled = self._with_drafts(scheduled)
        self._begin_masks(scheduled)
        chunks, logits, failures = self._compute(scheduled, between_layers)
        sampling = {chunk.sequence: chunk.draft for chunk in chunks if chunk.samples}
        used: list[_Sampling] = []
        sample = scores = None
        if logits is not None and any(chunk.num_scored for chunk in chunks):
            scores, logits = self.sampler.score(logits, chunks)
        if logits is not None and sampling:
            masks, late = self._take_masks(list(sampling))
            for sequence in late:
                if sampling[sequence]:  # the draft is computed for nothing
                    self.scheduler.blocks.keep_needed(sequence)
            if late:
                chunks = [one for chunk in chunks if (one := _without_late_token(chunk, late)) is not None]
            sampling, rows = _with_forks(sampling, masks)
            plans = self.sampler.plan(list(sampling), logits.shape[1], masks, sampling)
            sample = self.sampler.launch(logits, plans, rows)
            used += sampling.items()
            if late:
                used = [(None if one in late or one.leader in late else one, draft) for one, draft in sampling.items()]
        end = self.stream.record()
        if any(draft or sequence.sampling.depends_on_output for sequence, draft in sampling.items()):
            self.stream.wait(end)
        computed = self._count_computed(chunks, failures)
        self._launched.append(_LaunchedStep(scheduled, chunks, computed, used, sample, scores, failures, begin, end))

    def _count_computed(self, chunks: list[ScheduledChunk], failures: list[SequenceFailure]) -> list[ComputedBlocks]:
        """Count the tokens of chunks that are launched. Returns what is to be published once they are complete."""
        computed = []
        for chunk in chunks:
            sequence, blocks = chunk.sequence, outcome_of(self.scheduler.blocks.advance, chunk)
            if isinstance(blocks, Exception):  # the other sequences go on
                failures += self._give_up(sequence, blocks)
                continue
            if blocks is not None:
                computed.append(blocks)
            if sequence.prompt_scores is not None:
                sequence.prompt_scores.num_launched += chunk.num_scored
            if chunk.samples:
                self._add_pending_token(sequence)
                if sequence.forks:
                    for fork in sequence.forks:
                        self._add_pending_token(fork)
                    self.scheduler.fork(sequence)
        return computed

    def _with_drafts(self, chunks: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """The chunks with drafts, as far as the pool has room for their KV now."""
        if self.speculator is None:
            return chunks
        drafted = []
        for chunk in self.speculator.add_drafts(chunks):
            if chunk.sequence.forks:
                chunk = structs.replace(chunk, draft=())
            elif chunk.draft:
                num = self.scheduler.blocks.make_room(chunk.sequence, len(chunk.draft))
                chunk = structs.replace(chunk, draft=chunk.draft[:num])
            drafted.append(chunk)
        return drafted

    def _begin_costly_masks(self) -> None:
        """Begin masks whose sequences wait for them, within the budget if it protects other sequences."""
        running = self.scheduler.running
        costly = {s.matcher: s.unmatched_ids for s in running if s.matcher is not None and s.matcher.is_costly}
        if costly:
            waiting = [(matcher, ids) for matcher, ids in costly.items() if matcher.pending is None]
            num_queued = len(running) + len(self.scheduler.waiting)
            self.structured_output.begin_costly_masks(waiting, is_limited=len(costly) < num_queued)

    def _begin_masks(self, chunks: list[ScheduledChunk]) -> None:
        """Begin to compute the tokens that the grammars of a step's sequences allow."""
        self.structured_output.begin_masks(
            [
                MaskRequest(chunk.sequence.matcher, chunk.sequence.unmatched_ids, chunk.draft)
                for chunk in chunks
                if chunk.samples and chunk.sequence.matcher is not None
            ]
        )

    def _take_masks(
        self, sampling: list[Sequence]
    ) -> tuple[dict[Sequence, list[TokenMask] | Exception], set[Sequence]]:
        """The tokens that the grammars of these sequences allow, and the sequences for which they are not known yet."""
        matchers = {sequence: sequence.matcher for sequence in sampling if sequence.matcher is not None}
        if not matchers:
            return {}, set()
        self.structured_output.wait_masks(list(matchers.values()))
        masks: dict[Sequence, list[TokenMask] | Exception] = {}
        late = set[Sequence]()
        for sequence, matcher in matchers.items():
            if (mask := matcher.take_mask()) is None:
                late.add(sequence)
            else:
                masks[sequence] = mask if isinstance(mask, Exception) else [mask, *matcher.draft_masks]
        return masks, late

    def _take_complete(self) -> list[StepResult]:
        """The results of the launched steps that are complete."""
        results = []
        while self._launched and self.stream.is_done(self._launched[0].end):
            results.append(self._conclude(self._launched.popleft()))
        return results

    def _conclude(self, step: _LaunchedStep) -> StepResult:
        """Publish the step's blocks and append its tokens."""
        outputs: list[SequenceOutput] = []
        failures = step.failures
        for computed in step.computed:
            if computed.sequence in step.void:
                continue
            if (error := error_of(self.scheduler.blocks.publish, computed)) is not None:
                failures += self._give_up(computed.sequence, error)
        if step.scores is not None:
            failures += self._take_scores(step.scores)
        tokens, end = [] if step.sample is None else step.sample.read(), 0
        for sequence, draft in step.sampling:
            first, end = end, end + 1 + len(draft)
            if sequence is None or sequence in step.void or self.sequences.get(sequence.request_id) is not sequence:
                continue
            outcome: list[SampledToken] | Exception | None = _right_tokens(tokens[first:end], draft)
            if isinstance(outcome, list):
                outcome = outcome_of(self._take_tokens, sequence, draft, outcome, outputs)
            if outcome is not None:
                failures += self._give_up(sequence, outcome)
        stats = step_stats(step.scheduled, self.stream.seconds_between(step.begin, step.end))
        if self.speculator is not None:
            self.speculator.note_step(step.scheduled, stats.duration_s)
        chunks = [chunk for chunk in step.chunks if chunk.sequence not in step.void] if step.void else step.chunks
        return StepResult(chunks, outputs, stats, failures)

    def _take_scores(self, scores: LaunchedScores) -> list[SequenceFailure]:
        """Keep the scores of the sequences that are still here. Returns those whose scoring raised."""
        failures: list[SequenceFailure] = []
        for sequence, piece in scores.read():
            if self.sequences.get(sequence.request_id) is not sequence or sequence.prompt_scores is None:
                continue
            if isinstance(piece, Exception):
                failures += self._give_up(sequence, piece)
            else:
                sequence.prompt_scores.pieces.append(piece)
        return failures

    def _compute(
        self, chunks: list[ScheduledChunk], between_layers: Callable[[], None]
    ) -> tuple[list[ScheduledChunk], Tensor | None, list[SequenceFailure]]:
        """Run the chunks: (computed chunks, logits of those that sample, sequences that could not be computed).

        A step that raises is run again chunk by chunk to find the failing sequences. That is safe: a chunk's KV is
        written to the same slots, and its result does not depend on the others.
        """
        logits = self._try_run(chunks, between_layers)
        if not isinstance(logits, Exception):
            self._num_failed_steps = 0
            return chunks, logits, []
        logger.error("a step of %d sequences failed; each is now computed alone", len(chunks), exc_info=logits)
        computed, rows, failures = [], [], list[SequenceFailure]()
        for chunk in chunks:
            row = self._try_run([chunk], between_layers)
            if isinstance(row, Exception):
                failures += self._give_up(chunk.sequence, row)
                continue
            computed.append(chunk)
            if row is not None:
                rows.append(row)
        self._num_failed_steps = 0 if computed else self._num_failed_steps + 1
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            raise logits
        return computed, torch.cat(rows) if rows else None, failures

    def _try_run(self, chunks: list[ScheduledChunk], between_layers: Callable[[], None]) -> Tensor | Exception | None:
        """Run the chunks: logits of those that sample, or the exception. Raises errors of the device and lost ranks."""
        logits = outcome_of(self.runner.run, chunks, between_layers, self._late_tokens())
        if isinstance(logits, torch.AcceleratorError | RanksLost):
            raise logits
        return logits

    def _give_up(self, sequence: Sequence, error: Exception) -> list[SequenceFailure]:
        """End a sequence that raised, and the forks that wait for its prompt.

        A PREFILL_ONLY one keeps its blocks, as when it leaves with its first token.
        """
        if isinstance(error, RequestError):
            logger.warning("request %s cannot go on: %s", sequence.request_id, error.log_text)
        else:
            logger.error("request %s failed", sequence.request_id, exc_info=error)
        ended = [sequence, *sequence.take_forks()]
        for one in ended:
            one.finish_reason = FinishReason.ABORT
            self._remove(one, keep_blocks=sequence.phase is Phase.PREFILL_ONLY)
        return [SequenceFailure(one, error) for one in ended]

    def _add_pending_token(self, sequence: Sequence) -> None:
        is_last = not sequence.decodes_here or self._finish_rules.is_full(sequence, len(sequence.token_ids))
        sequence.add_pending_token(is_last=is_last)

    def _late_tokens(self) -> LateTokens | None:
        """The tokens of the step before, if they are not read yet."""
        if not self._launched or (sample := self._launched[-1].sample) is None:
            return None
        rows, end = dict[Sequence, int](), 0
        for sequence, draft in self._launched[-1].sampling:
            if sequence is not None:
                rows[sequence] = end
            end += 1 + len(draft)
        return LateTokens(sample.token_ids, rows)

    def _take_tokens(
        self, sequence: Sequence, draft: tuple[int, ...], tokens: list[SampledToken], outputs: list[SequenceOutput]
    ) -> None:
        """Note sampled tokens, all but the last as drafted, until one ends the sequence."""
        sampled, first = tokens[0], len(outputs)
        position = sequence.set_pending_token(sampled.token_id)
        outputs.append(self._note_token(sequence, position, sampled.logprobs))
        for sampled in tokens[1:]:
            if sequence.finish_reason is not None:
                break
            sequence.token_ids.append(sampled.token_id)
            outputs.append(self._note_token(sequence, len(sequence.token_ids) - 1, sampled.logprobs))
        if draft:
            outputs[first] = self._note_draft(sequence, draft, outputs[first:])
        self._go_on(sequence, position, sampled, outputs)
        if draft:
            self.scheduler.blocks.keep_needed(sequence)

    def _note_draft(self, sequence: Sequence, draft: tuple[int, ...], outputs: list[SequenceOutput]) -> SequenceOutput:
        """Keep what was computed of the tokens that came. Returns the first output with the prediction's tokens."""
        num_right = sum(output.token_id == token for output, token in zip(outputs, draft, strict=False))
        # The KV of a token that ends its sequence is not kept: no step would have computed it.
        self.scheduler.blocks.accept(sequence, len(outputs) - 1)
        assert self.speculator is not None, "nobody drafts"
        self.speculator.note_draft(len(draft), num_right)
        if sequence.drafts is None or not sequence.drafts.is_predicted:
            return outputs[0]
        return structs.replace(outputs[0], num_accepted_tokens=num_right, num_rejected_tokens=len(draft) - num_right)

    def _go_on(self, sequence: Sequence, position: int, sampled: SampledToken, outputs: list[SequenceOutput]) -> None:
        """Note what a grammar forces behind the tokens from `position` on; the sequence ends or goes on."""
        while (
            sequence.matcher is not None
            and len(sequence.token_ids) - position < self.max_run
            and (forced := self._finish_rules.forced_token(sequence)) is not None
        ):
            sequence.token_ids.append(forced)
            outputs.append(self._note_token(sequence, len(sequence.token_ids) - 1, None))
        if sequence.finish_reason is not None or not sequence.decodes_here:
            self._remove(sequence, keep_blocks=not sequence.decodes_here)
        elif not sampled.is_on_device:  # later steps computed with the existing one
            sequence.drop_pending_tokens()
            for step in self._launched:
                step.void.add(sequence)

    def _note_token(self, sequence: Sequence, position: int, logprobs: TokenLogprobs | None) -> SequenceOutput:
        """Whether a sequence ends with the token at this position."""
        token_id = sequence.token_ids[position]
        is_stop, offset = self._finish_rules.is_stop_token(sequence, token_id), position - sequence.num_prompt_tokens
        reason = FinishReason.STOP if is_stop else self._finish_rules.finish_reason(sequence, position)
        sequence.finish_reason = reason
        return SequenceOutput(sequence, offset, token_id, logprobs, reason, token_id if is_stop else None)

    def _remove(self, sequence: Sequence, *, keep_blocks: bool = False) -> None:
        """Take a sequence out for good. Steps that still compute it go on: later work of the stream follows them."""
        self.sequences.pop(sequence.request_id, None)
        sequence.drop_pending_tokens()
        if sequence.leader is not None:
            sequence.leader.forks.remove(sequence)
            sequence.leader = None
        if self.speculator is not None and sequence.finish_reason is not FinishReason.ABORT:
            self.speculator.note_end(sequence)
        self.scheduler.remove(sequence, keep_blocks=keep_blocks)


def _threads_of_a_rank(config: EngineConfig) -> int:
    return max((config.num_threads or torch.get_num_threads()) // config.tensor_parallel_size, 1)


def _right_tokens(tokens: list[SampledToken | Exception], draft: tuple[int, ...]) -> list[SampledToken] | Exception:
    """The sampled tokens up to the first that differs from the draft, itself included.

    An exception behind a draft is left to the step in which the draft has come: it may not come at all.
    """
    if isinstance(tokens[0], Exception):
        return tokens[0]
    right = [tokens[0]]
    for drafted, sampled in zip(draft, tokens[1:], strict=True):
        if right[-1].token_id != drafted or isinstance(sampled, Exception):
            break
        right.append(sampled)
    return right


def _with_forks(
    drafts: dict[Sequence, tuple[int, ...]], masks: dict[Sequence, list[TokenMask] | Exception]
) -> tuple[dict[Sequence, tuple[int, ...]], list[int] | None]:
    """The sequences and their forks with their drafts, and the row of logits of each token; None = all have their own.

    Forks get the mask of their sequence: none of them has any output yet, nor a draft.
    """
    if not any(sequence.forks for sequence in drafts):
        return drafts, None
    sampling, rows, row = dict[Sequence, tuple[int, ...]](), list[int](), 0
    for sequence, draft in drafts.items():
        for one in (sequence, *sequence.forks):
            sampling[one] = draft
            rows += range(row, row + 1 + len(draft))
            if one.leader in masks:
                masks[one] = masks[one.leader]
        row += 1 + len(draft)
    return sampling, rows


def _without_late_token(chunk: ScheduledChunk, late: set[Sequence]) -> ScheduledChunk | None:
    """The chunk as computed. Without its mask a sequence's last token does not count: it is computed again with it."""
    if chunk.sequence not in late:
        return chunk
    if chunk.num_tokens == 1:
        return None
    return structs.replace(chunk, num_tokens=chunk.num_tokens - 1, samples=False, draft=())
