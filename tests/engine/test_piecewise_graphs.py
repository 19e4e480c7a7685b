"""Steps of several tokens a sequence, as graphs of the work between attentions: the same bits as without."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from tandem.engine import loader
from tandem.engine.attention.triton import TritonAttention
from tandem.engine.block_table import BlockTable
from tandem.engine.engine import Engine
from tandem.engine.graphs.capture import GraphPlan, plan_graphs
from tandem.engine.graphs.decode import DecodeGraphs
from tandem.engine.graphs.pieces import PiecewiseGraph, PiecewiseGraphs, token_counts
from tandem.engine.graphs.recorder import DeviceGraph, NotRecordable
from tandem.engine.model_check import row_errors
from tandem.engine.sequence import ScheduledChunk, Sequence
from tandem.engine.token_array import token_array
from tests.engine.conftest import BuildEngine
from tests.engine.speculation.test_exactness import predicted_requests_and_answers
from tests.engine.test_engine import add, drain, generate, make_prompt, make_sampling, output
from tests.engine.test_forced_runs import answers
from tests.engine.test_structured_output import make_engine
from tests.support.late_device import LateDevice
from tests.support.recorded_graph import HostGraphRecorder, launched_ahead, note_and_run, patch_kernels, patch_triton

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels are compiled here")
NUM_BLOCKS = 60  # of 16 tokens; the last one is the scratch block


@pytest.fixture
def build_graphed(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> BuildEngine:
    """Makes engines that replay all steps of at most 64 tokens."""
    patch_kernels(monkeypatch)

    def build(*arguments: Any, **settings: Any) -> Engine:
        settings = {"make_recorder": lambda _: HostGraphRecorder(), "num_blocks": NUM_BLOCKS, **settings}
        return build_engine(*arguments, **settings)

    return build


def pieces_of(engine: Engine) -> list[PiecewiseGraph]:
    """Smallest first."""
    [graphs] = [kind for kind in engine.runner.graphs if isinstance(kind, PiecewiseGraphs)]
    return [*reversed(graphs)][::-1]


def chunk(
    block: int, start: int, num_tokens: int, draft: tuple[int, ...] = (), *, samples: bool = True
) -> ScheduledChunk:
    """Tokens of a sequence of up to ten blocks, from one on."""
    table = BlockTable(range(block, block + 10))
    prompt = make_prompt(start + num_tokens)
    sequence = Sequence("", token_array(prompt), len(prompt), make_sampling(), root=b"", blocks=table)
    return ScheduledChunk(sequence, start, num_tokens, samples=samples, draft=draft)


def mixed(num_tokens: int) -> list[ScheduledChunk]:
    """A step of this many tokens: two sequences that decode, one with a draft, beside a part of a prompt to score."""
    beside = [chunk(0, 30, 1), chunk(10, 40, 1, draft=(7, 8, 9))]
    return [*beside, replace(chunk(20, 17, num_tokens - 5, samples=False), num_scored=1)]


def with_noise(engine: Engine) -> Engine:
    """The same garbage in the pool of each engine."""
    pool = engine.runner.pool
    pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(0)))
    return engine


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "expected"),
    [
        (1, [1]),
        (8, [8]),
        (20, [8, 16, 20]),
        (64, [8, 16, 32, 64]),
        (130, [8, 16, 32, 64, 128, 130]),
        (8192, [8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512]),
    ],
)
def test_token_counts_reach_the_largest_step_or_512(max_num_batched_tokens: int, expected: list[int]) -> None:
    assert token_counts(max_num_batched_tokens) == expected


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "float32"), ("gemma2", "bfloat16"), ("qwen2, sliding", "float32"), ("gpt2", "float32")],
)
def test_pieces_give_the_tokens_of_plain_steps(
    name: str, dtype: str, build_engine: BuildEngine, build_graphed: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts longer than a step, beside others that decode."""
    prompts = [make_prompt(length) for length in (3, 16, 33, 90, 7, 130)]
    expected = generate(build_engine(name, dtype=dtype), prompts, max_tokens=12)
    engine = build_graphed(name, dtype=dtype)
    monkeypatch.setattr(engine.runner, "load", only_for_graphs(engine))
    assert generate(engine, prompts, max_tokens=12) == expected


def only_for_graphs(engine: Engine) -> Callable[..., Any]:
    load = engine.runner.load

    def check(batch: Any, inputs: Tensor | None = None) -> Any:
        assert inputs is not None, "a step is launched without graphs"
        return load(batch, inputs)

    return check


@pytest.mark.parametrize("num_tokens", [6, 7, 8, 9, 15, 16, 17, 63, 64, 65, 80])
def test_rows_that_fill_a_step_change_nothing(
    num_tokens: int, build_engine: BuildEngine, build_graphed: BuildEngine
) -> None:
    """At the bounds of sizes, and beyond the largest one; with drafts, and rows that do not sample."""
    plain, graphed = with_noise(build_engine(num_blocks=NUM_BLOCKS)), with_noise(build_graphed())
    num_calls = 0

    def count() -> None:
        nonlocal num_calls
        num_calls += 1

    expected, actual = plain.runner.run(mixed(num_tokens)), graphed.runner.run(mixed(num_tokens), count)
    assert expected is not None
    assert actual is not None
    assert actual.shape[0] == 6
    assert torch.equal(actual, expected)
    assert torch.equal(graphed.runner.pool, plain.runner.pool)  # the scratch block too
    batch = graphed.runner.pack(mixed(num_tokens))
    sizes = [kind.find(batch).size for kind in graphed.runner.graphs if kind.find(batch) is not None]  # type: ignore[union-attr]
    assert sizes == [size for size in (8, 16, 32, 64) if size >= num_tokens][:1]
    assert num_calls == graphed.model.num_layers


def test_a_step_in_the_middle_of_prompts_needs_no_logits(build_engine: BuildEngine, build_graphed: BuildEngine) -> None:
    step = [chunk(0, 5, 20, samples=False), chunk(20, 0, 3, samples=False)]
    plain, graphed = with_noise(build_engine(num_blocks=NUM_BLOCKS)), with_noise(build_graphed())
    graphed.model.module.lm_head = nn.Identity()  # would give rows of another width
    assert plain.runner.run(step) is None
    assert graphed.runner.run(step) is None
    assert torch.equal(graphed.runner.pool, plain.runner.pool)


def test_rows_that_fill_a_step_hold_zeros_between_layers(build_graphed: BuildEngine) -> None:
    """Never what the step before, or nobody, left there: it might be NaN, and experts see all rows."""
    engine = with_noise(build_graphed())
    graph = pieces_of(engine)[1]
    assert graph.size == 16
    for num_tokens in (16, 9):
        engine.runner.run(mixed(num_tokens))
    for attention in graph._attentions:
        out = attention.rows[3]
        assert not out[9:].any()
        assert out[:9].any(dim=(1, 2)).all()


@pytest.mark.parametrize("name", ["gpt_oss", "olmo", "gemma3"])
def test_experts_sinks_and_windows_with_rows_that_nobody_has(
    name: str, build_engine: BuildEngine, build_graphed: BuildEngine
) -> None:
    """Experts of gpt-oss are torch's own, so only close."""
    plain, graphed = with_noise(build_engine(name, num_blocks=NUM_BLOCKS)), with_noise(build_graphed(name))
    assert len(pieces_of(graphed)) == 4
    for num_tokens in (9, 17, 33, 64):
        expected, actual = plain.runner.run(mixed(num_tokens)), graphed.runner.run(mixed(num_tokens))
        assert expected is not None
        assert actual is not None
        assert float(row_errors(actual, expected).max()) < 1e-4
    torch.testing.assert_close(graphed.runner.pool[:-1], plain.runner.pool[:-1], atol=1e-4, rtol=1e-4)


def test_nothing_is_read_that_may_change(build_graphed: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine.cpu.optimize.optimize", lambda module, **_: None)  # it keeps weights of its own
    engine = build_graphed()
    module = engine.model.module
    stays = [*module.parameters(), *module.buffers()]
    for graph in pieces_of(engine):
        known = [*stays, graph.inputs]
        for piece in graph._pieces:
            assert not piece.foreign(known)  # type: ignore[attr-defined]
            known += piece._made.values()  # type: ignore[attr-defined]


@interpreted
def test_steps_launched_ahead_do_not_disturb_each_other(
    build_engine: BuildEngine, build_graphed: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device begins with the first step after the host has launched the last, and logits are read at the end.

    Attention is Triton's: its kernels are launched late too.
    """
    monkeypatch.setattr("tandem.engine.cpu.optimize.optimize", lambda module, **_: None)  # its kernels are never late
    plain, graphed = with_noise(build_engine(num_blocks=NUM_BLOCKS)), with_noise(build_graphed())
    graphed.runner.backend = TritonAttention(512)
    steps = [mixed(16), mixed(9), [chunk(40, 0, 11)], [chunk(0, 31, 1), chunk(40, 11, 1)], mixed(12)]
    expected = [plain.runner.run(step) for step in steps]
    logits = launched_ahead(graphed.runner, steps, [graphed.runner.pool, *buffers_of(graphed)], monkeypatch)
    for before, after in zip(expected, logits, strict=True):
        assert before is not None
        assert after is not None
        torch.testing.assert_close(after, before)
    torch.testing.assert_close(graphed.runner.pool[:-1], plain.runner.pool[:-1])


def buffers_of(engine: Engine) -> list[Tensor]:
    """What replays read and write."""
    [decoding] = [kind for kind in engine.runner.graphs if isinstance(kind, DecodeGraphs)]
    buffers = [tensor for graph in reversed(decoding) for tensor in (graph.inputs, graph.logits)]
    buffers += [graph.batch.context.block_tables for graph in reversed(decoding)]
    for graph in pieces_of(engine):
        buffers += [graph.inputs, graph._output.last_hidden_state]
        buffers += [tensor for attention in graph._attentions for tensor in attention.rows]
    return buffers


@interpreted
@pytest.mark.cluster  # there is much of it
def test_a_mixed_step_launches_a_piece_and_attention_for_each_layer(
    build_graphed: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels for GPUs. Without graphs a layer launches eight operations beside attention, at any size."""
    pytest.importorskip("triton")
    from tandem.engine.gpu.optimize import optimize
    from tests.support.launches import launches

    monkeypatch.setattr(loader, "_use_kernels", lambda module, *_: optimize(module) and "fused")
    monkeypatch.setattr("tandem.engine.model_check.check_model", lambda *_: None)  # takes long
    patch_triton(monkeypatch, note_and_run)
    engine = build_graphed(max_num_batched_tokens=16, max_num_seqs=2)
    engine.runner.backend = TritonAttention(512)
    batch, found = engine.runner.pack(mixed(12)), []
    for graphs in ((), engine.runner.graphs):
        engine.runner.graphs = graphs
        names = launches(lambda: engine.runner.forward(batch))
        found.append([name for name in names if "copy" not in name])  # those are of the step's metadata
    plain, graphed = found
    print(f"{len(plain)} launches without graphs, {len(graphed)} with")
    layer = ["aten::linear", "rotate", "write_kv", "attend", "aten::linear", "rms_norm"]
    layer += ["aten::linear", "silu_multiply", "aten::linear", "rms_norm"]
    head = ["aten::index.Tensor", "aten::linear"]
    last = [*layer[:-1], "aten::add.Tensor", "rms_norm", *head]
    expected = ["rms_norm", *layer, *layer, *last]
    assert plain[-len(expected) :] == expected
    assert graphed == [*3 * ["graph", "write_kv", "attend"], "graph", *head]


def test_a_model_whose_head_is_not_apart_decodes_with_graphs_only(
    build_engine: BuildEngine, build_graphed: BuildEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = build_graphed("opt")
    assert [type(kind) for kind in engine.runner.graphs] == [DecodeGraphs]
    [line] = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert line == (
        "OPTForCausalLM computes steps of several tokens a sequence without CUDA graphs: its head does not call its "
        "base model"
    )
    prompts = [make_prompt(9), make_prompt(90)]
    assert generate(engine, prompts) == generate(build_engine("opt"), prompts)
    assert engine.max_run == 1


class Failing(HostGraphRecorder):
    """There is no memory any more for recordings of several graphs, once the pool has been made."""

    num_made = 0

    def __init__(self) -> None:
        super().__init__()
        Failing.num_made += 1
        self.is_full = Failing.num_made == 4  # those before it ask whether there are graphs, and measure both kinds

    def cut(self, tensors: Any) -> list[Tensor] | None:
        if self.is_full:
            raise NotRecordable("CUDA out of memory. Tried to allocate 2.00 MiB")
        return super().cut(tensors)


def test_memory_that_runs_out_while_it_warms_up_leaves_the_graphs_of_decode_steps(
    build_engine: BuildEngine, build_graphed: BuildEngine, caplog: pytest.LogCaptureFixture
) -> None:
    Failing.num_made = 0
    with caplog.at_level(logging.WARNING):
        engine = build_graphed(make_recorder=lambda _: Failing(), num_blocks=60)
    assert Failing.num_made == 4
    assert [type(kind) for kind in engine.runner.graphs] == [DecodeGraphs]
    [line] = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert line.endswith(
        "several tokens a sequence without CUDA graphs: CUDA out of memory. Tried to allocate 2.00 MiB"
    )
    assert "forward" not in vars(engine.model.module.base_model)
    prompts = [make_prompt(9), make_prompt(90)]
    assert generate(engine, prompts) == generate(build_engine(), prompts)
    engine.check_integrity(idle=True)


def test_a_step_that_fails_between_pieces_leaves_the_model_as_it_was(build_graphed: BuildEngine) -> None:
    engine = build_graphed()
    failing = add(engine, "a", make_prompt(20))

    def fail() -> None:
        raise ValueError("beside the step")

    [result] = engine.step(between_layers=fail)
    assert [failure.sequence for failure in result.failures] == [failing]
    assert "forward" not in vars(engine.model.module.base_model)
    sequence = add(engine, "b", make_prompt(20))
    drain(engine)
    assert len(output(sequence)) == 10
    engine.check_integrity(idle=True)


class Swapping(HostGraphRecorder):
    """Its recordings of several graphs have two of them in the wrong order."""

    def record(self, function: Callable[[], object]) -> list[DeviceGraph]:
        graphs = super().record(function)
        return graphs if len(graphs) < 3 else [graphs[0], graphs[2], graphs[1], *graphs[3:]]


def test_pieces_that_compute_something_else_are_not_used(
    build_engine: BuildEngine, build_graphed: BuildEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = build_graphed(make_recorder=lambda _: Swapping())
    assert [type(kind) for kind in engine.runner.graphs] == [DecodeGraphs]
    assert "without CUDA graphs: the graph of 64 tokens differs by " in caplog.text
    assert generate(engine, [make_prompt(9)]) == generate(build_engine(), [make_prompt(9)])


class Costly(HostGraphRecorder):
    """Each graph takes 100 bytes, and one for each element that its work writes."""

    def trim(self) -> int:
        return sum(100 + sum(tensor.numel() for tensor in graph._made.values()) for graph in self.graphs)


def test_sizes_that_take_too_much_memory_are_not_recorded(
    build_graphed: BuildEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build_graphed()

    def plan(most_bytes: float) -> GraphPlan:
        monkeypatch.setattr(PiecewiseGraphs, "most_bytes", most_bytes)
        return plan_graphs(engine.config, engine.model, engine.runner.backend, lambda _: Costly())

    whole, without = plan(1e9), plan(0)
    assert whole.sizes == {PiecewiseGraphs: [8, 16, 32, 64], DecodeGraphs: [1, 2, 4, 8]}
    assert without.sizes == {DecodeGraphs: [1, 2, 4, 8]}
    assert "several tokens a sequence without CUDA graphs: they would take " in caplog.text
    num_bytes = whole.num_bytes - without.num_bytes
    assert plan(num_bytes) == whole
    fewer = plan(num_bytes - 1)
    assert fewer.sizes == {PiecewiseGraphs: [8, 16, 32], DecodeGraphs: [1, 2, 4, 8]}
    assert without.num_bytes < fewer.num_bytes < whole.num_bytes


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 20))])
@pytest.mark.parametrize(
    ("settings", "is_late"),
    [({"num_blocks": 60, "speculate": "8"}, False), ({"num_blocks": 40, "max_num_batched_tokens": 13}, True)],
    ids=["drafts", "late device"],
)
@pytest.mark.cluster
def test_nothing_shows_that_steps_were_replayed(
    folder: Path, settings: dict[str, Any], is_late: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of all kinds, with grammars that force runs of tokens, predictions that are drafted, and preemptions."""
    requests, expected = predicted_requests_and_answers(folder, seed)
    patch_kernels(monkeypatch)
    recorder = HostGraphRecorder()
    engine = make_engine(folder, make_recorder=lambda _: recorder, **settings)
    if is_late:
        LateDevice(engine, seed, drafts=True)
    assert engine.max_run > 1
    assert answers(engine, requests, random.Random(seed), 0.05) == expected
    engine.check_integrity(idle=True)
    assert engine.speculator is not None
    assert engine.speculator.num_accepted > 10
    assert all(graph.num_replays for graph in pieces_of(engine)[0]._pieces)  # type: ignore[attr-defined]
    engine.close()
