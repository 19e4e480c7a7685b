"""Steps of several tokens a sequence: the work between their attentions, as graphs of the next number of tokens.

How attention is launched depends on a step's sequences, so it cannot be recorded for a number of tokens. All other work
computes each row by itself. It is recorded in pieces that end where a layer attends: a launch replays a piece, writes
the layer's KV and attends, replays the next one, and so on. The head is launched for the rows that need logits.

Rows that only fill the number of tokens take no part in attention, whose output is zero for them, and write no KV.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from tandem.engine.attention.context import StepContext
from tandem.engine.attention.interface import AttentionBackend, current_step
from tandem.engine.graphs.recorder import DeviceGraph, GraphRecorder, NotRecordable
from tandem.engine.graphs.step_graph import StepGraph, StepGraphs, fill
from tandem.engine.model_runner import DeviceBatch, ModelRunner, PackedBatch
from tandem.engine.parts import with_forward

_MOST_TOKENS = 512  # larger steps take a GPU longer than their launches take the host


def token_counts(max_num_batched_tokens: int) -> list[int]:
    """The numbers of tokens to record, ascending. Products compute tiles of 64 rows or more, so few rows are wasted."""
    most = min(max_num_batched_tokens, _MOST_TOKENS)
    return sorted(size for size in {8, 16, 32, *range(64, most, 64), most} if size <= most)


class _Attention(NamedTuple):
    """A layer's call of the attention backend, over tensors that stay where they are."""

    layer_idx: int
    rows: list[Tensor]  # query, key, value, out
    options: dict[str, Any]

    def launch(self, backend: AttentionBackend, context: StepContext) -> None:
        """Attend in the rows of a step, which are the leading ones."""
        num_tokens = len(context.slot_mapping)
        query, key, value, out = (tensor[:num_tokens] for tensor in self.rows)
        backend(self.layer_idx, query, key, value, out, context, **self.options)


class _Attentions:
    """An attention backend that hands each call to a function."""

    def __init__(self, backend: AttentionBackend, take: Callable[[_Attention, StepContext], None]) -> None:
        """`backend` is the one for which it stands."""
        self.name = backend.name
        self.long_context = backend.long_context
        self._take = take

    def __call__(
        self,
        layer_idx: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        context: StepContext,
        **options: Any,
    ) -> None:
        """See `AttentionBackend`. Rows of `out` in which nobody attends become zero."""
        out.zero_()
        self._take(_Attention(layer_idx, [query, key, value, out], options), context)


class PiecewiseGraph(StepGraph):
    """One number of tokens, as a graph before, between and after the attentions of all layers."""

    def __init__(self, runner: ModelRunner, size: int, max_model_len: int) -> None:
        pool = runner.pool
        tables = torch.full((size, 1), pool.shape[0] - 1, dtype=torch.int32, device=pool.device)
        super().__init__(runner, size, tables, max_model_len)
        self._body: nn.Module = runner.model.module.base_model  # type: ignore[assignment]  # all but the head
        self._pieces: list[DeviceGraph] = []
        self._attentions: list[_Attention] = []
        self._output: Any = None  # of the body

    @override
    @torch.inference_mode()
    def record(self, recorder: GraphRecorder) -> int:
        if self._body is self.runner.model.module:
            raise NotRecordable("its head is not apart from its layers")
        forward = self._body.forward

        def compute_body(*arguments: Any, **options: Any) -> None:
            self._output = forward(*arguments, **options)

        def record_body(*arguments: Any, **options: Any) -> Any:
            self._pieces = recorder.record(lambda: compute_body(*arguments, **options))
            return self._output

        def cut(attention: _Attention, _: StepContext) -> None:
            if (rows := recorder.cut(attention.rows)) is not None:
                self._attentions.append(attention._replace(rows=rows))

        assert self.batch.logit_rows is not None
        one_row = self.batch._replace(logit_rows=self.batch.logit_rows[:1])
        with with_forward(self._body, record_body):
            self.runner.compute(one_row, backend=_Attentions(self.runner.backend, cut))
        if not self._pieces:
            raise NotRecordable("its head does not call its base model")
        return len(self._pieces)

    @override
    def compute(self, loaded: DeviceBatch) -> Tensor | None:
        backend = self.runner.backend
        attend = _Attentions(backend, lambda attention, context: attention.launch(backend, context))
        return self.runner.compute(loaded, backend=attend)

    @override
    @torch.inference_mode()
    def load(self, batch: PackedBatch) -> DeviceBatch:
        inputs = np.zeros((2, self.size), dtype=np.int64)
        inputs[:, : len(batch.input_ids)] = batch.input_ids, batch.positions
        fill(self.inputs[:2], inputs)
        return self.runner.load(batch, self.inputs)

    @override
    def replay(self, loaded: DeviceBatch, between_layers: Callable[[], None]) -> Tensor | None:
        with with_forward(self._body, self._replay_body):
            return self.runner.compute(loaded, between_layers)

    def _replay_body(self, *_: Any, **__: Any) -> Any:
        """The body's forward, with the inputs that were loaded."""
        step = current_step()
        assert step is not None, "nobody computes a step"
        for piece, attention in zip(self._pieces, self._attentions, strict=False):
            piece.replay()
            step.between_layers()
            attention.launch(step.backend, step.context)
        self._pieces[-1].replay()
        return self._output


class PiecewiseGraphs(StepGraphs[PiecewiseGraph]):
    """The graphs of some numbers of tokens."""

    work = "computes steps of several tokens a sequence"
    unit = "tokens"
    takes_runs = True
    most_bytes = 1 << 30

    def __init__(self, runner: ModelRunner, sizes: list[int], max_model_len: int) -> None:
        """Make the buffers. `sizes` ascend."""
        super().__init__([PiecewiseGraph(runner, size, max_model_len) for size in sizes])

    @override
    def query_lens(self, size: int) -> list[int]:
        """A chunk of a prompt beside sequences that decode, and some rows that nobody has."""
        return [size - size // 4] + [1] * (size // 8)

    @override
    def takes(self, batch: PackedBatch) -> bool:
        """All steps: their sequences are not recorded."""
        return True
