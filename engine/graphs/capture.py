"""Records the graphs of a model at start: which sizes, how much memory they take, whether they compute the same."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.graphs.decode import DecodeGraphs, batch_sizes
from tandem.engine.graphs.pieces import PiecewiseGraphs, token_counts
from tandem.engine.graphs.recorder import GraphRecorder, NotRecordable
from tandem.engine.graphs.step_graph import StepGraph, StepGraphs
from tandem.engine.kv_pool import paged_view
from tandem.engine.loader import LoadedModel
from tandem.engine.model_check import row_errors, tolerance
from tandem.engine.model_runner import ModelRunner, PackedBatch
from tandem.engine.pool_memory import shard_block_shape
from tandem.protocol.config import EngineConfig

logger = logging.getLogger(__name__)

MakeRecorder = Callable[[torch.device], GraphRecorder | None]
Kind = type[DecodeGraphs] | type[PiecewiseGraphs]


class GraphPlan(NamedTuple):
    """What to record: the sizes of each kind, and the memory that they will take."""

    num_bytes: int
    sizes: dict[Kind, list[int]]


def plan_graphs(
    config: EngineConfig, model: LoadedModel, backend: AttentionBackend, make_recorder: MakeRecorder
) -> GraphPlan:
    """Plan before the KV pool takes the rest of the memory: graphs need its address.

    Steps of a kind that cannot be recorded are launched without graphs, which is logged with the reason.
    """
    plan = GraphPlan(0, {})
    if config.cuda_graphs == "off" or make_recorder(model.device) is None:
        return plan
    planner = _Planner(config, model, backend, make_recorder)
    kinds: dict[Kind, list[int]] = {
        DecodeGraphs: batch_sizes(config.max_num_seqs),
        PiecewiseGraphs: token_counts(config.max_num_batched_tokens),
    }
    for kind, sizes in kinds.items():
        try:
            num_bytes, sizes = planner.within_budget(kind, sizes)
        except NotRecordable as exc:
            _log_without(model, kind, exc)
            break  # other kinds would fail for the same reason
        plan = GraphPlan(plan.num_bytes + num_bytes, {kind: sizes, **plan.sizes})
    return plan


def record_graphs(
    runner: ModelRunner, plan: GraphPlan, max_model_len: int, recorder: GraphRecorder
) -> list[StepGraphs[Any]]:
    """The graphs of a plan, recorded into one memory pool, largest first. Those of decode steps are the first ones.

    The KV pool is empty and its last block is the scratch block. Each graph is compared with the step that it recorded.
    If one differs, its kind is not used, and there is a line in the log.
    """
    kinds = [kind(runner, sizes, max_model_len) for kind, sizes in plan.sizes.items()]
    recorded = list[StepGraphs[Any]]()
    for graphs in kinds:
        begun_at = time.monotonic()
        try:
            _record_all(graphs, runner, max_model_len, recorder)
        except NotRecordable as exc:
            _log_without(runner.model, type(graphs), exc)
            continue
        finally:
            recorder.trim()  # of what the checks took: float32 logits of the largest step, several times
        recorded.insert(0, graphs)
        took_s = time.monotonic() - begun_at
        num, most = len(graphs.sizes), graphs.sizes[-1]
        logger.info("recorded steps of %d sizes, up to %d %s, in %.1f s", num, most, graphs.unit, took_s)
    return recorded


class _Planner(NamedTuple):
    """What the memory of graphs depends on."""

    config: EngineConfig
    model: LoadedModel
    backend: AttentionBackend
    make_recorder: MakeRecorder

    def within_budget(self, kind: Kind, sizes: list[int]) -> tuple[int, list[int]]:
        """The sizes of a kind that its budget allows, and their memory. Raises NotRecordable."""
        while (num_bytes := self._needed_bytes(kind, sizes)) > kind.most_bytes:
            if not (sizes := sizes[:-1]):
                raise NotRecordable(f"they would take {num_bytes} bytes, more than {kind.most_bytes}")
        return num_bytes, sizes

    def _needed_bytes(self, kind: Kind, sizes: list[int]) -> int:
        """Record the largest graph over a tiny pool, and drop it.

        The smaller ones take no memory beyond its own but for what CUDA keeps.

        NOTE: each recording needs another recorder. Torch fails to capture into a memory pool whose graphs are all gone
        as long as a tensor lives in it, and a new pool's handle is only a number.
        """
        recorder = self.make_recorder(self.model.device)
        assert recorder is not None, "the device has graphs"
        try:
            return self._record_largest(kind, sizes, recorder)
        finally:
            recorder.trim()  # the graph is gone

    def _record_largest(self, kind: Kind, sizes: list[int], recorder: GraphRecorder) -> int:
        config, model = self.config, self.model
        pool = torch.zeros(2, *shard_block_shape(config, model), dtype=model.kv_dtype, device=model.device)
        before = recorder.trim()
        runner = ModelRunner(model, self.backend, paged_view(pool))
        graphs = kind(runner, sizes[-1:], config.max_model_len or model.max_model_len)
        num_graphs = next(reversed(graphs)).record(recorder)
        return recorder.trim() - before + len(sizes) * recorder.graph_bytes(num_graphs)


def _log_without(model: LoadedModel, kind: Kind, reason: NotRecordable) -> None:
    logger.warning("%s %s without CUDA graphs: %s", type(model.module).__name__, kind.work, reason)


def _record_all(graphs: StepGraphs[Any], runner: ModelRunner, max_model_len: int, recorder: GraphRecorder) -> None:
    """Record and check all sizes. Raises NotRecordable."""
    generator = np.random.default_rng(0)
    for graph in reversed(graphs):
        graph.record(recorder)
        error = _error(graph, _probe(runner, graphs.query_lens(graph.size), max_model_len, generator))
        if not error < tolerance(runner.model):
            raise NotRecordable(
                f"the graph of {graph.size} {graphs.unit} differs by {error:.2g} (relative) from its own step"
            )


def _error(graph: StepGraph, batch: PackedBatch) -> float:
    """How far the logits of a replay are from those of the step without graphs."""
    loaded = graph.load(batch)
    expected, actual = graph.compute(loaded), graph.replay(loaded, lambda: None)
    assert expected is not None, "some rows sample"
    assert actual is not None, "some rows sample"
    return float(row_errors(actual, expected[: len(actual)]).max())


def _probe(
    runner: ModelRunner, query_lens: list[int], max_model_len: int, generator: np.random.Generator
) -> PackedBatch:
    """Random tokens at random positions of sequences that share the pool's blocks among them."""
    num_blocks, block_size = runner.pool.shape[0] - 1, runner.pool.shape[3]
    num_seqs = min(len(query_lens), num_blocks)
    num_tokens = min(num_blocks // num_seqs * block_size, max_model_len)
    num_own = -(-num_tokens // block_size)
    tables = generator.permutation(num_blocks)[: num_seqs * num_own].reshape(num_seqs, num_own).astype(np.int32)
    counts = np.minimum(query_lens[:num_seqs], num_tokens)
    kv_lens = generator.integers(counts, num_tokens, endpoint=True)
    starts = np.concatenate(([0], counts.cumsum()))
    positions = np.concatenate([np.arange(end - n, end) for n, end in zip(counts, kv_lens, strict=True)])
    blocks = tables[np.arange(num_seqs).repeat(counts), positions // block_size].astype(np.int64)
    return PackedBatch(
        input_ids=generator.integers(runner.model.vocab_size, size=len(positions)),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        block_tables=tables,
        query_starts=starts.astype(np.int32),
        kv_lens=kv_lens.astype(np.int32),
        logit_rows=starts[1:] - 1,
    )
