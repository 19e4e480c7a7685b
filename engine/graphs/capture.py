"""Records the graphs of a model at start: which sizes, how much memory they take, whether they compute the same."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.graphs.decode import DecodeGraph, DecodeGraphs, batch_sizes
from tandem.engine.graphs.recorder import GraphRecorder, NotRecordable
from tandem.engine.kv_pool import paged_view
from tandem.engine.loader import LoadedModel
from tandem.engine.model_check import row_errors, tolerance
from tandem.engine.model_runner import ModelRunner, PackedBatch
from tandem.engine.pool_memory import shard_block_shape
from tandem.protocol.config import EngineConfig

logger = logging.getLogger(__name__)

MakeRecorder = Callable[[torch.device], GraphRecorder | None]


def required_bytes(
    config: EngineConfig, model: LoadedModel, backend: AttentionBackend, make_recorder: MakeRecorder
) -> int:
    """Memory that `record_graphs` will take; 0 if steps are launched without graphs, which is logged with the reason.

    The KV pool gets the rest, and graphs need its address. So the largest graph is recorded once over a tiny pool, and
    dropped: the smaller ones take no memory beyond its own but for what CUDA keeps.

    NOTE: `record_graphs` needs another recorder. Torch fails to capture into a memory pool whose graphs are all gone as
    long as a tensor lives in it, and a new pool's handle is only a number.
    """
    recorder = make_recorder(model.device) if config.cuda_graphs == "auto" else None
    if recorder is None:
        return 0
    try:
        largest_bytes = _largest_bytes(config, model, backend, recorder)
    except NotRecordable as exc:
        _log_without(model, exc)
        return 0
    recorder.trim()  # the graph is gone
    return largest_bytes + len(batch_sizes(config.max_num_seqs)) * recorder.graph_bytes()


def record_graphs(runner: ModelRunner, config: EngineConfig, recorder: GraphRecorder) -> DecodeGraphs | None:
    """The graphs of all batch sizes, largest first into one memory pool; None, and a line in the log, without.

    The pool is empty and its last block is the scratch block. Each graph is compared with the step that it recorded.
    """
    begun_at = time.monotonic()
    sizes = batch_sizes(config.max_num_seqs)
    graphs = DecodeGraphs(runner, sizes, config.max_model_len)
    generator = np.random.default_rng(0)
    try:
        for graph in reversed(graphs):
            graph.record(recorder, runner.compute)
            _check(graph, runner, config.max_model_len, generator)
    except NotRecordable as exc:
        _log_without(runner.model, exc)
        return None
    finally:
        recorder.trim()  # of what the checks took: float32 logits of the largest step, several times
    logger.info(
        "recorded %d graphs of up to %d sequences in %.1f s", len(sizes), sizes[-1], time.monotonic() - begun_at
    )
    return graphs


def _largest_bytes(config: EngineConfig, model: LoadedModel, backend: AttentionBackend, recorder: GraphRecorder) -> int:
    pool = paged_view(torch.zeros(2, *shard_block_shape(config, model), dtype=model.dtype, device=model.device))
    before = recorder.trim()
    runner = ModelRunner(model, backend, pool)
    graphs = DecodeGraphs(runner, [config.max_num_seqs], config.max_model_len or model.max_model_len)
    next(reversed(graphs)).record(recorder, runner.compute)
    return recorder.trim() - before


def _log_without(model: LoadedModel, reason: NotRecordable) -> None:
    logger.warning("%s decodes without CUDA graphs: %s", type(model.module).__name__, reason)


def _check(graph: DecodeGraph, runner: ModelRunner, max_model_len: int, generator: np.random.Generator) -> None:
    """Raise NotRecordable unless a replay computes what its step does without a graph, for other inputs."""
    batch = _probe(runner, graph.size, max_model_len, generator)
    num_rows = len(batch.input_ids)
    graph.load(batch)
    logits = graph.compute(runner.compute)
    expected = logits[:num_rows].clone()
    logits.fill_(float("nan"))
    error = float(row_errors(graph.replay(num_rows), expected).max())
    if not error < tolerance(runner.model):
        raise NotRecordable(f"the graph of {graph.size} sequences differs by {error:.2g} (relative) from its own step")


def _probe(runner: ModelRunner, size: int, max_model_len: int, generator: np.random.Generator) -> PackedBatch:
    """Random tokens at random positions of sequences that share the pool's blocks among them."""
    num_blocks, block_size = runner.pool.shape[0] - 1, runner.pool.shape[3]
    num_rows = min(size, num_blocks)
    num_tokens = min(num_blocks // num_rows * block_size, max_model_len)
    num_own = -(-num_tokens // block_size)
    tables = generator.permutation(num_blocks)[: num_rows * num_own].reshape(num_rows, num_own).astype(np.int32)
    positions = generator.integers(num_tokens, size=num_rows)
    blocks = tables[np.arange(num_rows), positions // block_size].astype(np.int64)
    return PackedBatch(
        input_ids=generator.integers(runner.model.vocab_size, size=num_rows),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        block_tables=tables,
        query_starts=np.arange(num_rows + 1, dtype=np.int32),
        kv_lens=(positions + 1).astype(np.int32),
        logit_rows=np.arange(num_rows),
    )
