"""Steps that only decode, as recorded graphs: the same tokens and KV as without, whatever happens in between."""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.block_table import BlockTable
from tandem.engine.engine import Engine
from tandem.engine.graphs.capture import GraphPlan, plan_graphs
from tandem.engine.graphs.decode import DecodeGraphs, batch_sizes
from tandem.engine.graphs.pieces import PiecewiseGraphs
from tandem.engine.graphs.recorder import DeviceGraph, GraphRecorder, NotRecordable, _refusing_syncs
from tandem.engine.model_check import row_errors, tolerance
from tandem.engine.sequence import ScheduledChunk, Sequence
from tandem.engine.token_array import token_array
from tandem.protocol.config import EngineConfig
from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import add, generate, make_prompt, make_sampling, output
from tests.support.architectures import SERVED, save_model
from tests.support.recorded_graph import HostGraphRecorder, launched_ahead, patch_kernels


@pytest.fixture
def build_graphed(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> BuildEngine:
    """Makes engines that decode by graphs."""
    patch_kernels(monkeypatch)

    def build(*arguments: Any, **settings: Any) -> Engine:
        return build_engine(*arguments, make_recorder=lambda _: HostGraphRecorder(), **settings)

    return build


def decode_chunk(block: int, length: int) -> ScheduledChunk:
    """The last token of a sequence of up to two blocks."""
    table = BlockTable([block, block + 1])
    sequence = Sequence("", token_array(make_prompt(length)), length, make_sampling(), root=b"", blocks=table)
    return ScheduledChunk(sequence, length - 1, 1, samples=True)


def graphs_of(engine: Engine) -> DecodeGraphs:
    [graphs] = [kind for kind in engine.runner.graphs if isinstance(kind, DecodeGraphs)]
    return graphs


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, [1]),
        (5, [1, 2, 4, 5]),
        (24, [1, 2, 4, 8, 16, 24]),
        (100, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]),
    ],
)
def test_batch_sizes_reach_the_largest_step(max_num_seqs: int, expected: list[int]) -> None:
    assert batch_sizes(max_num_seqs) == expected


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", "float32"), ("gemma2", "bfloat16"), ("qwen2, sliding", "float32")]
)
def test_graphs_give_the_tokens_of_plain_steps(
    name: str, dtype: str, build_engine: BuildEngine, build_graphed: BuildEngine
) -> None:
    prompts = [make_prompt(length) for length in (3, 16, 33, 50, 7)]
    expected = generate(build_engine(name, dtype=dtype), prompts, max_tokens=20)
    engine = build_graphed(name, dtype=dtype)
    engine.runner.compute = not_for_decoding(engine)  # type: ignore[method-assign]
    assert generate(engine, prompts, max_tokens=20) == expected


@pytest.mark.parametrize(("block_size", "max_model_len"), [(16, 10), (64, 40)])
def test_contexts_may_be_shorter_than_a_block(build_graphed: BuildEngine, block_size: int, max_model_len: int) -> None:
    engine = build_graphed(block_size=block_size, max_model_len=max_model_len)
    sequence = add(engine, "a", make_prompt(6), max_tokens=50)
    while engine.has_work:
        engine.step()
    assert len(sequence.token_ids) == max_model_len
    engine.check_integrity(idle=True)


def not_for_decoding(engine: Engine) -> Any:
    compute = engine.runner.compute

    def check(batch: Any, *arguments: Any) -> Tensor | None:
        assert batch.context.max_query_len > 1
        return compute(batch, *arguments)

    return check


@pytest.mark.exact_bits("rows are computed beside others")
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8])
def test_rows_that_fill_a_batch_change_nothing_but_the_scratch_block(
    num_rows: int, build_engine: BuildEngine, build_graphed: BuildEngine
) -> None:
    plain, graphed = build_engine(num_blocks=40), build_graphed(num_blocks=40)
    assert graphed.pool.num_blocks == 39
    for engine in (plain, graphed):
        engine.runner.pool.copy_(torch.randn(engine.runner.pool.shape, generator=torch.Generator().manual_seed(0)))
    chunks = [decode_chunk(4 * row, 9 + 3 * row) for row in range(num_rows)]
    num_calls = 0

    def count() -> None:
        nonlocal num_calls
        num_calls += 1

    expected, actual = plain.runner.run(chunks), graphed.runner.run(chunks, count)
    assert expected is not None
    assert actual is not None
    assert torch.equal(actual, expected)
    assert torch.equal(graphed.runner.pool[:39], plain.runner.pool[:39])
    assert num_calls == 1


def test_the_block_pool_never_gives_out_the_scratch_block(build_graphed: BuildEngine) -> None:
    engine = build_graphed(num_blocks=10)
    assert sorted(engine.pool.try_allocate(engine.pool.num_available) or []) == list(range(9))
    assert engine.kv.num_blocks == 10


@pytest.mark.exact_bits("rows are computed beside others")
def test_steps_that_are_launched_ahead_do_not_disturb_each_other(
    build_engine: BuildEngine, build_graphed: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device begins with the first step after the host has launched the last, and logits are read at the end."""
    plain, graphed = build_engine(num_blocks=40), build_graphed(num_blocks=40)
    graphed.runner.pool.zero_()
    steps = [
        [decode_chunk(4 * row, 5 * step + 7 + row) for row in range(num_rows)]
        for step, num_rows in enumerate((3, 4, 1, 3))
    ]
    expected = [plain.runner.run(step) for step in steps]
    logits = launched_ahead(graphed.runner, steps, buffers_of(graphed), monkeypatch)
    for before, after in zip(expected, logits, strict=True):
        assert before is not None
        assert after is not None
        assert torch.equal(before, after)


def buffers_of(engine: Engine) -> list[Tensor]:
    """What the graphs read, and what they write beside the pool."""
    buffers = []
    for graph in reversed(graphs_of(engine)):
        buffers += [graph.batch.input_ids, graph.batch.context.block_tables, graph.batch.context.kv_lens, graph.logits]
    return buffers


def test_a_graph_reads_nothing_that_may_change(build_graphed: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine.cpu.optimize.optimize", lambda module, **_: None)  # it keeps weights of its own
    engine = build_graphed()
    module = engine.model.module
    for graph in reversed(graphs_of(engine)):
        assert graph.batch.logit_rows is not None
        constants = [graph.batch.logit_rows, graph.batch.context.query_starts]
        stays = [*module.parameters(), *module.buffers(), engine.runner.pool, *buffers_of(engine), *constants]
        assert not graph._graph.foreign(stays)  # type: ignore[union-attr]


def test_a_model_that_reads_on_the_host_decodes_without_graphs(
    build_engine: BuildEngine, build_graphed: BuildEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = build_graphed("jetmoe", num_blocks=50)
    assert not engine.runner.graphs
    assert engine.pool.num_blocks == 50
    [line] = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert "JetMoeForCausalLM decodes without CUDA graphs: aten::" in line
    prompts = [make_prompt(9), make_prompt(20)]
    assert generate(engine, prompts) == generate(build_engine("jetmoe"), prompts)


class StaleRecorder(HostGraphRecorder):
    """Its graphs compute with the inputs that were there when they were recorded."""

    def record(self, function: Any) -> list[DeviceGraph]:
        function()
        return [self]

    def replay(self) -> None:
        pass


def test_a_graph_that_computes_wrong_is_not_used(build_engine: BuildEngine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = build_engine(make_recorder=lambda _: StaleRecorder(), max_num_seqs=4)
    assert not engine.runner.graphs
    for name in ("decodes", "computes steps of several tokens a sequence"):
        assert f"LlamaForCausalLM {name} without CUDA graphs: the graph of " in caplog.text
    assert "the graph of 4 sequences differs by 1" in caplog.text
    assert generate(engine, [make_prompt(9)]) == generate(build_engine(), [make_prompt(9)])


class Trimmed(HostGraphRecorder):
    num_graphs_when_trimmed = 0

    def trim(self) -> int:
        self.num_graphs_when_trimmed = len(self.graphs)
        return super().trim()


def test_what_the_checks_of_graphs_took_is_given_back(
    build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch_kernels(monkeypatch)
    recorders: list[Trimmed] = []

    def make(_: torch.device) -> Trimmed:
        recorders.append(Trimmed())
        return recorders[-1]

    assert build_engine(make_recorder=make, max_num_seqs=4).runner.graphs
    assert recorders[-1].num_graphs_when_trimmed == len(recorders[-1].graphs) > 1


def test_the_mode_that_finds_waits_says_nothing_in_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = []

    def set_mode(mode: Any) -> None:
        modes.append(mode)
        if mode == "error":
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with _refusing_syncs():  # in these tests a warning is an error
        pass
    assert modes == ["error", 0]


class Accountant(HostGraphRecorder):
    """A recorder on a device of which 1,000 bytes are taken, and 300 more by each graph."""

    def trim(self) -> int:
        return 1000 + 300 * len(self.graphs)

    def graph_bytes(self, num_graphs: int) -> int:
        return 7 if num_graphs == 1 else 5


def test_the_memory_of_graphs_is_known_before_the_pool_is_made(build_engine: BuildEngine) -> None:
    engine = build_engine(max_num_seqs=5)
    arguments = engine.config, engine.model, engine.runner.backend
    plan = plan_graphs(*arguments, lambda _: Accountant())
    assert plan.sizes == {PiecewiseGraphs: [8, 16, 32, 64], DecodeGraphs: [1, 2, 4, 5]}
    assert plan.num_bytes == (300 + 4 * 7) + (4 * 300 + 4 * 5)  # of the largest, and of each
    assert plan_graphs(*arguments, lambda _: None) == GraphPlan(0, {})


def test_graphs_can_be_switched_off(build_engine: BuildEngine) -> None:
    def fail(_: torch.device) -> GraphRecorder:
        raise AssertionError("a recorder is made")

    assert not build_engine(cuda_graphs="off", make_recorder=fail).runner.graphs


def test_a_host_graph_repeats_work_and_no_code() -> None:
    source, target = torch.ones(3), torch.zeros(3)
    factor = 2.0
    [graph] = HostGraphRecorder().record(lambda: target.copy_(source * factor))
    factor = 100.0
    source.fill_(5.0)
    graph.replay()
    assert target.tolist() == [10.0] * 3
    with pytest.raises(NotRecordable, match=r"aten::.* reads a value on the host"):
        HostGraphRecorder().record(lambda: target.fill_(source.sum().item()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_replays_compute_what_plain_steps_do(dtype: str, tmp_path: Path) -> None:
    """Prints tokens per second of both (`-s`), of steps whose launches take longer than their work."""
    family = SERVED["llama"]._replace(settings={**SERVED["llama"].settings, "num_hidden_layers": 24})
    folder = str(save_model(tmp_path / "model", family))
    prompts = [make_prompt(length) for length in range(3, 35)]
    answers, logits = [], []
    for cuda_graphs in ("off", "auto"):
        config = EngineConfig(
            model=folder, device="cuda", dtype=dtype, pool_bytes=256 << 20, max_num_seqs=32, cuda_graphs=cuda_graphs
        )
        engine = Engine(config)
        assert bool(engine.runner.graphs) == (cuda_graphs == "auto")
        sequences = [add(engine, str(i), prompt, max_tokens=100) for i, prompt in enumerate(prompts)]
        begun_at = time.perf_counter()
        while engine.has_work:
            engine.step()
        seconds = time.perf_counter() - begun_at
        engine.check_integrity(idle=True)
        answers.append([output(sequence) for sequence in sequences])
        print(f"{dtype}, {cuda_graphs=}: {100 * len(prompts) / seconds:.0f} tokens/s")
        engine.runner.pool.zero_()
        logits.append(engine.runner.run([decode_chunk(4 * row, 9 + row) for row in range(5)]))
    assert float(row_errors(logits[1], logits[0]).max()) < tolerance(engine.model)
    if dtype == "float32":  # in bfloat16 a product's kernel, and its rounding, may depend on the number of rows
        assert answers[0] == answers[1]
