"""A device that runs behind its caller, as a GPU does: until its work is done, the memory that it writes is garbage.

Work is done in the order in which it was launched. How much of it is done when somebody asks is drawn from a seed.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from typing_extensions import override

from tandem.engine.device import DeviceStream, Mark
from tandem.engine.engine import Engine
from tandem.engine.kv_pool import paged_view
from tandem.engine.model_runner import LateTokens
from tandem.engine.prompt_scores import ScorePiece
from tandem.engine.sampling.prompt_scoring import LaunchedScores
from tandem.engine.sampling.sampler import LaunchedSample, SampledToken, SamplePlan
from tandem.engine.sequence import ScheduledChunk
from tandem.engine.sequence import Sequence as EngineSequence
from tandem.kv_transfer.codec import Codec
from tandem.kv_transfer.transport.in_process import InProcessTransport, InProcessWrite

GARBAGE = 12345.0


class _Work(NamedTuple):
    run: Callable[[], object]
    reads: Sequence[int]  # blocks
    writes: Sequence[int]


class LateStream(DeviceStream):
    """A mark is the number of pieces of work before it. An impatient stream calls everything done at once."""

    def __init__(self, seed: int, *, share_done: float = 0.3, is_impatient: bool = False) -> None:
        """`share_done`: how often a question finds one more piece of work done."""
        self.num_late = 0  # pieces of work that were not done when their call returned
        self.writes: Counter[int] = Counter()  # blocks that pending work writes
        self.reads: Counter[int] = Counter()  # and reads
        self.is_impatient = is_impatient
        self._share_done = share_done
        self._source = random.Random(seed)
        self._pending: deque[_Work] = deque()
        self._num_launched = 0

    def launch(self, run: Callable[[], object], *, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> None:
        """Do this later, behind all work launched before it."""
        work = _Work(run, list(reads), list(writes))
        self.reads.update(work.reads)
        self.writes.update(work.writes)
        self._pending.append(work)
        self._num_launched += 1
        self.num_late += 1

    def flush(self) -> None:
        """Do all that is pending."""
        while self._pending:
            self._do_one()

    def uses(self, block: int) -> bool:
        """Whether pending work reads or writes this block."""
        return bool(self.reads[block] or self.writes[block])

    def record(self) -> Mark:
        return self._num_launched

    def is_done(self, mark: Mark) -> bool:
        if self._pending and self._source.random() < self._share_done:
            self._do_one()
        return self.is_impatient or self._num_done >= mark

    def wait(self, mark: Mark) -> None:
        while not self.is_impatient and self._num_done < mark:
            self._do_one()

    def seconds_between(self, first: Mark, last: Mark) -> float:
        return 1e-3 * float(last - first)

    @property
    def _num_done(self) -> int:
        return self._num_launched - len(self._pending)

    def _do_one(self) -> None:
        work = self._pending.popleft()
        work.run()
        self.reads.subtract(work.reads)
        self.writes.subtract(work.writes)


class LateSample(LaunchedSample):
    """Tokens that come late. Now and then the device has another one than the host chooses in the end."""

    def __init__(self, num_rows: int, stream: LateStream) -> None:
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64)
        self._stream = stream
        self._tokens: list[SampledToken | Exception] | None = None

    def arrive(self, tokens: list[SampledToken | Exception], wrong_rows: set[int]) -> None:
        for row, token in enumerate(tokens):
            if isinstance(token, SampledToken):
                is_right = row not in wrong_rows
                self.token_ids[row] = token.token_id if is_right else token.token_id ^ 1
                tokens[row] = msgspec.structs.replace(token, is_on_device=is_right)
        self._tokens = tokens

    @override
    def read(self) -> list[SampledToken | Exception]:
        if self._stream.is_impatient:
            self._stream.flush()
        assert self._tokens is not None, "tokens are read before they are sampled"
        return self._tokens


class LateScores(LaunchedScores):
    """Scores that come late."""

    def __init__(self, stream: LateStream) -> None:
        self._stream = stream
        self._pieces: list[tuple[EngineSequence, ScorePiece | Exception]] | None = None

    def arrive(self, pieces: list[tuple[EngineSequence, ScorePiece | Exception]]) -> None:
        self._pieces = pieces

    @override
    def read(self) -> list[tuple[EngineSequence, ScorePiece | Exception]]:
        if self._stream.is_impatient:
            self._stream.flush()
        assert self._pieces is not None, "scores are read before they are computed"
        return self._pieces


class LateDevice:
    """Makes an engine compute and sample on a late stream."""

    def __init__(
        self,
        engine: Engine,
        seed: int,
        *,
        share_done: float = 0.3,
        share_wrong: float = 0.05,
        is_impatient: bool = False,
        drafts: bool = False,
    ) -> None:
        """`share_wrong`: of the tokens that later steps find on the device, how many are not the final ones.

        `drafts`: let the engine draft, if it does: steps with drafts are waited for.
        """
        self.stream = engine.stream = LateStream(seed, share_done=share_done, is_impatient=is_impatient)
        if not drafts:
            engine.speculator = None
        self.num_wrong = 0
        self._share_wrong, self._source = share_wrong, random.Random(seed)
        self._engine = engine
        self._run, self._sampler = engine.runner.run, engine.sampler
        engine.scheduler.blocks._copy_block = self._copy_late
        engine.runner.run = self._run_late  # type: ignore[method-assign]
        engine.sampler = SimpleNamespace(  # type: ignore[assignment]
            plan=self._sampler.plan, launch=self._sample_late, score=self._score_late
        )

    def make_late(self, codec: Codec) -> None:
        """Make this codec move its bytes late."""
        scatter, gather = codec.scatter, codec.gather

        def scatter_late(source: Tensor, shards: Sequence[Tensor], blocks: Tensor) -> None:
            written = blocks.tolist()
            for shard in shards:
                shard[[block for block in written if not self.stream.uses(block)]] = GARBAGE
            self.stream.launch(lambda: scatter(source, shards, blocks), writes=written)

        def gather_late(shards: Sequence[Tensor], blocks: Tensor, out: Tensor) -> None:
            out.fill_(255)
            self.stream.launch(lambda: gather(shards, blocks, out), reads=blocks.tolist())

        codec.scatter, codec.gather = scatter_late, gather_late  # type: ignore[method-assign,assignment]

    def _run_late(
        self,
        chunks: list[ScheduledChunk],
        between_layers: Callable[[], None] = lambda: None,
        late_tokens: LateTokens | None = None,
    ) -> Tensor | None:
        between_layers()
        runner, batch = self._engine.runner, self._engine.runner.pack(chunks, late_tokens)
        size, reads, writes = self._engine.config.block_size, set[int](), set[int]()
        for chunk in chunks:
            end = -(-(chunk.start + chunk.num_rows) // size)
            reads.update(chunk.sequence.blocks[:end])
            writes.update(chunk.sequence.blocks[chunk.start // size : end])
        self._spoil(batch.slot_mapping.tolist())
        if not len(batch.logit_rows):
            self.stream.launch(lambda: runner.forward(batch), reads=reads, writes=writes)
            return None
        logits = torch.full((len(batch.logit_rows), self._engine.model.vocab_size), torch.nan)

        def compute() -> None:
            computed = runner.forward(batch)
            assert computed is not None
            logits.copy_(computed)

        self.stream.launch(compute, reads=reads, writes=writes)
        return logits

    def _copy_late(self, source: int, target: int) -> None:
        kv, size = self._engine.kv, self._engine.config.block_size
        self._spoil(list(range(target * size, (target + 1) * size)))
        self.stream.launch(lambda: kv.copy(source, target), reads=[source], writes=[target])

    def _sample_late(
        self, logits: Tensor, plans: Sequence[SamplePlan], rows: list[int] | None = None
    ) -> LaunchedSample:
        sample = LateSample(len(plans), self.stream)
        wrong_rows = {row for row in range(len(plans)) if self._source.random() < self._share_wrong}
        self.num_wrong += len(wrong_rows)
        self.stream.launch(lambda: sample.arrive(self._sampler.launch(logits, plans, rows).read(), wrong_rows))
        return sample

    def _score_late(self, logits: Tensor, chunks: list[ScheduledChunk]) -> tuple[LaunchedScores, Tensor]:
        scores = LateScores(self.stream)
        sampled = torch.full((sum(chunk.samples for chunk in chunks), logits.shape[1]), torch.nan)

        def score() -> None:
            computed, rows = self._sampler.score(logits, chunks)
            sampled.copy_(rows)
            scores.arrive(computed.read())

        self.stream.launch(score)
        return scores, sampled

    def _spoil(self, slots: list[int]) -> None:
        """Fill token slots with garbage, except in blocks that earlier work still needs as they are."""
        kv, size = self._engine.kv, self._engine.config.block_size
        free = torch.tensor([slot for slot in slots if not self.stream.uses(slot // size)], dtype=torch.long)
        paged_view(kv.shards[0])[free // size, :, :, free % size] = GARBAGE


def touched_early(
    write: InProcessWrite, device_of: Callable[[InProcessTransport], LateDevice | None], *, is_stray: bool = False
) -> str:
    """A complaint if a write (or read) between workers reads what a device still writes, or writes what it still uses.

    "" if it is in order. A stray is a part of a lost write: it may carry anything, because nobody will use it.
    """
    ours, theirs = write.local_block_ids, write.remote_block_ids
    source, read, target, written = write.sender, ours, write.receiver, theirs
    if write.is_read:
        source, read, target, written = write.receiver, theirs, write.sender, ours
    if not is_stray and (device := device_of(source)) is not None:
        if early := [block for block in read if device.stream.writes[block]]:
            return f"blocks {early} of {source.worker_id} are read before they are computed"
        if (source.shards[0][read] == GARBAGE).any():
            return f"garbage is read from {source.worker_id}"
    if (device := device_of(target)) is not None and (early := [b for b in written if device.stream.uses(b)]):
        return f"blocks {early} of {target.worker_id} are overwritten while its device uses them"
    return ""
