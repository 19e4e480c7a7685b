"""Runs one step's chunks through the model: builds the packed batch, calls forward, returns logits to sample from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.engine.attention.context import StepContext
from tandem.engine.attention.interface import AttentionBackend, PagedStep
from tandem.engine.device import to_device
from tandem.engine.loader import LoadedModel
from tandem.engine.sequence import PENDING_TOKEN, ScheduledChunk, Sequence

__all__ = ["LateTokens", "ModelRunner", "PackedBatch"]


def _nothing() -> None:
    """Default of `between_layers`."""


class LateTokens(NamedTuple):
    """Tokens that an earlier step samples. They are on the device, once that is done, but not on the host."""

    token_ids: Tensor  # [n], int64
    rows: dict[Sequence, int]  # which of them is the last token of a sequence


class _LateInputs(NamedTuple):
    """Places of a batch whose input ids come from the device."""

    places: Tensor  # [k]
    rows: Tensor  # [k], in `token_ids`
    token_ids: Tensor


class PackedBatch(NamedTuple):
    """One step's chunks, end to end, on the device: T tokens."""

    input_ids: Tensor  # [1, T]; 0 where `late_inputs` will be
    positions: Tensor  # [1, T]
    logit_rows: Tensor | None  # [n], tokens whose logits are needed; None if there are none
    context: StepContext
    late_inputs: _LateInputs | None


class ModelRunner:
    """Owns the model and a view of the KV pool [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]."""

    def __init__(self, model: LoadedModel, backend: AttentionBackend, pool: Tensor) -> None:
        self.model = model
        self.pool = pool
        self._backend = backend
        self._block_size = pool.shape[3]

    def run(
        self,
        chunks: list[ScheduledChunk],
        between_layers: Callable[[], None] = _nothing,
        late_tokens: LateTokens | None = None,
    ) -> Tensor | None:
        """Compute the chunks' KV into the pool. Returns logits [n, vocab] of the n chunks that sample, in order.

        `between_layers` is called before each layer's attention. Pending tokens are taken from `late_tokens`.
        """
        return self.forward(self.pack(chunks, late_tokens), between_layers)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, between_layers: Callable[[], None] = _nothing) -> Tensor | None:
        """Launch a packed batch; the results of `run`."""
        if batch.late_inputs is not None:
            places, late_rows, token_ids = batch.late_inputs
            batch.input_ids[0, places] = token_ids[late_rows]
        arguments = {"input_ids": batch.input_ids, "position_ids": batch.positions, "use_cache": False}
        rows = batch.logit_rows
        with PagedStep(self._backend, batch.context, between_layers):
            if rows is None:  # in the middle of prompts no logits are needed: skip the vocabulary-sized product
                self.model.module.base_model(**arguments)  # type: ignore[operator]
                return None
            logits: Tensor = self.model.module(**arguments, logits_to_keep=rows).logits[0]
        # A few models ignore logits_to_keep and return a row for every token.
        return logits if logits.shape[0] == len(rows) else logits[rows]

    def pack(self, chunks: list[ScheduledChunk], late_tokens: LateTokens | None = None) -> PackedBatch:
        """Lay chunks end to end, as they are now."""
        size = self._block_size
        token_ids: list[int] = []
        positions, slots = [], []
        kv_lens = np.empty(len(chunks), dtype=np.int32)
        starts = np.zeros(len(chunks) + 1, dtype=np.int32)
        num_blocks = [-(-(chunk.start + chunk.num_tokens) // size) for chunk in chunks]
        tables = np.zeros((len(chunks), max(num_blocks)), dtype=np.int32)
        for i, chunk in enumerate(chunks):
            end = chunk.start + chunk.num_tokens
            token_ids += chunk.sequence.token_ids[chunk.start : end]
            tables[i, : num_blocks[i]] = chunk.sequence.blocks[: num_blocks[i]]
            position = np.arange(chunk.start, end, dtype=np.int64)
            positions.append(position)
            slots.append(tables[i, position // size].astype(np.int64) * size + position % size)
            kv_lens[i] = end
            starts[i + 1] = starts[i] + chunk.num_tokens
        context = StepContext(
            pool=self.pool,
            block_tables=self._to_device(tables),
            query_starts=self._to_device(starts),
            kv_lens=self._to_device(kv_lens),
            slot_mapping=self._to_device(np.concatenate(slots)),
            max_query_len=max(chunk.num_tokens for chunk in chunks),
            max_kv_len=int(kv_lens.max()),
        )
        late_inputs = None if late_tokens is None else self._late_inputs(chunks, token_ids, late_tokens)
        rows = [int(starts[i + 1]) - 1 for i, chunk in enumerate(chunks) if chunk.samples]
        return PackedBatch(
            self._to_device(np.array(token_ids)).unsqueeze(0),
            self._to_device(np.concatenate(positions)).unsqueeze(0),
            self._to_device(np.array(rows)) if rows else None,
            context,
            late_inputs,
        )

    def _late_inputs(
        self, chunks: list[ScheduledChunk], token_ids: list[int], late_tokens: LateTokens
    ) -> _LateInputs | None:
        """Where pending tokens go, each the last of its chunk. In `token_ids` they become 0."""
        places, rows, end = [], [], 0
        for chunk in chunks:
            end += chunk.num_tokens
            if token_ids[end - 1] == PENDING_TOKEN:
                token_ids[end - 1] = 0
                places.append(end - 1)
                rows.append(late_tokens.rows[chunk.sequence])
        if not places:
            return None
        return _LateInputs(self._to_device(np.array(places)), self._to_device(np.array(rows)), late_tokens.token_ids)

    def _to_device(self, array: np.ndarray[Any, Any]) -> Tensor:
        return to_device(array, self.model.device)
