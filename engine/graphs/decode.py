"""Steps in which every sequence computes one token, as graphs of the next batch size.

A launch copies the step into the graph's buffers, replays the graph, and copies the logits out. All of it is in the
order of the device's stream, so the next step may be launched while this one computes. Rows that only fill the batch
write into a scratch block, which the block pool never gives out, and attend to themselves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from tandem.engine.attention.context import StepContext
from tandem.engine.device import to_pinned
from tandem.engine.graphs.recorder import DeviceGraph, GraphRecorder
from tandem.engine.model_runner import DeviceBatch, ModelRunner, PackedBatch

Launch = Callable[[DeviceBatch], Tensor | None]  # of a batch; its logits


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes to record, ascending: few rows are wasted, and small batches waste none."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs + 1, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class DecodeGraph:
    """One batch size: its input buffers, and the graph that computes with them."""

    def __init__(self, batch: DeviceBatch, inputs: Tensor, logits: Tensor) -> None:
        """`inputs` [3, size] are ids, positions and slots, of which `batch` has views; `logits`: [size, vocab]."""
        self.size = inputs.shape[1]
        self.batch = batch
        self._inputs = inputs
        self._logits = logits
        self._graph: DeviceGraph | None = None

    def record(self, recorder: GraphRecorder, launch: Launch) -> None:
        """Record the step. Raises NotRecordable."""
        self._graph = recorder.record(lambda: self.compute(launch))

    @torch.inference_mode()
    def compute(self, launch: Launch) -> Tensor:
        """Compute the batch in the buffers, which is what the graph repeats. Returns the buffer of the logits."""
        self.batch.context.kv_lens.copy_(self.batch.positions[0] + 1)
        logits = launch(self.batch)
        assert logits is not None, "every row samples"
        return self._logits.copy_(logits)

    @torch.inference_mode()
    def load(self, batch: PackedBatch) -> DeviceBatch:
        """Copy a step of at most `size` rows into the buffers, and fill them up. Returns the buffers.

        The host's arrays are new ones for each step, and torch reuses pinned memory once the device has read it.
        """
        pool, tables = self.batch.context.pool, self.batch.context.block_tables
        scratch_block = pool.shape[0] - 1
        num_rows, num_blocks = batch.block_tables.shape
        inputs = np.zeros((3, self.size), dtype=np.int64)
        inputs[2] = scratch_block * pool.shape[3]
        inputs[:, :num_rows] = batch.input_ids, batch.positions, batch.slot_mapping
        rows = np.full((self.size, num_blocks), scratch_block, dtype=np.int32)
        rows[:num_rows] = batch.block_tables
        self._inputs.copy_(to_pinned(inputs, pool.device), non_blocking=True)
        tables[:, :num_blocks].copy_(to_pinned(rows, pool.device), non_blocking=True)
        return self.batch

    @torch.inference_mode()
    def replay(self, num_rows: int) -> Tensor:
        """Launch the graph. Returns the logits [num_rows, vocab] in memory of their own."""
        assert self._graph is not None, "nothing was recorded"
        self._graph.replay()
        return self._logits[:num_rows].clone()  # the sampler may look at them again after the next replay


class DecodeGraphs:
    """The graphs of some batch sizes, which share the buffers of block tables and logits."""

    def __init__(self, runner: ModelRunner, sizes: list[int], max_model_len: int) -> None:
        """Make the buffers. `sizes` ascend. The last block of the runner's pool is the scratch block."""
        pool = runner.pool
        max_blocks = -(-max_model_len // pool.shape[3])
        tables = torch.full((sizes[-1], max_blocks), pool.shape[0] - 1, dtype=torch.int32, device=pool.device)
        inputs = [_scratch_inputs(size, pool) for size in sizes]
        batches = [_make_batch(one, pool, tables, max_model_len) for one in inputs]
        sample = runner.compute(batches[-1])  # only the model knows their type and number
        assert sample is not None, "every row samples"
        logits = torch.empty_like(sample)
        self._sizes = sizes
        self._graphs = [
            DecodeGraph(batch, one, logits[: batch.positions.shape[1]])
            for batch, one in zip(batches, inputs, strict=True)
        ]

    def __reversed__(self) -> Iterator[DecodeGraph]:
        """Largest first."""
        return reversed(self._graphs)

    def find(self, batch: PackedBatch) -> DecodeGraph | None:
        """The graph for a step; None if a sequence computes several tokens or does not sample."""
        num_rows = len(batch.kv_lens)
        if len(batch.input_ids) != num_rows or len(batch.logit_rows) != num_rows or num_rows > self._sizes[-1]:
            return None
        return self._graphs[bisect_left(self._sizes, num_rows)]


def _scratch_inputs(size: int, pool: Tensor) -> Tensor:
    """Ids, positions and slots of a batch that has no rows yet."""
    inputs = torch.zeros(3, size, dtype=torch.int64, device=pool.device)
    inputs[2] = (pool.shape[0] - 1) * pool.shape[3]
    return inputs


def _make_batch(inputs: Tensor, pool: Tensor, block_tables: Tensor, max_model_len: int) -> DeviceBatch:
    size = inputs.shape[1]
    context = StepContext(
        pool=pool,
        block_tables=block_tables[:size],
        query_starts=torch.arange(size + 1, dtype=torch.int32, device=pool.device),
        kv_lens=torch.ones(size, dtype=torch.int32, device=pool.device),
        slot_mapping=inputs[2],
        max_query_len=1,
        max_kv_len=max_model_len,  # bounds for every later step
    )
    return DeviceBatch(inputs[0:1], inputs[1:2], torch.arange(size, device=pool.device), context)
