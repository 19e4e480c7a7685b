from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.engine import Engine
from tandem.engine.sampling import sampler
from tandem.engine.sequence import Phase, ScheduledChunk, Sequence
from tandem.engine.step_result import SequenceFailure
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError, ContextLengthExceeded, RequestError
from tandem.protocol.messages import FinishReason, WorkerPriority
from tandem.protocol.sampling import SamplingParams
from tests.engine.conftest import BuildEngine
from tests.support.answers import Expects
from tests.support.architectures import EOS, LONGROPE, REFUSED, SERVED, VOCAB, WRAPPERS, load_plain, save_model
from tests.support.device import IS_GPU

EDGE_LENGTHS = (1, 15, 16, 17, 33, 60)
GEMMA4 = pytest.param("gemma4", marks=pytest.mark.cpu_engine("its heads are wider than kernels of GPUs take"))
EXACT = ("llama", "gemma2", "phi3", "gpt2", "mixtral", "qwen3_moe")


def make_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def make_sampling(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, "temperature": 0, "ignore_eos": True, **changes})


def add(engine: Engine, name: str, prompt: list[int], phase: Phase = Phase.WHOLE, **sampling: Any) -> Sequence:
    sequence = engine.factory.make_sequence(name, prompt, make_sampling(**sampling), phase=phase)
    engine.add(sequence)
    return sequence


def drain(engine: Engine) -> None:
    while engine.has_work:
        if not engine.step():  # a GPU is not done when the call returns
            assert IS_GPU, "stuck"
            engine.stream.wait(engine.stream.record())
        engine.check_integrity()


def output(sequence: Sequence) -> list[int]:
    return sequence.output_ids


def generate(engine: Engine, prompts: Iterable[list[int]], **sampling: Any) -> list[list[int]]:
    """Run all prompts together and return their outputs. Checks that nothing is left behind."""
    sequences = [add(engine, str(i), prompt, **sampling) for i, prompt in enumerate(prompts)]
    drain(engine)
    engine.check_integrity(idle=True)
    return [output(sequence) for sequence in sequences]


def prompt_kv(engine: Engine, blocks: list[int], num_tokens: int) -> Tensor:
    """[num_layers, 2, num_tokens, heads, head_dim] of a sequence's first tokens."""
    return engine.kv.read(blocks).permute(2, 3, 0, 4, 1, 5).flatten(2, 3)[:, :, :num_tokens]


@pytest.mark.parametrize("name", [*(one for one in SERVED if one != "gemma4"), GEMMA4, *WRAPPERS])
def test_greedy_tokens_equal_transformers(
    name: str, build_engine: BuildEngine, model_folder: Callable[[str], Path]
) -> None:
    prompts = [make_prompt(length) for length in EDGE_LENGTHS]
    outputs = generate(build_engine(name, num_blocks=None, max_num_batched_tokens=17), prompts)
    plain = load_plain(model_folder(name))
    for prompt, tokens in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = plain(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_at_load(name: str, tmp_path: Path) -> None:
    family, error = REFUSED[name]
    folder = save_model(tmp_path / "model", family)
    with pytest.raises(ConfigError, match=error):
        Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu", pool_bytes=4 << 20))


def test_longrope_is_served_as_far_as_its_frequencies_are_fixed(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", LONGROPE)
    assert Engine(EngineConfig(model=str(folder), device="cpu", pool_bytes=4 << 20)).config.max_model_len == 64
    with pytest.raises(ConfigError, match="own context of 64"):
        Engine(EngineConfig(model=str(folder), device="cpu", pool_bytes=4 << 20, max_model_len=65))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/nowhere"}, "has no config.json"),
        ({"pool_bytes": 1}, "at least two are needed"),
        ({"pool_bytes": 1 << 49}, "does not fit"),
        ({"max_model_len": 513}, "own context of 512"),
        ({"pool_bytes": 100_000, "max_model_len": 512}, "does not fit the KV pool"),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, Any], message: str, model_folder: Callable[[str], Path]) -> None:
    options = {"model": str(model_folder("llama")), "device": "cpu", "dtype": "float32", **settings}
    with pytest.raises(ConfigError, match=message):
        Engine(EngineConfig(**options))


def test_a_small_pool_shortens_the_context(build_engine: BuildEngine) -> None:
    engine = build_engine(num_blocks=3)
    assert engine.config.max_model_len == 48
    [tokens] = generate(engine, [make_prompt(47)])
    assert len(tokens) == 1
    with pytest.raises(ContextLengthExceeded, match="48 tokens"):
        engine.factory.make_sequence("r", make_prompt(48), make_sampling())
    with pytest.raises(ContextLengthExceeded, match="0 tokens"):
        engine.factory.make_sequence("r", [], make_sampling())


def test_tokens_are_kept_where_the_garbage_collector_does_not_look(build_engine: BuildEngine) -> None:
    sequence = build_engine().factory.make_sequence("r", make_prompt(30), make_sampling(), output_ids=[7, 8])
    assert (sequence.token_ids.tolist(), sequence.output_ids) == ([*make_prompt(30), 7, 8], [7, 8])
    assert not any(isinstance(visited, int) for visited in gc.get_referents(sequence.token_ids))
    assert sequence.token_ids.itemsize == 4


@pytest.mark.parametrize(
    "wrong", [{"stop_token_ids": (VOCAB,)}, {"logit_bias": {-1: 1.0}}, {"prediction": (4, VOCAB)}, {}]
)
def test_ids_outside_the_vocabulary_are_refused_before_a_step(wrong: dict[str, Any], build_engine: BuildEngine) -> None:
    engine = build_engine()
    with pytest.raises(RequestError, match="this model's are 0 to 199"):
        engine.factory.make_sequence("r", [5] if wrong else [5, VOCAB], make_sampling(**wrong))


def tokens_and_kv(engine: Engine, prompts: list[list[int]]) -> dict[int, tuple[list[int], Tensor]]:
    """Run all prompts together: what each was answered, and its KV as late as its blocks are still held."""
    sequences = [add(engine, str(i), prompt) for i, prompt in enumerate(prompts)]
    held: dict[str, Tensor] = {}
    while engine.has_work:
        for sequence in engine.sequences.values():
            if sequence.num_output_tokens == 9:
                held[sequence.request_id] = prompt_kv(engine, sequence.blocks, sequence.num_computed_tokens)
        assert engine.step()
    engine.check_integrity(idle=True)
    return {i: (output(sequence), held[str(i)]) for i, sequence in enumerate(sequences)}


@pytest.mark.exact_bits("the same tokens are computed beside others")
@pytest.mark.parametrize(
    ("name", "dtype", "weights"),
    [
        *((name, "bfloat16", "as-loaded") for name in EXACT),
        ("llama", "float32", "as-loaded"),
        *(pytest.param(name, "float32", "as-loaded", marks=pytest.mark.slow) for name in EXACT[1:]),
        *(("llama", dtype, "int8") for dtype in ("float32", "bfloat16")),
    ],
)
def test_batch_and_chunks_change_neither_tokens_nor_kv(
    name: str, dtype: str, weights: str, build_engine: BuildEngine
) -> None:
    prompts = [make_prompt(length, seed=2) for length in EDGE_LENGTHS]
    budgets = (8, 29, 256)
    options = {"dtype": dtype, "weights": weights, "speculate": "off"}
    results = [tokens_and_kv(build_engine(name, max_num_batched_tokens=one, **options), prompts) for one in budgets]
    engine = build_engine(name, max_num_batched_tokens=256, **options)
    for i, prompt in enumerate(prompts):
        tokens, kv = tokens_and_kv(engine, [prompt])[0]
        for budget, found in zip(budgets, results, strict=True):
            assert found[i][0] == tokens, f"prompt of {len(prompt)}, budget {budget}"
            assert torch.equal(found[i][1], kv), f"KV of the prompt of {len(prompt)}, budget {budget}"


@pytest.mark.exact_bits("the same tokens are computed beside others")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [16, 17, 32, 33, 60])
def test_a_prefix_hit_gives_what_no_hit_gives(length: int, dtype: str, build_engine: BuildEngine) -> None:
    engine = build_engine(dtype=dtype)
    prompt = make_prompt(length, seed=3)
    [first] = generate(engine, [prompt])
    again = add(engine, "again", prompt)
    drain(engine)
    assert again.num_cached_tokens == (length - 1) // 16 * 16
    assert output(again) == first
    longer = prompt + first + make_prompt(5)
    priority = add(engine, "turn", longer)
    drain(engine)
    assert priority.num_cached_tokens == (length + 9) // 16 * 16  # all but the last output token has KV
    assert [output(priority)] == generate(build_engine(dtype=dtype), [longer])
    engine.check_integrity(idle=True)


def test_tenants_do_not_share_a_prefix(build_engine: BuildEngine) -> None:
    engine = build_engine()
    prompt = make_prompt(40)
    hits = []
    for i, salt in enumerate(("a", "b", "a", "")):
        sequence = engine.factory.make_sequence(str(i), prompt, make_sampling(), cache_salt=salt)
        engine.add(sequence)
        drain(engine)
        hits.append(sequence.num_cached_tokens)
    assert hits == [0, 0, 32, 0]
    engine.check_integrity(idle=True)


@pytest.mark.exact_bits("the same tokens are computed beside others")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption_changes_nothing(dtype: str, temperature: float, build_engine: BuildEngine) -> None:
    prompts = [make_prompt(length, seed=4) for length in (15, 16, 17, 14)]
    options = {"max_tokens": 30, "temperature": temperature, "seed": 5}
    tight = build_engine(dtype=dtype, num_blocks=7)
    tight.scheduler.admission.lengths = Expects(1)
    outputs = generate(tight, prompts, **options)
    assert tight.scheduler.num_preemptions > 0
    assert outputs == generate(build_engine(dtype=dtype), prompts, **options)


@pytest.mark.exact_bits("the same tokens are computed beside others")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_being_overtaken_changes_nothing(dtype: str, build_engine: BuildEngine) -> None:
    prompts = [make_prompt(length, seed=6) for length in (60, 33, 47)]
    engine = build_engine(dtype=dtype, max_num_batched_tokens=16)
    sequences = []
    for i, prompt in enumerate(prompts):  # each overtakes those before it
        priority = WorkerPriority(order=-float(i), max_step_tokens=7)
        sequences.append(engine.factory.make_sequence(str(i), prompt, make_sampling(), priority=priority))
        engine.add(sequences[-1])
        engine.step()
    assert [sequence.num_computed_tokens for sequence in sequences] == [7, 7, 7], "all are begun"
    drain(engine)
    engine.check_integrity(idle=True)
    alone = [generate(build_engine(dtype=dtype), [prompt])[0] for prompt in prompts]
    assert [output(sequence) for sequence in sequences] == alone


@pytest.mark.exact_bits("the same tokens are computed beside others")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", EDGE_LENGTHS)
def test_received_blocks_continue_exactly(length: int, dtype: str, build_engine: BuildEngine) -> None:
    prompt = make_prompt(length, seed=6)
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 20}
    [expected] = generate(build_engine(dtype=dtype), [prompt], **options)
    sender, receiver = build_engine(dtype=dtype, max_num_batched_tokens=8), build_engine(dtype=dtype)
    sent = add(sender, "r", prompt, phase=Phase.PREFILL_ONLY, **options)
    drain(sender)
    assert sent.finish_reason is None
    assert sender.pool.num_used == len(sent.blocks) == -(-length // 16)
    received = receiver.factory.make_sequence("r", prompt, make_sampling(**options))
    received.blocks += receiver.pool.try_allocate(len(sent.blocks)) or []
    receiver.kv.write(received.blocks, sender.kv.read(sent.blocks))
    received.num_computed_tokens = length
    received.token_ids.append(output(sent)[0])
    receiver.add(received)
    generate(receiver, [make_prompt(20, seed=7)])  # and another one beside it
    assert output(received) == expected
    sender.scheduler.blocks.release(sent)
    sender.check_integrity(idle=True)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("phase", Phase)
def test_abort_in_any_phase_frees_everything(num_steps: int, phase: Phase, build_engine: BuildEngine) -> None:
    engine = build_engine(max_num_batched_tokens=16)
    sequence = add(engine, "r", make_prompt(60), phase=phase)
    other = add(engine, "other", make_prompt(5))
    for _ in range(num_steps):
        engine.step()
    if "r" in engine.sequences:
        assert engine.abort("r")
        assert sequence.finish_reason is FinishReason.ABORT
    else:  # prefilled: it left with its first token
        engine.scheduler.blocks.release(sequence)
    assert not engine.abort("r")
    drain(engine)
    assert [output(other)] == generate(build_engine(), [make_prompt(5)])
    engine.check_integrity(idle=True)


def test_max_tokens_is_exact_and_gives_the_beginning_of_a_longer_answer(build_engine: BuildEngine) -> None:
    engine = build_engine()
    answers = []
    for max_tokens in (12, 7, 2, 1):
        sequence = add(engine, f"r{max_tokens}", make_prompt(9), max_tokens=max_tokens)
        drain(engine)
        assert (sequence.num_output_tokens, sequence.finish_reason) == (max_tokens, FinishReason.LENGTH)
        answers.append(output(sequence))
    assert [answers[0][: len(one)] for one in answers] == answers


def test_a_full_context_ends_the_sequence(build_engine: BuildEngine) -> None:
    engine = build_engine(max_model_len=20)
    sequence = add(engine, "r", make_prompt(17), max_tokens=50)
    drain(engine)
    assert (len(sequence.token_ids), sequence.finish_reason) == (20, FinishReason.LENGTH)
    engine.check_integrity(idle=True)


def test_stop_tokens_end_exactly_there(build_engine: BuildEngine) -> None:
    prompt = make_prompt(9)
    [tokens] = generate(build_engine(), [prompt])
    stop = next(token for i, token in enumerate(tokens) if i >= 3 and token not in tokens[:i])
    engine = build_engine()
    sequence = add(engine, "r", prompt, stop_token_ids=(stop,))
    drain(engine)
    assert output(sequence) == tokens[: tokens.index(stop) + 1]
    assert sequence.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("ignore_eos", "min_tokens", "expected"), [(False, 0, 1), (True, 0, 5), (False, 3, 4)])
def test_eos_ends_unless_ignored_or_too_early(
    ignore_eos: bool, min_tokens: int, expected: int, build_engine: BuildEngine
) -> None:
    engine = build_engine()
    options = {"ignore_eos": ignore_eos, "min_tokens": min_tokens, "max_tokens": 5}
    sequence = add(engine, "r", make_prompt(9), logit_bias={EOS: 100.0}, **options)
    drain(engine)
    assert sequence.num_output_tokens == expected
    assert (EOS in output(sequence)[:min_tokens]) is False
    assert sequence.finish_reason is (FinishReason.LENGTH if ignore_eos else FinishReason.STOP)


@pytest.mark.cpu_engine("each step has its results when it returns")
def test_a_step_tells_what_it_did(build_engine: BuildEngine) -> None:
    engine = build_engine(max_num_batched_tokens=24)
    add(engine, "a", make_prompt(10))
    [first] = engine.step()
    assert (first.stats.num_prefill_tokens, first.stats.num_decode_seqs) == (10, 0)
    assert first.stats.prefill_attention == 50.0
    add(engine, "b", make_prompt(40))
    [second] = engine.step()
    assert (second.stats.num_prefill_tokens, second.stats.num_decode_seqs) == (23, 1)
    assert second.stats.num_decode_kv_tokens == 11
    assert [out.sequence.request_id for out in second.outputs] == ["a"]
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_waiting_tokens, load.num_kv_tokens) == (2, 0, 17, 34)
    drain(engine)
    engine.check_integrity(idle=True)


def fail_for(engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    """Make every forward pass that computes tokens of this request raise."""
    run = engine.runner.run

    def run_or_fail(chunks: list[ScheduledChunk], *hooks: Callable[[], None]) -> Tensor | None:
        if any(chunk.sequence.request_id == name for chunk in chunks):
            raise error
        return run(chunks, *hooks)

    monkeypatch.setattr(engine.runner, "run", run_or_fail)


def run_out(engine: Engine) -> list[SequenceFailure]:
    failures = []
    while engine.has_work:
        results = engine.step()
        assert results, "stuck"
        failures += [failure for result in results for failure in result.failures]
        engine.check_integrity()
    return failures


@pytest.mark.cpu_engine("each step has its results when it returns")
@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("where", ["forward", "sampling", "advancing", "appending"])
def test_a_sequence_that_raises_ends_alone(
    where: str, phase: Phase, build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(max_num_batched_tokens=32)
    error = ValueError("odd")

    def raise_for_bad(owner: Any, name: str, sequence_of: Callable[..., Sequence]) -> None:
        original = getattr(owner, name)

        def raise_or_go_on(*arguments: Any) -> Any:
            if sequence_of(*arguments).request_id == "bad":
                raise error
            return original(*arguments)

        monkeypatch.setattr(owner, name, raise_or_go_on)

    if where == "forward":
        fail_for(engine, monkeypatch, "bad", error)
    elif where == "sampling":
        monkeypatch.setattr(sampler, "plan_row", lambda *_: 1 / 0)
    elif where == "advancing":
        raise_for_bad(engine.scheduler.blocks, "advance", lambda chunk: chunk.sequence)
    else:
        raise_for_bad(engine, "_take_tokens", lambda sequence, *_: sequence)
    prompts = [make_prompt(length) for length in (5, 21, 40)]
    good = [add(engine, str(i), prompt) for i, prompt in enumerate(prompts)]
    bad = add(engine, "bad", make_prompt(19), phase=phase, num_logprobs=1)  # not plain greedy: it is sampled by itself
    failures = run_out(engine)
    assert [failure.sequence.request_id for failure in failures] == ["bad"]
    assert bad.finish_reason is FinishReason.ABORT
    if phase is Phase.PREFILL_ONLY:  # its blocks are the handoff's
        engine.scheduler.blocks.release(bad)
    engine.check_integrity(idle=True)
    monkeypatch.undo()
    assert [output(sequence) for sequence in good] == generate(build_engine(), prompts)


@pytest.mark.cpu_engine("each step has its results when it returns")
def test_failures_of_all_in_turn_are_the_engines(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine()
    run = engine.runner.run
    error = RuntimeError("out of memory")

    def fail(*_: object) -> None:
        raise error

    for _ in range(4):  # never three in a row
        monkeypatch.setattr(engine.runner, "run", fail)
        for name in ("a", "b"):
            add(engine, name, make_prompt(9))
            assert len(run_out(engine)) == 1
        monkeypatch.setattr(engine.runner, "run", run)
        generate(engine, [make_prompt(9)])
    monkeypatch.setattr(engine.runner, "run", fail)
    for name in ("a", "b"):
        add(engine, name, make_prompt(9))
        assert len(run_out(engine)) == 1
    add(engine, "c", make_prompt(9))
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()


@pytest.mark.parametrize("where", ["forward", "sampling"])
def test_an_error_of_the_device_is_raised_at_once(
    where: str, build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine()
    error = torch.AcceleratorError("CUDA error: device-side assert triggered")

    def fail(*_: Any) -> None:
        raise error

    if where == "forward":
        monkeypatch.setattr(engine.runner, "run", fail)
    else:
        monkeypatch.setattr(sampler, "plan_row", fail)
    add(engine, "r", make_prompt(9), num_logprobs=1)
    with pytest.raises(torch.AcceleratorError):
        engine.step()
