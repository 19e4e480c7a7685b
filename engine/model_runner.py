"""Runs one step's chunks through the model: builds the packed batch, calls forward, returns logits to sample from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tandem.engine.attention.context import StepContext
from tandem.engine.attention.interface import AttentionBackend, PagedStep
from tandem.engine.device import to_device
from tandem.engine.kept_tables import KeptTables
from tandem.engine.loader import LoadedModel
from tandem.engine.sequence import PENDING_TOKEN, ScheduledChunk, Sequence
from tandem.engine.token_array import token_array

Array = np.ndarray[Any, Any]


def _nothing() -> None:
    """Default of `between_layers`."""


class LateTokens(NamedTuple):
    """Tokens that an earlier step samples. They are on the device, once that is done, but not on the host."""

    token_ids: Tensor  # [n], int64
    rows: dict[Sequence, int]  # which of them is the last token of a sequence


class LateInputs(NamedTuple):
    """Places of a batch whose input ids come from the device."""

    places: Array  # [k], int64
    rows: Array  # [k], int64, in `token_ids`
    token_ids: Tensor  # on the device


class PackedBatch(NamedTuple):
    """One step's chunks, end to end, in host memory: S sequences, T tokens. `StepContext` has more about the arrays."""

    input_ids: Array  # [T], int64; 0 where `late_inputs` come
    positions: Array  # [T], int64
    slot_mapping: Array  # [T], int64
    block_tables: Array  # [S, max_blocks], int32
    query_starts: Array  # [S + 1], int32
    kv_lens: Array  # [S], int32
    logit_rows: Array  # [n], int64; tokens whose logits are needed
    late_inputs: LateInputs | None = None


class DeviceBatch(NamedTuple):
    """A packed batch on the device. There may be more rows than tokens in a step that was recorded."""

    input_ids: Tensor  # [1, T]
    positions: Tensor  # [1, T]
    logit_rows: Tensor | None  # [n]; None if no logits are needed
    context: StepContext


class RecordedStep(Protocol):
    """A step that was recorded on the device; see `engine/graphs`."""

    def load(self, batch: PackedBatch) -> DeviceBatch:
        """Copy a batch to the device, input ids and positions into the buffers that the graphs read."""

    def replay(self, loaded: DeviceBatch, between_layers: Callable[[], None]) -> Tensor | None:
        """Launch the step that was loaded; the results of `ModelRunner.run`."""


class RecordedSteps(Protocol):
    """The steps of one kind that were recorded."""

    def find(self, batch: PackedBatch) -> RecordedStep | None:
        """The recorded step that computes a batch, if there is one."""


class ModelRunner:
    """Owns the model and a view of the KV pool [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""

    def __init__(self, model: LoadedModel, backend: AttentionBackend, pool: Tensor) -> None:
        self.model = model
        self.pool = pool
        self.backend = backend
        self.graphs: Iterable[RecordedSteps] = ()  # in the order in which they are asked
        self._block_size = pool.shape[3]
        self._tables = KeptTables()

    def run(
        self,
        chunks: list[ScheduledChunk],
        between_layers: Callable[[], None] = _nothing,
        late_tokens: LateTokens | None = None,
    ) -> Tensor | None:
        """Compute the chunks' KV into the pool. Returns the logits [n, vocab] that the chunks need, in order.

        `between_layers` is called before each layer's attention, or once if the step is a single graph. Pending tokens
        are taken from `late_tokens`.
        """
        return self.forward(self.pack(chunks, late_tokens), between_layers)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, between_layers: Callable[[], None] = _nothing) -> Tensor | None:
        """Launch a packed batch: all that the device does in a step. The results of `run`."""
        step = next((found for kind in self.graphs if (found := kind.find(batch)) is not None), None)
        loaded = self.load(batch) if step is None else step.load(batch)
        self.fill_late_inputs(batch, loaded)
        return self.compute(loaded, between_layers) if step is None else step.replay(loaded, between_layers)

    def fill_late_inputs(self, batch: PackedBatch, loaded: DeviceBatch) -> None:
        """Put the input ids that are on the device only in their places."""
        if batch.late_inputs is not None:
            places, rows, token_ids = batch.late_inputs
            loaded.input_ids[0, self._to_device(places)] = token_ids[self._to_device(rows)]

    @torch.inference_mode()
    def compute(
        self,
        batch: DeviceBatch,
        between_layers: Callable[[], None] = _nothing,
        backend: AttentionBackend | None = None,
    ) -> Tensor | None:
        """Launch a batch that is on the device already; the results of `run`. None = the model's own backend."""
        arguments = {"input_ids": batch.input_ids, "position_ids": batch.positions, "use_cache": False}
        rows = batch.logit_rows
        with PagedStep(backend or self.backend, batch.context, between_layers):
            if rows is None:  # in the middle of prompts no logits are needed: skip the vocabulary-sized product
                self.model.module.base_model(**arguments)  # type: ignore[operator]
                return None
            logits: Tensor = self.model.module(**arguments, logits_to_keep=rows).logits[0]
        # A few models ignore logits_to_keep and return a row for every token.
        return logits if logits.shape[0] == len(rows) else logits[rows]

    def pack(self, chunks: list[ScheduledChunk], late_tokens: LateTokens | None = None) -> PackedBatch:
        """Lay chunks end to end, as they are now. This is the host's part of a step: it launches nothing."""
        # A chunk of tokens [start, end) of a sequence, whose KV before `start` is in its blocks:
        # block_tables[i]      the blocks of [0, end), and behind them others of the sequence, or 0
        # slot_mapping         where the KV of [start, end) goes: block * size + offset in the block
        # query_starts[i:i+2]  its rows of the batch; kv_lens[i] = end, up to which the last of its rows attends
        # logit_rows           its last `num_logits` rows, numbered through the batch
        # Drafted tokens come behind those of the sequence: then `end` is that of the draft.
        size = self._block_size
        sequences = [chunk.sequence for chunk in chunks]
        numbers = [(one.start, one.num_tokens, one.num_scored + one.samples, len(one.draft)) for one in chunks]
        starts, num_tokens, num_logits, num_drafted = np.array(numbers).T.copy()
        counts = num_tokens + num_drafted
        ends, kv_lens, num_logits = counts.cumsum(), starts + counts, num_logits + num_drafted
        query_starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        query_starts[1:] = ends
        positions, owners = _runs(starts, counts), np.arange(len(chunks)).repeat(counts)
        places, tables = positions // size, self._tables.pack(sequences, -(-kv_lens // size))
        token_ids = token_array()
        for chunk in chunks:
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
            if chunk.draft:
                token_ids.extend(chunk.draft)
        input_ids, late_inputs = np.array(token_ids, dtype=np.int64), None
        if late_tokens is not None and len(pending := np.flatnonzero(input_ids == PENDING_TOKEN)):
            input_ids[pending] = 0
            rows = [late_tokens.rows[sequences[owner]] for owner in owners[pending]]
            late_inputs = LateInputs(pending, np.array(rows), late_tokens.token_ids)
        return PackedBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=positions + (tables[owners, places] - places) * size,
            block_tables=tables,
            query_starts=query_starts,
            kv_lens=kv_lens.astype(np.int32),
            logit_rows=_runs(ends - num_logits, num_logits),
            late_inputs=late_inputs,
        )

    def load(self, batch: PackedBatch, inputs: Tensor | None = None) -> DeviceBatch:
        """Copy a batch to the device, behind the work launched so far.

        `inputs`: rows of its input ids and positions, if they are there already.
        """
        load = self._to_device
        if inputs is None:
            inputs = load(np.stack((batch.input_ids, batch.positions)))
        context = StepContext(
            pool=self.pool,
            block_tables=load(batch.block_tables),
            query_starts=load(batch.query_starts),
            kv_lens=load(batch.kv_lens),
            slot_mapping=load(batch.slot_mapping),
            max_query_len=int(np.diff(batch.query_starts).max()),
            max_kv_len=int(batch.kv_lens.max()),
        )
        rows = load(batch.logit_rows) if len(batch.logit_rows) else None
        return DeviceBatch(inputs[0:1], inputs[1:2], rows, context)

    def _to_device(self, array: Array) -> Tensor:
        return to_device(array, self.model.device)


def _runs(starts: Array, counts: Array) -> Array:
    """`count` numbers from each start on, end to end: int64 [sum of counts]."""
    if (counts == 1).all():
        return starts
    ends = counts.cumsum()
    numbers: Array = np.arange(ends[-1]) + (starts - ends + counts).repeat(counts)
    return numbers
