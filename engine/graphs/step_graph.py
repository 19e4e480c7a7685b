"""What recorded steps of all kinds have in common: one is recorded for each of some sizes, over buffers of its own."""

from __future__ import annotations

import abc
import math
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tandem.engine.attention.context import StepContext
from tandem.engine.device import to_pinned
from tandem.engine.graphs.recorder import GraphRecorder
from tandem.engine.model_runner import DeviceBatch, ModelRunner, PackedBatch, RecordedStep, RecordedSteps

Array = np.ndarray[Any, Any]


class StepGraph(RecordedStep, abc.ABC):
    """Steps of at most `size` tokens: the buffers that they are loaded into, and the graphs that compute with them."""

    def __init__(self, runner: ModelRunner, size: int, block_tables: Tensor, max_model_len: int) -> None:
        """`block_tables` [size, max_blocks] stays a buffer, filled with the scratch block: the pool's last one."""
        pool = runner.pool
        inputs = torch.zeros(3, size, dtype=torch.int64, device=pool.device)
        inputs[2] = (pool.shape[0] - 1) * pool.shape[3]
        context = StepContext(
            pool=pool,
            block_tables=block_tables,
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=pool.device),
            kv_lens=torch.ones(size, dtype=torch.int32, device=pool.device),
            slot_mapping=inputs[2],
            max_query_len=1,
            max_kv_len=max_model_len,  # bounds for every later step
        )
        self.size = size
        self.runner = runner
        self.inputs = inputs  # ids, positions and slots, of which `batch` has views
        self.batch = DeviceBatch(inputs[0:1], inputs[1:2], torch.arange(size, device=pool.device), context)

    @abc.abstractmethod
    def record(self, recorder: GraphRecorder) -> int:
        """Record the step. Returns the number of graphs. Raises NotRecordable."""

    @abc.abstractmethod
    def compute(self, loaded: DeviceBatch) -> Tensor | None:
        """Compute what was loaded in the buffers without graphs. Its leading rows are those of `replay`."""


G = TypeVar("G", bound=StepGraph)


class StepGraphs(RecordedSteps, abc.ABC, Generic[G]):
    """The recorded steps of one kind."""

    work: ClassVar[str]  # what a model does in such steps
    unit: ClassVar[str]  # of the sizes
    takes_runs: ClassVar[bool]  # whether a sequence may compute several tokens
    most_bytes: ClassVar[float] = math.inf  # that all graphs may take

    def __init__(self, graphs: list[G]) -> None:
        """Sizes ascend."""
        self.sizes = [graph.size for graph in graphs]
        self._graphs = graphs

    def __reversed__(self) -> Iterator[G]:
        """Largest first."""
        return reversed(self._graphs)

    @override
    def find(self, batch: PackedBatch) -> G | None:
        num_tokens = len(batch.input_ids)
        if num_tokens > self.sizes[-1] or not self.takes(batch):
            return None
        return self._graphs[bisect_left(self.sizes, num_tokens)]

    @abc.abstractmethod
    def query_lens(self, size: int) -> list[int]:
        """Tokens that sequences compute in a step of this size, for its check."""

    @abc.abstractmethod
    def takes(self, batch: PackedBatch) -> bool:
        """Whether a step is of this kind."""


def fill(buffer: Tensor, rows: Array) -> None:
    """Copy rows of the host into a buffer, behind the work launched so far.

    The host's array must be a new one for each step, and torch reuses pinned memory once the device has read it.
    """
    buffer.copy_(to_pinned(rows, buffer.device), non_blocking=True)
