"""Scored prompts: the same numbers as transformers', and bit for bit the same however a prompt is computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.engine import Engine
from tandem.engine.sampling.logprobs import MIN_LOGPROB, RowLogprobs
from tandem.engine.sequence import Phase, Sequence
from tandem.protocol.messages import PromptLogprobs
from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import EDGE_LENGTHS, add, drain, make_prompt, output
from tests.engine.test_tensor_parallel import two_ranks
from tests.support.answers import Expects
from tests.support.architectures import VOCAB, load_plain
from tests.support.late_device import LateDevice

NUM_TOP = 3


def scored(engine: Engine, name: str, prompt: list[int], num_top: int = NUM_TOP, **options: Any) -> Sequence:
    return add(engine, name, prompt, num_prompt_logprobs=num_top, **options)


def scores_of(sequence: Sequence) -> PromptLogprobs:
    assert sequence.prompt_scores is not None
    return sequence.prompt_scores.packed()


def unpacked(scores: PromptLogprobs, num_top: int = NUM_TOP) -> tuple[Any, Any, Any]:
    chosen = np.frombuffer(scores.chosen, "<f4")
    shape = (len(chosen), num_top)
    top = np.frombuffer(scores.top_logprobs, "<f4").reshape(shape)
    return chosen, top, np.frombuffer(scores.top_ids, "<u4").reshape(shape)


def alone(engine: Engine, prompt: list[int], **options: Any) -> tuple[PromptLogprobs, list[int]]:
    sequence = scored(engine, "alone", prompt, **options)
    drain(engine)
    return scores_of(sequence), output(sequence)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "gpt2"])
def test_scores_are_transformers_own(name: str, build_engine: BuildEngine, model_folder: Callable[[str], Path]) -> None:
    engine = build_engine(name, max_num_batched_tokens=17)
    plain = load_plain(model_folder(name))
    prompts = [make_prompt(length) for length in EDGE_LENGTHS]
    sequences = [scored(engine, str(i), prompt) for i, prompt in enumerate(prompts)]
    drain(engine)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        chosen, top, ids = unpacked(scores_of(sequence))
        assert len(chosen) == len(prompt) - 1
        with torch.inference_mode():
            expected = plain(torch.tensor([prompt]), use_cache=False).logits[0, :-1].float().log_softmax(-1)
        np.testing.assert_allclose(chosen, expected[range(len(chosen)), prompt[1:]], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(top, expected.topk(NUM_TOP).values, rtol=1e-4, atol=1e-4)
        of_ids = np.take_along_axis(expected.numpy(), ids.astype(np.int64), 1)  # equal ones may be in another order
        np.testing.assert_allclose(of_ids, top, rtol=1e-4, atol=1e-4)
    engine.check_integrity(idle=True)


@pytest.mark.exact_bits("the same rows are scored beside others")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_batch_nor_chunks_nor_cached_blocks_change_a_score(dtype: str, build_engine: BuildEngine) -> None:
    prompts = [make_prompt(length, seed=5) for length in EDGE_LENGTHS]
    prompts.append(prompts[-1][:33] + make_prompt(20, seed=6))
    expected = [alone(build_engine(dtype=dtype, max_num_batched_tokens=256), prompt) for prompt in prompts]
    for budget, max_num_scored in ((8, 512), (29, 512), (256, 7), (256, 512)):
        engine = build_engine(dtype=dtype, max_num_batched_tokens=budget)
        engine.scheduler.max_num_scored = max_num_scored
        for turn in range(2):  # in the second one all prompts are cached
            sequences = [scored(engine, f"{turn} {i}", prompt) for i, prompt in enumerate(prompts)]
            beside = [add(engine, f"{turn} beside {i}", make_prompt(40, seed=i), temperature=1.0) for i in range(3)]
            drain(engine)
            assert [(scores_of(s), output(s)) for s in sequences] == expected, (budget, max_num_scored, turn)
            assert all(len(output(sequence)) == 10 for sequence in beside)
        engine.check_integrity(idle=True)


def test_a_scored_prompt_is_computed_and_its_blocks_serve_others(build_engine: BuildEngine) -> None:
    engine = build_engine()
    prompt = make_prompt(60)
    for name, num_cached in (("first", 0), ("again", 0)):
        sequence = scored(engine, name, prompt)
        drain(engine)
        assert sequence.num_cached_tokens == num_cached
    assert engine.pool.num_used == 0
    assert len(engine.pool.cached_digests()) == (60 + 9) // 16, "the second time stored nothing new"
    plain = add(engine, "plain", prompt)
    drain(engine)
    assert plain.num_cached_tokens == 48


def test_a_step_scores_no_more_than_its_bound(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(max_num_batched_tokens=64)
    engine.scheduler.max_num_scored = 10
    sizes = []
    pack = engine.runner.pack
    monkeypatch.setattr(
        engine.runner, "pack", lambda *args: sizes.append(len((batch := pack(*args)).logit_rows)) or batch
    )  # type: ignore[func-returns-value]
    for i in range(3):
        scored(engine, str(i), make_prompt(45, seed=i), max_tokens=1)
    add(engine, "plain", make_prompt(200))
    drain(engine)
    assert max(sizes) <= 10 + 3
    assert sum(sizes) == 3 * 45 + 10


@pytest.mark.exact_bits("the same rows are scored beside others")
def test_a_preempted_prompt_keeps_its_scores_and_goes_on(build_engine: BuildEngine) -> None:
    prompt = make_prompt(60, seed=7)
    expected = alone(build_engine(), prompt)
    for is_evicted in (False, True):
        engine = build_engine(max_num_batched_tokens=23, num_blocks=12)
        sequence = scored(engine, "r", prompt)
        engine.step()
        engine.step()
        engine.scheduler.preempt(sequence)
        assert sequence.prompt_scores is not None
        assert sequence.prompt_scores.num_launched == 46
        if is_evicted:
            taken = engine.pool.try_allocate(12)
            assert taken is not None
            engine.pool.release(taken)
        num_scored = []
        while engine.has_work:
            num_scored += [chunk.num_scored for result in engine.step() for chunk in result.chunks]
        assert (scores_of(sequence), output(sequence)) == expected
        assert sum(num_scored) == 59 - 46, "a token is scored once"
        engine.check_integrity(idle=True)


@pytest.mark.cpu_engine("the late device computes on one")
def test_memory_pressure_changes_no_score(build_engine: BuildEngine) -> None:
    source = random.Random(3)
    prompts = [make_prompt(source.randint(20, 90), seed=i) for i in range(12)]
    expected = [alone(build_engine(), prompt, max_tokens=40) for prompt in prompts]
    engine = build_engine(num_blocks=12, max_num_batched_tokens=32)
    engine.scheduler.admission.lengths = Expects(1)
    LateDevice(engine, 0)
    sequences = [scored(engine, str(i), prompt, max_tokens=40) for i, prompt in enumerate(prompts)]
    while engine.has_work:
        assert not [failure for result in engine.step() for failure in result.failures]
        engine.check_integrity()
    assert [(scores_of(s), output(s)) for s in sequences] == expected
    assert engine.scheduler.num_preemptions > 0
    engine.check_integrity(idle=True)


@pytest.mark.cpu_engine("ranks on one machine need a GPU each")
def test_two_ranks_score_as_one(build_engine: BuildEngine) -> None:
    prompts = [make_prompt(length, seed=8) for length in (1, 17, 60)]
    expected = [alone(build_engine(), prompt) for prompt in prompts]
    with two_ranks(build_engine) as engine:
        for prompt, (scores, tokens) in zip(prompts, expected, strict=True):
            found, output = alone(engine, prompt)
            assert output == tokens
            for ours, theirs in zip(unpacked(found)[:2], unpacked(scores)[:2], strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_prompt_that_is_handed_over_is_scored_where_it_is_computed(build_engine: BuildEngine) -> None:
    engine, prompt = build_engine(), make_prompt(33)
    expected, tokens = alone(build_engine(), prompt)
    sequence = scored(engine, "r", prompt, phase=Phase.PREFILL_ONLY)
    drain(engine)
    assert scores_of(sequence) == expected
    engine.scheduler.blocks.release(sequence)
    received = engine.factory.make_sequence("d", prompt, sequence.sampling)
    received.token_ids.append(tokens[0])  # as a decode worker goes on that computes the prompt itself
    engine.add(received)
    drain(engine)
    assert output(received) == tokens
    assert scores_of(received).chosen == b""


def test_a_chunk_that_fails_to_score_ends_alone(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def log_softmax(self: RowLogprobs, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> None:
        if num_top == 2:
            raise RuntimeError("no")
        init(self, logits, token_ids, num_top)

    init = RowLogprobs.__init__
    monkeypatch.setattr(RowLogprobs, "__init__", log_softmax)
    engine = build_engine()
    add(engine, "good", make_prompt(20))
    scored(engine, "bad", make_prompt(21), num_top=2)
    kept = scored(engine, "kept", make_prompt(22), num_top=1)
    failures, outputs = [], []
    while engine.has_work:
        for result in engine.step():
            failures += [failure.sequence.request_id for failure in result.failures]
            outputs += [one.sequence.request_id for one in result.outputs]
    assert failures == ["bad"]
    assert set(outputs) == {"good", "kept"}
    assert len(unpacked(scores_of(kept), 1)[0]) == 21
    engine.check_integrity(idle=True)


def test_a_step_that_fails_is_scored_chunk_by_chunk(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [make_prompt(20), make_prompt(21)]
    expected = [alone(build_engine(), prompt)[0] for prompt in prompts]
    engine = build_engine()
    run = engine.runner.run

    def fail_together(chunks: list[Any], *args: Any) -> Any:
        if len(chunks) > 1:
            raise RuntimeError("too many")
        return run(chunks, *args)

    monkeypatch.setattr(engine.runner, "run", fail_together)
    sequences = [scored(engine, str(i), prompt) for i, prompt in enumerate(prompts)]
    drain(engine)
    assert [scores_of(sequence) for sequence in sequences] == expected


def test_equal_and_infinite_logits_are_scored_in_order_and_finite() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 5] = -torch.inf
    rows = RowLogprobs(logits, torch.tensor([7, 5]), 4)
    chosen, values, ids = rows.rows(4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert values.tolist() == [[chosen[0].item()] * 4, [rows.other(1, 0)] * 4]
    assert chosen[1] == -torch.inf
    assert rows.rows(0)[1].shape == (2, 0)
    assert MIN_LOGPROB == -9999.0
