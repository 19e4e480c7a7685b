"""Steps in which every sequence computes one token, as graphs of the next batch size.

A launch copies the step into the graph's buffers, replays the graph, and copies the logits out. All of it is in the
order of the device's stream, so the next step may be launched while this one computes. Rows that only fill the batch
write into a scratch block, which the block pool never gives out, and attend to themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tandem.engine.graphs.recorder import DeviceGraph, GraphRecorder
from tandem.engine.graphs.step_graph import StepGraph, StepGraphs, fill
from tandem.engine.model_runner import DeviceBatch, ModelRunner, PackedBatch


def batch_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes to record, ascending: few rows are wasted, and small batches waste none."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs + 1, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class DecodeGraph(StepGraph):
    """One batch size, as one graph."""

    logits: Tensor  # [size, vocab]: the buffer that the graph writes
    _graph: DeviceGraph

    @override
    @torch.inference_mode()
    def record(self, recorder: GraphRecorder) -> int:
        [self._graph] = recorder.record(lambda: self.logits.copy_(self.compute(self.batch)))
        return 1

    @override
    @torch.inference_mode()
    def compute(self, loaded: DeviceBatch) -> Tensor:
        self.batch.context.kv_lens.copy_(self.batch.positions[0] + 1)
        logits = self.runner.compute(self.batch)
        assert logits is not None, "every row samples"
        return logits

    @override
    @torch.inference_mode()
    def load(self, batch: PackedBatch) -> DeviceBatch:
        scratch_block = self.runner.pool.shape[0] - 1
        num_rows, num_blocks = batch.block_tables.shape
        inputs = np.zeros((3, self.size), dtype=np.int64)
        inputs[2] = scratch_block * self.runner.pool.shape[3]
        inputs[:, :num_rows] = batch.input_ids, batch.positions, batch.slot_mapping
        rows = np.full((self.size, num_blocks), scratch_block, dtype=np.int32)
        rows[:num_rows] = batch.block_tables
        fill(self.inputs, inputs)
        fill(self.batch.context.block_tables[:, :num_blocks], rows)
        assert self.batch.logit_rows is not None
        return self.batch._replace(logit_rows=self.batch.logit_rows[:num_rows])

    @override
    @torch.inference_mode()
    def replay(self, loaded: DeviceBatch, between_layers: Callable[[], None]) -> Tensor:
        assert loaded.logit_rows is not None
        between_layers()
        self._graph.replay()
        return self.logits[: len(loaded.logit_rows)].clone()  # the sampler may look at them after the next replay


class DecodeGraphs(StepGraphs[DecodeGraph]):
    """The graphs of some batch sizes, which share the buffers of block tables and logits."""

    work = "decodes"
    unit = "sequences"
    takes_runs = False

    def __init__(self, runner: ModelRunner, sizes: list[int], max_model_len: int) -> None:
        """Make the buffers. `sizes` ascend. The last block of the runner's pool is the scratch block."""
        pool = runner.pool
        shape = (sizes[-1], -(-max_model_len // pool.shape[3]))
        tables = torch.full(shape, pool.shape[0] - 1, dtype=torch.int32, device=pool.device)
        graphs = [DecodeGraph(runner, size, tables[:size], max_model_len) for size in sizes]
        logits = torch.empty_like(graphs[-1].compute(graphs[-1].batch))  # only the model knows their type and number
        for graph in graphs:
            graph.logits = logits[: graph.size]
        super().__init__(graphs)

    @override
    def query_lens(self, size: int) -> list[int]:
        return [1] * size

    @override
    def takes(self, batch: PackedBatch) -> bool:
        """Whether each sequence computes one token and samples."""
        return len(batch.input_ids) == len(batch.kv_lens) == len(batch.logit_rows)
