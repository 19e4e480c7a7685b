"""Grammars that outputs must match. The model is random: without its grammar it writes nothing that would match."""

from __future__ import annotations

import gc
import json
import math
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import llguidance
import pytest

from tandem.engine import structured_output
from tandem.engine.engine import Engine
from tandem.engine.graphs import recorder
from tandem.engine.graphs.capture import MakeRecorder
from tandem.engine.sequence import Phase, Sequence
from tandem.engine.step_result import SequenceFailure, StepResult
from tandem.engine.structured_output import GrammarMatcher, MaskBudget
from tandem.protocol.config import EngineConfig
from tandem.protocol.grammar import GrammarError, compile_probe
from tandem.protocol.messages import FinishReason
from tests.engine.test_engine import add, make_prompt, make_sampling, output
from tests.support.device import DEVICE
from tests.support.late_device import LateDevice
from tests.support.plain_pack import check_packing
from tests.support.store_world import Clock
from tests.support.tiny_llama import EOS_TOKEN_ID, save_tiny_model, save_tiny_text_model

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
COMPACT: dict[str, Any] = {"overrides": {"whitespace_flexible": False}}
BLOCK_SIZE = 16


def json_grammar(schema: dict[str, Any]) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(schema, **COMPACT)


def regex_grammar(regex: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(regex)


COSTLY = llguidance.LLMatcher.grammar_from_lark('start: (x{1,1000}){1,1000}\nx: "a"')


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    made = make_engine(folder)
    yield made
    made.close()


def make_engine(
    folder: Path, *, num_blocks: int = 200, make_recorder: MakeRecorder = recorder.make_recorder, **settings: Any
) -> Engine:
    block_bytes = 2 * 2 * BLOCK_SIZE * 2 * 16 * 4  # layers, K and V, tokens, heads, head_dim, float32
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": BLOCK_SIZE, **settings}
    device = DEVICE if make_recorder is recorder.make_recorder else "cpu"  # those of tests record a CPU's work
    options |= {"model": str(folder), "dtype": "float32", "device": device}
    config = EngineConfig(pool_bytes=num_blocks * block_bytes, **options)
    return check_packing(Engine(config, make_recorder=make_recorder))


def run(engine: Engine) -> list[SequenceFailure]:
    """Step until nothing is left, and return the failures."""
    failures = []
    while engine.has_work:
        for result in engine.step():
            failures += result.failures
        engine.check_integrity()
    engine.check_integrity(idle=True)
    return failures


def iter_steps(engine: Engine) -> Iterator[StepResult]:
    while engine.has_work:
        yield from engine.step()


def text_of(engine: Engine, sequence: Sequence) -> str:
    """The output without the end token, which may come at the end only."""
    token_ids = output(sequence)
    assert EOS_TOKEN_ID not in token_ids[:-1]
    tokenizer = engine.structured_output.tokenizer
    return tokenizer.decode_str(token_ids[:-1] if token_ids[-1:] == [EOS_TOKEN_ID] else token_ids)


def ask(engine: Engine, name: str, grammar: str, **changes: Any) -> Sequence:
    return add(engine, name, make_prompt(20), grammar=grammar, **{"max_tokens": 200, "ignore_eos": False, **changes})


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_output_matches_its_schema(engine: Engine, temperature: float) -> None:
    asked = [ask(engine, str(i), json_grammar(PERSON), temperature=temperature, seed=i) for i in range(8)]
    assert run(engine) == []
    for sequence in asked:
        person = json.loads(text_of(engine, sequence))
        assert person.keys() == {"name", "age"}
        assert person["age"] in range(10)
        assert sequence.finish_reason is FinishReason.STOP


def test_output_ends_with_the_grammar_and_keeps_its_last_token(engine: Engine) -> None:
    sequence = ask(engine, "a", regex_grammar("ab{3}"))
    outputs = [output for result in iter_steps(engine) for output in result.outputs]
    assert text_of(engine, sequence) == "abbb"
    assert EOS_TOKEN_ID not in output(sequence)
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == (FinishReason.STOP, None)
    sequence = ask(engine, "b", regex_grammar("a?"), logit_bias={EOS_TOKEN_ID: 100}, ignore_eos=True)
    outputs = [output for result in iter_steps(engine) for output in result.outputs]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == (FinishReason.STOP, EOS_TOKEN_ID)


REQUESTS: list[dict[str, Any]] = [
    {"grammar": json_grammar(PERSON)},
    {"grammar": json_grammar(PERSON), "temperature": 1.0, "seed": 5},
    {"grammar": regex_grammar("[a-z ]{30,60}"), "temperature": 1.0, "seed": 6, "num_logprobs": 3},
    {"grammar": regex_grammar("[0-9]{40}"), "repetition_penalty": 1.4},
    {"grammar": regex_grammar("(yes|no)(, (yes|no)){0,9}"), "temperature": 1.0, "seed": 7, "top_k": 3, "min_tokens": 4},
    {},
    {"temperature": 1.0, "seed": 8},
]


@pytest.fixture(scope="module")
def tokens_alone(folder: Path) -> list[list[int]]:
    """What each of the requests gets by itself."""
    engine = make_engine(folder)
    outputs = []
    for i, changes in enumerate(REQUESTS):
        sequence = ask(engine, str(i), **{"grammar": "", "max_tokens": 60, **changes})
        assert run(engine) == []
        outputs.append(output(sequence))
    engine.close()
    return outputs


def ask_all(engine: Engine) -> list[Sequence]:
    return [ask(engine, str(i), **{"grammar": "", "max_tokens": 60, **one}) for i, one in enumerate(REQUESTS)]


@pytest.mark.parametrize("share_preempted", [0.0, 0.2])
def test_tokens_in_a_batch_and_preempted_are_those_alone(
    engine: Engine, tokens_alone: list[list[int]], share_preempted: float
) -> None:
    source, asked = random.Random(0), ask_all(engine)
    while engine.has_work:
        for result in engine.step():
            assert result.failures == []
        if engine.scheduler.running and source.random() < share_preempted:
            engine.scheduler.preempt(source.choice(engine.scheduler.running))
    assert (engine.scheduler.num_preemptions > 0) == (share_preempted > 0)
    assert [output(sequence) for sequence in asked] == tokens_alone


def test_a_worker_that_takes_over_goes_on_with_the_same_tokens(folder: Path, tokens_alone: list[list[int]]) -> None:
    first, second = make_engine(folder), make_engine(folder)
    for i, (changes, expected) in enumerate(zip(REQUESTS, tokens_alone, strict=True)):
        sampling = {"grammar": "", "max_tokens": 60, "ignore_eos": False, **changes}
        here = add(first, str(i), make_prompt(20), phase=Phase.PREFILL_ONLY, **sampling)
        run_handoff(first, here)
        there = second.factory.make_sequence(str(i), make_prompt(20), make_sampling(**sampling))
        there.token_ids.extend(output(here))
        second.add(there)
        assert run(second) == []
        assert output(there) == expected
    first.close()
    second.close()


def run_handoff(engine: Engine, sequence: Sequence) -> None:
    while engine.has_work:
        engine.step()
    engine.scheduler.blocks.release(sequence)
    engine.check_integrity(idle=True)


@pytest.mark.cpu_engine("the late device computes on one")
@pytest.mark.parametrize("seed", range(3))
def test_tokens_on_a_late_device_are_those_alone(engine: Engine, tokens_alone: list[list[int]], seed: int) -> None:
    LateDevice(engine, seed)
    source = random.Random(seed)
    asked = []
    for i, changes in enumerate(REQUESTS):
        asked.append(ask(engine, str(i), **{"grammar": "", "max_tokens": 60, **changes}))
        for _ in range(source.randrange(5)):
            engine.step()
    assert run(engine) == []
    assert [output(sequence) for sequence in asked] == tokens_alone


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: (((", "Expected token"),
        ('{"grammars": [{"json_schema": {"type": 7}}]}', "cannot be used"),
        ("", None),
        (COSTLY, "items"),
        (regex_grammar("[ab]c{20000}"), "no choice for 20000 bytes"),
        (regex_grammar("[ab]{3}" + "c" * 5000), "no choice for 5000 bytes"),
    ],
)
def test_a_grammar_that_cannot_be_used_fails_its_own_request(engine: Engine, grammar: str, message: str | None) -> None:
    bad = ask(engine, "bad", grammar, temperature=1.0, logit_bias={EOS_TOKEN_ID: -100})
    good = [ask(engine, str(i), regex_grammar("[ab]{9}")) for i in range(3)]
    failures = run(engine)
    assert [len(output(sequence)) for sequence in good] == [9, 9, 9]
    if message is None:
        assert failures == []
        return
    assert [failure.sequence for failure in failures] == [bad]
    assert isinstance(failures[0].error, GrammarError)
    assert message in str(failures[0].error)


def test_the_log_does_not_quote_a_grammar(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """What a client sends is in no log, and a grammar's error quotes the grammar."""
    ask(engine, "bad", 'start: "hunter2" (((')
    [failure] = run(engine)
    assert "hunter2" in str(failure.error)
    assert "request bad cannot go on: invalid_grammar" in caplog.text
    assert "hunter2" not in caplog.text


def test_a_model_without_a_tokenizer_refuses_grammars(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_model(tmp_path))
    ask(engine, "a", regex_grammar("a"))
    plain = ask(engine, "b", "", max_tokens=4)
    [failure] = run(engine)
    assert "no tokenizer" in str(failure.error)
    assert len(output(plain)) == 4
    engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"min_tokens": 50},
        {"ignore_eos": True},
        {"logit_bias": dict.fromkeys(range(200), -100.0), "temperature": 1.0},
        {"temperature": 1.0, "top_k": 1, "min_p": 1.0},
    ],
)
def test_a_grammar_holds_against_other_parameters(engine: Engine, changes: dict[str, Any]) -> None:
    sequence = ask(engine, "a", regex_grammar("(no|yes)?"), **changes)
    assert run(engine) == []
    assert text_of(engine, sequence) in ("", "no", "yes")


def test_the_tokenizer_is_loaded_before_there_are_requests(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder)
    monkeypatch.delattr(structured_output, "AutoTokenizer")
    sequence = ask(engine, "a", regex_grammar("[ab]{5}"))
    assert run(engine) == []
    assert len(output(sequence)) == 5
    engine.close()


def hold_masks(engine: Engine, grammar: str, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let masks of this grammar wait for the event. Call it before a sequence has the grammar."""
    may_go_on, make_matcher = threading.Event(), engine.structured_output.matcher

    def matcher(text: str, order: float, root: bytes) -> GrammarMatcher:
        made = make_matcher(text, order, root)
        follow = made.follow

        def follow_late(new_ids: list[int]) -> Any:
            if threading.current_thread() is not threading.main_thread():  # so a mask is computed
                assert may_go_on.wait(60)
            return follow(new_ids)

        if text == grammar:
            monkeypatch.setattr(made, "follow", follow_late)
        return made

    monkeypatch.setattr(engine.structured_output, "matcher", matcher)
    return may_go_on


def run_other(engine: Engine) -> None:
    """Let a request without a grammar begin and end beside what is there."""
    other = ask(engine, "other", "", max_tokens=30, ignore_eos=True)
    while other.finish_reason is None:
        engine.step()
        engine.check_integrity()


@pytest.mark.parametrize("num_prompt", [1, 20, 150])  # one token of it is left out, and computed again
def test_others_go_on_beside_a_slow_mask(engine: Engine, monkeypatch: pytest.MonkeyPatch, num_prompt: int) -> None:
    slow = regex_grammar("[a-z]{9}")
    expected = ask(engine, "alone", slow, temperature=1.0, seed=1)
    assert run(engine) == []
    may_go_on = hold_masks(engine, slow, monkeypatch)
    sampling = {"grammar": slow, "max_tokens": 200, "ignore_eos": False, "temperature": 1.0, "seed": 1}
    late = add(engine, "late", make_prompt(num_prompt), **sampling)
    run_other(engine)
    assert output(late) == []
    assert late.num_computed_tokens == num_prompt - 1
    may_go_on.set()
    assert run(engine) == []
    assert re.fullmatch("[a-z]{9}", text_of(engine, late))
    if num_prompt == 20:
        assert output(late) == output(expected)


def test_an_aborted_sequence_whose_mask_is_late_leaves_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = regex_grammar("[a-z]{9}")
    may_go_on = hold_masks(engine, grammar, monkeypatch)
    sequence = ask(engine, "a", grammar)
    while sequence.matcher is None or not sequence.matcher.is_slow:
        engine.step()
    assert engine.abort("a")
    engine.check_integrity(idle=not engine.has_work)
    may_go_on.set()
    assert run(engine) == []


ALTERNATIVES = "|".join(f"(ab){{{2000 + i}}}q{i}" for i in range(1000))


@pytest.mark.parametrize("start", ["", "fixed: "])
@pytest.mark.parametrize("regex", ["[xy](ab){20000}", "[xy]" + "lorem ipsum " * 4000, f"[xy]({ALTERNATIVES})"])
def test_no_step_looks_for_a_long_end(engine: Engine, monkeypatch: pytest.MonkeyPatch, start: str, regex: str) -> None:
    """That takes as long as the text is. So it is done beside the steps, and a probe gives up."""
    threads, grammar = set(), regex_grammar(start + regex)
    num_forced_bytes = structured_output.num_forced_bytes

    def note(matcher: llguidance.LLMatcher) -> int:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        return num_forced_bytes(matcher)

    monkeypatch.setattr(structured_output, "num_forced_bytes", note)
    sequence = ask(engine, "a", grammar)
    other = ask(engine, "other", "", max_tokens=30, ignore_eos=True)
    [failure] = run(engine)
    assert failure.sequence is sequence
    assert re.search("leaves no choice for|too many expressions", str(failure.error))
    assert len(output(other)) == 30
    assert threads <= {"token-masks", "slow-token-masks"}
    tokenizer = engine.structured_output.tokenizer
    probe = compile_probe(tokenizer, grammar)
    assert probe is not None
    probe.consume_tokens(tokenizer.tokenize_str(start + "x"))
    assert not probe.is_error()
    assert len(probe.compute_ff_bytes()) <= 4000


@pytest.fixture
def all_costly(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Each mask waits for the budget, and takes a second of it. The clock moves only when the test moves it."""
    clock = Clock()
    monkeypatch.setattr(structured_output, "_COSTLY_S", -1.0)
    monkeypatch.setattr(structured_output, "_MAX_COST_S", math.inf)
    monkeypatch.setattr(engine.structured_output, "_budget", MaskBudget(clock))
    note_cost = GrammarMatcher._note_cost
    monkeypatch.setattr(GrammarMatcher, "_note_cost", lambda matcher, _: note_cost(matcher, 1.0))
    return clock


def test_others_go_on_while_costly_masks_wait(engine: Engine, all_costly: Clock) -> None:
    costly = [ask(engine, str(i), regex_grammar("[a-z]{9}"), temperature=1.0, seed=i) for i in range(4)]
    other = ask(engine, "other", "", max_tokens=400, ignore_eos=True)
    matchers = [sequence.matcher for sequence in costly if sequence.matcher is not None]
    for matcher in matchers:
        matcher._compilation.compiled.result(60)
    for _ in range(40):
        engine.step()
        wait([matcher.pending.rows for matcher in matchers if matcher.pending is not None])
        engine.check_integrity()
    # First masks are free, because nobody knows yet what they cost. One more takes all that was saved.
    assert 1 < sum(len(output(sequence)) for sequence in costly) <= 5
    assert len(output(other)) > 30
    engine.abort("other")
    assert run(engine) == []  # nobody else is here, so they need no budget
    assert all(re.fullmatch("[a-z]{9}", text_of(engine, sequence)) for sequence in costly)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_the_same_however_long_masks_wait(
    engine: Engine, all_costly: Clock, tokens_alone: list[list[int]], seed: int
) -> None:
    source, asked = random.Random(seed), ask_all(engine)
    while engine.has_work:
        for result in engine.step():
            assert result.failures == []
        all_costly.now += source.choice([0.0, 0.1, 8.0])
        if engine.scheduler.running and source.random() < 0.1:
            engine.scheduler.preempt(source.choice(engine.scheduler.running))
        engine.check_integrity()
    assert [output(sequence) for sequence in asked] == tokens_alone


def test_forced_tokens_have_room_while_the_mask_after_them_waits(engine: Engine, all_costly: Clock) -> None:
    costly = ask(engine, "a", regex_grammar("[xy]" + "c" * 3 * BLOCK_SIZE + "[xy]"), temperature=1.0)
    ask(engine, "other", "", max_tokens=60, ignore_eos=True)
    assert run(engine) == []
    assert re.fullmatch("[xy]c{48}[xy]", text_of(engine, costly))


def test_a_budget_goes_to_those_who_had_least(engine: Engine) -> None:
    clock = Clock()
    budget = MaskBudget(clock)
    small, large = (engine.structured_output.matcher(regex_grammar(name)) for name in ("a", "b"))
    taken = ""
    for _ in range(2000):
        small.unpaid_s, large.unpaid_s = 0.01, 0.04
        for matcher in budget.take([large, small], is_limited=True):
            taken += "s" if matcher is small else "l"
        clock.now += 0.01
    assert 3.8 < taken.count("s") / taken.count("l") < 4.2
    cost_s = 0.01 * taken.count("s") + 0.04 * taken.count("l")
    assert cost_s == pytest.approx(20 * structured_output._BUDGET_SHARE, abs=0.1)
    late = engine.structured_output.matcher(regex_grammar("c"))
    late.unpaid_s = small.unpaid_s = 0.01
    clock.now += 100
    assert budget.take([small, late], is_limited=True)[0] is late
    assert late.turn_s > small.turn_s - 0.1, "its place would let it go first for as long as the others were here"
    small.unpaid_s = large.unpaid_s = 5.0
    assert set(budget.take([large, small], is_limited=False)) == {large, small}  # nobody else is delayed


def test_a_grammar_that_costs_too_much_ends_its_own_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "_MAX_COST_S", -0.015)
    bad = ask(engine, "bad", regex_grammar("[ab]{9}"))
    other = ask(engine, "other", "", max_tokens=30, ignore_eos=True)
    [failure] = run(engine)
    assert (failure.sequence, type(failure.error)) == (bad, GrammarError)
    assert "Make it less ambiguous" in str(failure.error)
    assert bad.num_computed_prompt_tokens >= bad.num_prompt_tokens - 1  # the last one waited for the mask
    assert bad.matcher is not None
    assert bad.matcher.total_cost_s > 0
    assert len(output(other)) == 30


# Compiling.

HeldCompiler = tuple[threading.Event, list[str]]


@pytest.fixture
def held_compiler(monkeypatch: pytest.MonkeyPatch) -> HeldCompiler:
    """Grammars are compiled once the event is set; the list has them in their order."""
    may_go_on = threading.Event()
    compiled: list[str] = []
    compile_grammar = structured_output.compile_grammar

    def slow(tokenizer: Any, grammar: str) -> Any:
        assert may_go_on.wait(60)
        compiled.append(grammar)
        return compile_grammar(tokenizer, grammar)

    monkeypatch.setattr(structured_output, "compile_grammar", slow)
    return may_go_on, compiled


def test_others_go_on_while_a_grammar_is_compiled(engine: Engine, held_compiler: HeldCompiler) -> None:
    may_go_on, _ = held_compiler
    slow_one = ask(engine, "slow", regex_grammar("[ab]{5}"))
    run_other(engine)
    assert slow_one.num_computed_tokens == slow_one.num_prompt_tokens - 1
    assert output(slow_one) == []
    may_go_on.set()
    assert run(engine) == []
    assert re.fullmatch("[ab]{5}", text_of(engine, slow_one))


def test_grammars_are_compiled_in_the_order_of_their_requests(engine: Engine, held_compiler: HeldCompiler) -> None:
    """A tenant with many grammars has later orders than one with a few: a flood does not delay others."""
    may_go_on, compiled = held_compiler
    orders = [0.0, *(float(i) for i in range(1, 20)), 0.5]  # the first one is being compiled when the others come
    grammars = [regex_grammar(f"a{{{i + 1}}}") for i in range(len(orders))]
    matchers = [engine.structured_output.matcher(one, order) for one, order in zip(grammars, orders, strict=True)]
    matchers.append(engine.structured_output.matcher(grammars[7], 0.7))  # a more urgent request has the same one
    may_go_on.set()
    for matcher in matchers:
        assert matcher.follow([])
    assert compiled == [grammars[i] for i in (0, 20, 7, *(i for i in range(1, 20) if i != 7))]


def test_grammars_of_requests_that_have_left_are_not_compiled(engine: Engine, held_compiler: HeldCompiler) -> None:
    may_go_on, compiled = held_compiler
    grammars = [regex_grammar(f"a{{{i + 1}}}") for i in range(200)]
    asked = [ask(engine, str(i), grammar) for i, grammar in enumerate(grammars)]
    never_queued = engine.factory.make_sequence("101", make_prompt(20), make_sampling(grammar=grammars[101]))
    engine.step()
    for i, sequence in enumerate(asked):
        if i not in (0, 100, 199):  # of 0 the compiler is at work
            assert engine.abort(sequence.request_id)
    del asked, sequence, never_queued
    may_go_on.set()
    assert run(engine) == []
    assert compiled == [grammars[0], grammars[100], grammars[199]]


def test_a_panic_of_the_compiler_ends_its_own_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As Rust's panics come to Python."""

    def panic(*_: Any) -> Any:
        raise PanicException("index out of bounds")

    with monkeypatch.context() as patch:
        patch.setattr(structured_output, "compile_grammar", panic)
        ask(engine, "bad", regex_grammar("[ab]{3}"))
        [failure] = run(engine)
    assert isinstance(failure.error, GrammarError)
    good = ask(engine, "good", regex_grammar("[ab]{4}"))
    assert run(engine) == []
    assert len(output(good)) == 4


def test_equal_grammars_of_a_tenant_are_compiled_once(engine: Engine, held_compiler: HeldCompiler) -> None:
    """Or another tenant would learn by time what was used."""
    may_go_on, compiled = held_compiler
    may_go_on.set()
    for i in range(4):
        ask(engine, str(i), regex_grammar("[ab]{5}"))
    ask(engine, "last", regex_grammar("[ab]{6}"))
    assert run(engine) == []
    assert compiled == [regex_grammar("[ab]{5}"), regex_grammar("[ab]{6}")]
    for salt in ("a", "a", "b"):
        asked = make_sampling(grammar=regex_grammar("ab"), max_tokens=1)
        engine.add(engine.factory.make_sequence(salt, make_prompt(20), asked, cache_salt=salt))
        assert run(engine) == []
    assert compiled[2:] == [regex_grammar("ab")] * 2


def test_old_grammars_are_forgotten(engine: Engine, held_compiler: HeldCompiler) -> None:
    may_go_on, compiled = held_compiler
    may_go_on.set()

    def use(*grammars: str) -> None:
        for grammar in grammars:
            ask(engine, grammar, grammar, max_tokens=1)
        assert run(engine) == []
        gc.collect()

    use(*(regex_grammar(f"a{{{i + 1}}}") for i in range(structured_output.MAX_COMPILED + 20)))
    forgotten, kept = compiled[:20], compiled[20:]
    assert len(kept) == structured_output.MAX_COMPILED
    compiled.clear()
    use(*kept)
    assert compiled == []
    use(*forgotten)
    assert compiled == forgotten
