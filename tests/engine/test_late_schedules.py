"""Random schedules on a device that runs behind its caller.

Requests come and go while blocks are lent to peers that read them at any time, and to peers that write into them.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

from tandem.engine.engine import Engine
from tandem.engine.graphs.capture import MakeRecorder
from tandem.engine.graphs.recorder import make_recorder
from tandem.engine.graphs.step_graph import StepGraph, StepGraphs
from tandem.engine.model_runner import PackedBatch
from tandem.engine.sequence import Phase, Sequence
from tandem.protocol.messages import FinishReason, Fork
from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import make_sampling
from tests.support.answers import Expects
from tests.support.forking import fork_sequence
from tests.support.late_device import LateDevice
from tests.support.recorded_graph import HostGraphRecorder, patch_kernels

pytestmark = [pytest.mark.cluster, pytest.mark.cpu_engine("the late device computes on one")]

NUM_BLOCKS, BLOCK_SIZE, MAX_STEPS = 12, 16, 2000
FOREIGN = -777.0  # what peers write
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 7},
    "with logprobs": {"num_logprobs": 2},
    "with a penalty": {"repetition_penalty": 1.3},
}
Oracle = dict[tuple[tuple[int, ...], str], list[int]]  # by prompt and kind


@dataclass(eq=False)
class Loan:
    """Blocks of the pool that a peer reads (`kv` holds what they must contain) or writes, until a step."""

    blocks: list[int]
    kv: torch.Tensor
    until: int


class LateWorld:
    """One engine, its clients and its peers. What is cached stays from one schedule to the next."""

    def __init__(self, engine: Engine, oracle: Oracle, *, peers_wait: bool = True, **device: Any) -> None:
        self.engine = engine
        self.device = LateDevice(engine, 0, **device)
        self.counts: Counter[str] = Counter()
        self._oracle = oracle
        self._peers_wait = peers_wait
        self._kv_of: dict[bytes, torch.Tensor] = {}  # by digest, when it was first read

    def play_all(self, num_schedules: int) -> None:
        for seed in range(num_schedules):
            try:
                self.play(seed)
            except AssertionError as exc:
                raise AssertionError(f"seed {seed}: {exc}") from exc

    def play(self, seed: int, num_requests: int = 10) -> None:
        """Start this many requests at random moments, and run until all is idle."""
        self._source = random.Random(seed)
        self._asked: list[tuple[list[int], Any]] = []  # blocks granted to a writer, and the mark of the grant
        self._loans: list[Loan] = []
        self._sequences: list[Sequence] = []
        self._expected: list[list[int]] = []
        for self._step in range(MAX_STEPS):
            is_open = len(self._sequences) < num_requests
            if not (is_open or self.engine.has_work or self._asked or self._loans):
                break
            if is_open and self._source.random() < 0.3:
                self._add()
            if self._sequences and self._source.random() < 0.04:
                self._abort(self._source.choice(self._sequences))
            self._peers()
            if is_open or self.engine.has_work:
                self._ask_for_blocks()
            for result in self.engine.step():
                assert not result.failures, result.failures
                self._release_computed([output.sequence for output in result.outputs])
            self.engine.check_integrity()
        else:
            raise AssertionError(f"not idle after {MAX_STEPS} steps")
        self.engine.check_integrity(idle=True)
        for sequence, expected in zip(self._sequences, self._expected, strict=True):
            answer = sequence.output_ids
            is_whole = sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert answer == expected[: None if is_whole else len(answer)], f"{sequence.request_id}: {answer}"
            self.counts[str(sequence.finish_reason)] += 1

    def _add(self) -> None:
        source = self._source
        prompt, kind = source.choice(list(self._oracle))
        phase = source.choice([Phase.WHOLE, Phase.PREFILL_ONLY])
        expected = self._oracle[prompt, kind][: source.choice((1, 3, 40, 40))]
        sampling = make_sampling(max_tokens=len(expected), **KINDS[kind])
        if self.engine.speculator is not None:
            sampling = msgspec.structs.replace(sampling, prediction=tuple(expected))
        if source.random() < 0.3:
            stop = source.choice(expected)
            sampling = msgspec.structs.replace(sampling, stop_token_ids=(stop,))
            expected = expected[: expected.index(stop) + 1]
        name = f"r{len(self._sequences)}"
        forks = [Fork(f"{name}-{fork}", sampling.seed) for fork in range(source.choice((0, 0, 1, 3)))]
        sequence = fork_sequence(self.engine, name, list(prompt), sampling, forks, phase=phase)
        self._sequences += [sequence, *sequence.forks]
        self._expected += [expected] * (1 + len(forks))
        self.counts["forks"] += len(forks)
        self.engine.add(sequence)

    def _abort(self, sequence: Sequence) -> None:
        if self.engine.abort(sequence.request_id):
            self.counts["aborted"] += 1

    def _release_computed(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.phase is Phase.PREFILL_ONLY:
                self._lend(list(sequence.blocks[: sequence.num_published_blocks]), sequence.digests)
                self.engine.scheduler.blocks.release(sequence)

    def _peers(self) -> None:
        """Let peers read and write what they were lent, for a while."""
        kv, pool, source = self.engine.kv, self.engine.pool, self._source
        for loan in [loan for loan in self._loans if loan.until <= self._step]:
            assert torch.equal(kv.read(loan.blocks), loan.kv), f"blocks {loan.blocks} changed while a peer had them"
            pool.release(loan.blocks)
            self._loans.remove(loan)
        for blocks, mark in list(self._asked):
            if self.engine.stream.is_done(mark) or not self._peers_wait:
                self._asked.remove((blocks, mark))
                early = [block for block in blocks if self.device.stream.uses(block)]
                assert not early, f"blocks {early} are overwritten while the device uses them"
                kv.shards[0][blocks] = FOREIGN
                self.counts["written"] += 1
                self._loans.append(Loan(blocks, kv.read(blocks), self._step + source.randint(1, 20)))

    def _ask_for_blocks(self) -> None:
        """Now and then, lend blocks to a peer that writes, and to one that reads."""
        pool, source = self.engine.pool, self._source
        if source.random() < 0.15 and (spare := self.engine.scheduler.admission.num_spare_blocks) > 0:
            blocks = pool.try_allocate(source.randint(1, min(spare, 4))) or []
            self._asked.append((blocks, self.engine.stream.record()))
        if source.random() < 0.2 and (cached := pool.cached_digests()):
            digest = source.choice(cached)
            self._lend(pool.acquire_cached([digest]), [digest], is_ours=True)

    def _lend(self, blocks: list[int], digests: list[bytes], *, is_ours: bool = False) -> None:
        """A peer reads blocks: the KV of one digest is always the same, bit for bit."""
        for block, digest in zip(blocks, digests, strict=False):
            assert not self.device.stream.writes[block], f"block {block} is read before it is computed"
            kv = self.engine.kv.read([block])
            assert torch.equal(kv, self._kv_of.setdefault(digest, kv)), f"block {block} holds other KV"
            self.counts["read"] += 1
        if is_ours:
            self._loans.append(Loan(blocks, self.engine.kv.read(blocks), self._step + self._source.randint(1, 20)))


@pytest.fixture(scope="module")
def oracle(build_engine: BuildEngine) -> Oracle:
    """Answers of an undisturbed engine. Prompts share prefixes."""
    source = random.Random(0)
    shared = [source.choices(range(3, 100), k=n * BLOCK_SIZE) for n in (0, 1, 2, 4)]
    prompts = [tuple(source.choice(shared) + source.choices(range(3, 100), k=source.randint(1, 60))) for _ in range(30)]
    engine = build_engine()
    sequences = {}
    for prompt in prompts:
        for kind, fields in KINDS.items():
            sampling = make_sampling(max_tokens=40, **fields)
            sequence = engine.factory.make_sequence(
                f"{prompt} {kind}", list(prompt), sampling, cache_salt=f"{prompt} {kind}"
            )
            engine.add(sequence)
            sequences[prompt, kind] = sequence
    while engine.has_work:
        engine.step()
    return {key: sequence.output_ids for key, sequence in sequences.items()}


def make_world(
    build_engine: BuildEngine,
    oracle: Oracle,
    make_recorder: MakeRecorder = make_recorder,
    speculate: str = "auto",
    **options: Any,
) -> LateWorld:
    # Small steps: a device is late with those that sample nothing.
    settings: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "max_num_batched_tokens": 16, "max_num_seqs": 6}
    settings["speculate"] = speculate
    engine = build_engine(make_recorder=make_recorder, **settings)
    engine.scheduler.admission.lengths = Expects(1)  # answers get longer: blocks run out
    return LateWorld(engine, oracle, **options)


@pytest.mark.parametrize("num_schedules", [20, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_late_results_change_no_answer(num_schedules: int, build_engine: BuildEngine, oracle: Oracle) -> None:
    world = make_world(build_engine, oracle)
    world.play_all(num_schedules)
    num_late, num_preemptions = world.device.stream.num_late, world.engine.scheduler.num_preemptions
    print(
        f"{num_schedules} schedules: {num_late} late pieces of work, {world.device.num_wrong} tokens chosen again, "
        f"{num_preemptions} preemptions, {dict(world.counts)}"
    )
    assert num_late > 8 * num_schedules
    assert min(world.counts[what] for what in ("read", "written", "aborted")) > num_schedules / 4
    assert num_preemptions > 0


@pytest.mark.parametrize("num_schedules", [6, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("drafts", [False, True], ids=["", "with drafts"])
def test_graphs_change_no_answer_and_no_block(
    num_schedules: int, drafts: bool, build_engine: BuildEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is replayed: none is larger than the largest graph."""
    patch_kernels(monkeypatch)
    recorder = HostGraphRecorder()
    world = make_world(build_engine, oracle, lambda _: recorder, speculate="3" if drafts else "off", drafts=drafts)
    engine = world.engine
    num_steps, last = Counter[str](), {"sequences": 1, "tokens": engine.model.num_layers + 1}  # graphs of a step
    for kind in engine.runner.graphs:
        count_steps(kind, num_steps)
    num_before = sum(graph.num_replays for graph in recorder.graphs)
    world.play_all(num_schedules)
    num_replays = sum(graph.num_replays for graph in recorder.graphs) - num_before
    num_accepted = 0 if engine.speculator is None else engine.speculator.num_accepted
    num_preemptions = engine.scheduler.num_preemptions
    print(
        f"{num_schedules} schedules: {dict(num_steps)} steps of each kind, {num_replays} replays, "
        f"{num_accepted} drafted tokens accepted, {num_preemptions} preemptions, {dict(world.counts)}"
    )
    assert num_replays == sum(num * last[unit] for unit, num in num_steps.items())
    assert min(num_steps["sequences"], num_steps["tokens"]) > 3 * num_schedules
    assert (num_accepted > num_schedules) == drafts
    assert num_preemptions > 0
    assert world.counts["aborted"] > 0


def count_steps(kind: StepGraphs[Any], num_steps: Counter[str]) -> None:
    """Count the steps that find a graph, by its unit."""
    find = kind.find

    def counted(batch: PackedBatch) -> StepGraph | None:
        found = find(batch)
        num_steps[kind.unit] += found is not None
        return found

    kind.find = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("who", ["the engine", "peers"])
def test_impatience_reads_early_or_overwrites(who: str, build_engine: BuildEngine, oracle: Oracle) -> None:
    """The checks above must find what impatience breaks."""
    found: Counter[str] = Counter()
    for seed in range(10):
        try:
            for number in range(20):
                make_world(build_engine, oracle, peers_wait=who != "peers", is_impatient=who == "the engine").play(
                    20 * seed + number
                )
        except AssertionError as exc:
            found["overwritten" if "overwritten" in str(exc) else "read early"] += 1
    print(found)
    assert found == {"read early" if who == "the engine" else "overwritten": 10}


@pytest.mark.parametrize(("phase", "max_tokens", "num_steps"), [(Phase.WHOLE, 3, 3), (Phase.PREFILL_ONLY, 3, 1)])
def test_no_step_after_a_known_end(phase: Phase, max_tokens: int, num_steps: int, build_engine: BuildEngine) -> None:
    engine = build_engine()
    LateDevice(engine, 0, share_wrong=0.0)
    sequence = engine.factory.make_sequence("r", [5, 6, 7], make_sampling(max_tokens=max_tokens), phase=phase)
    engine.add(sequence)
    results = []
    while engine.has_work:
        results += engine.step()
    assert len(results) == num_steps
    assert [output.offset for result in results for output in result.outputs] == list(range(num_steps))


def test_a_penalty_is_waited_for_and_others_are_not(build_engine: BuildEngine) -> None:
    for fields, is_computing in (({}, True), ({"repetition_penalty": 1.2}, False), ({"presence_penalty": 0.5}, False)):
        engine = build_engine()
        LateDevice(engine, 0, share_done=0.0)
        engine.add(engine.factory.make_sequence("r", [5, 6, 7], make_sampling(max_tokens=3, **fields)))
        engine.step()
        assert engine.is_computing == is_computing, fields
        engine.stream.wait(engine.stream.record())
