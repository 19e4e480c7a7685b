"""Drafts change how many steps an answer takes. Nothing else may show them."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.engine import Engine
from tandem.engine.model_runner import ModelRunner
from tandem.engine.sequence import ScheduledChunk
from tandem.protocol.messages import FinishReason
from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import EXACT, add, generate, make_prompt, make_sampling, output, prompt_kv
from tests.engine.test_forced_runs import answers
from tests.engine.test_structured_output import make_engine
from tests.support.structured_requests import random_sampling

pytestmark = [pytest.mark.cluster, pytest.mark.exact_bits("nothing is drafted without")]

VOCAB_SIZE = 300
Request = dict[str, Any]


def answers_without_drafts(folder: Path, requests: list[Request]) -> list[Any]:
    engine = make_engine(folder, speculate="off")
    told = [answers(engine, [one], random.Random(0), 0.0)[0] for one in requests]
    engine.close()
    return told


def corrupted(source: random.Random, tokens: list[int]) -> tuple[int, ...]:
    """A prediction: the answer itself, or with tokens lost, added and changed, or something else."""
    kind = source.random()
    if kind < 0.2:
        return tuple(tokens)
    if kind < 0.3:
        return tuple(source.randrange(VOCAB_SIZE) for _ in range(source.choice([0, 1, 2, 700])))
    predicted: list[int] = []
    for token in tokens:
        change = source.random()
        predicted += [] if change < 0.03 else [token, 7] if change < 0.06 else [5] if change < 0.1 else [token]
    return tuple(predicted + [source.randrange(VOCAB_SIZE) for _ in range(5)])


@functools.cache
def predicted_requests_and_answers(folder: Path, seed: int) -> tuple[list[Request], list[Any]]:
    """Requests of every kind, each with a prediction that more or less is its answer."""
    source = random.Random(seed)
    requests: list[Request] = []
    for _ in range(12):
        sampling = random_sampling(source, vocab_size=VOCAB_SIZE)
        if source.random() < 0.6:
            del sampling["grammar"]
        requests.append({"num_prompt": source.randint(1, 70), "sampling": sampling})
    told = answers_without_drafts(folder, requests)
    for request, facts in zip(requests, told, strict=True):
        request["sampling"]["prediction"] = corrupted(source, [token for token, *_ in facts])
    return requests, told


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in range(2, 18))])
@pytest.mark.parametrize(
    ("settings", "share_preempted"),
    [
        ({}, 0.0),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 8}, 0.0),
        ({"num_blocks": 34}, 0.0),
        ({}, 0.1),
        ({"num_blocks": 60, "speculate": "64"}, 0.05),
        ({"speculate": "auto"}, 0.02),
        ({"speculate": "1"}, 0.0),
    ],
    ids=["batched", "budget full", "pool full", "preempted", "long drafts", "auto", "one token"],
)
def test_nothing_shows_of_drafts(folder: Path, settings: dict[str, Any], share_preempted: float, seed: int) -> None:
    requests, expected = predicted_requests_and_answers(folder, seed)
    engine = make_engine(folder, **{"speculate": "8", **settings})
    assert answers(engine, requests, random.Random(seed), share_preempted) == expected
    speculator = engine.speculator
    assert speculator is not None
    if settings.get("speculate") != "auto" and "max_num_batched_tokens" not in settings:
        assert speculator.num_drafted >= speculator.num_accepted > 10
    engine.close()


def test_a_step_has_no_more_tokens_than_it_may(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, expected = predicted_requests_and_answers(folder, 0)
    engine = make_engine(folder, max_num_batched_tokens=13, speculate="8")
    run, most = ModelRunner.run, 0

    def counting(runner: ModelRunner, chunks: list[ScheduledChunk], *others: Any) -> Any:
        nonlocal most
        most = max(most, sum(chunk.num_rows for chunk in chunks))
        return run(runner, chunks, *others)

    monkeypatch.setattr(ModelRunner, "run", counting)
    assert answers(engine, requests, random.Random(3), 0.0) == expected
    assert most == 13
    engine.close()


def answer_of(engine: Engine, prompt: list[int], **sampling: Any) -> tuple[list[int], int]:
    """The output, and how many steps it took."""
    sequence = add(engine, "r", prompt, **sampling)
    num_steps = 0
    while engine.has_work:
        num_steps += len(engine.step())
        engine.check_integrity()
    engine.check_integrity(idle=True)
    return output(sequence), num_steps


@pytest.fixture
def drafting(build_engine: BuildEngine) -> Callable[..., Engine]:
    def build(**settings: Any) -> Engine:
        return build_engine(**{"speculate": "8", **settings})

    return build


def test_a_right_prediction_saves_most_steps(build_engine: BuildEngine, drafting: Callable[..., Engine]) -> None:
    request = {"max_tokens": 90, "temperature": 1.0, "seed": 11}
    expected, num_steps = answer_of(build_engine(speculate="off"), make_prompt(20), **request)
    assert num_steps == 90
    tokens, num_steps = answer_of(drafting(), make_prompt(20), prediction=tuple(expected), **request)
    assert tokens == expected
    assert num_steps == 1 + 10  # the first token with the prompt, then eight drafted ones and a sampled one a step


@pytest.mark.parametrize("name", EXACT)
def test_every_family_answers_the_same(name: str, build_engine: BuildEngine) -> None:
    request = {"max_tokens": 60, "temperature": 0.8, "seed": 6}
    prompts = [make_prompt(length) for length in (5, 21, 40)]
    plain = build_engine(name, dtype="bfloat16", speculate="off")
    expected = generate(plain, prompts, **request)
    engine = build_engine(name, dtype="bfloat16", speculate="8")
    guesses = [tuple(token if at % 7 else 3 for at, token in enumerate(right)) for right in expected]
    sequences = [add(engine, str(i), prompts[i], prediction=guesses[i], **request) for i in range(3)]
    while engine.has_work:
        engine.step()
    assert [output(sequence) for sequence in sequences] == expected
    assert engine.speculator is not None
    assert engine.speculator.num_accepted > 60


@pytest.mark.parametrize("name", ["gpt_oss", "jetmoe"])
def test_nothing_is_drafted_where_a_row_may_depend_on_the_others(name: str, build_engine: BuildEngine) -> None:
    assert build_engine(name, speculate="8").speculator is None


def test_an_answer_is_drafted_from_the_one_before_in_its_scope_only(drafting: Callable[..., Engine]) -> None:
    request = {"max_tokens": 60, "temperature": 1.0, "seed": 5}
    engine = drafting()
    first, num_steps = answer_of(engine, make_prompt(40), **request)
    again, num_again = answer_of(engine, make_prompt(40), **request)
    assert first == again
    assert num_again < num_steps / 4
    stranger = engine.factory.make_sequence("s", make_prompt(40), make_sampling(**request), cache_salt="other")
    engine.add(stranger)
    num_stranger = 0
    while engine.has_work:
        num_stranger += len(engine.step())
    assert output(stranger) == first
    assert num_stranger == num_steps


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 10, 11, 17, 28])
def test_a_draft_ends_where_the_answer_must(
    num_tokens: int, build_engine: BuildEngine, drafting: Callable[..., Engine]
) -> None:
    expected, _ = answer_of(build_engine(speculate="off"), make_prompt(20), max_tokens=60)
    by_length, _ = answer_of(drafting(), make_prompt(20), max_tokens=num_tokens, prediction=tuple(expected))
    assert by_length == expected[:num_tokens]
    engine = drafting(max_model_len=20 + num_tokens)
    by_context, _ = answer_of(engine, make_prompt(20), max_tokens=60, prediction=tuple(expected))
    assert by_context == expected[:num_tokens]


@pytest.mark.parametrize("place", [1, 4, 8, 9, 12])
def test_a_stop_token_within_a_draft(place: int, build_engine: BuildEngine, drafting: Callable[..., Engine]) -> None:
    request = {"max_tokens": 30, "temperature": 1.0, "seed": 2}
    expected, _ = answer_of(build_engine(speculate="off"), make_prompt(20), **request)
    stop = expected[place]
    engine = drafting()
    sequence = add(engine, "r", make_prompt(20), prediction=tuple(expected), stop_token_ids=(stop,), **request)
    while engine.has_work:
        engine.step()
    assert output(sequence) == expected[: expected.index(stop) + 1]
    assert sequence.finish_reason is FinishReason.STOP
    engine.check_integrity(idle=True)


def test_the_cache_is_that_without_drafts(build_engine: BuildEngine, drafting: Callable[..., Engine]) -> None:
    request = {"max_tokens": 70, "temperature": 1.0, "seed": 4}
    plain = build_engine(speculate="off")
    expected, _ = answer_of(plain, make_prompt(21), **request)
    right_and_wrong = tuple(token if i % 9 else 3 for i, token in enumerate(expected))
    engine = drafting()
    answer_of(engine, make_prompt(21), prediction=right_and_wrong, **request)
    digests = plain.pool.cached_digests()
    assert engine.pool.cached_digests() == digests
    ours, theirs = ([one.pool.block_of(digest) for digest in digests] for one in (engine, plain))
    num_tokens = len(digests) * plain.config.block_size
    assert num_tokens >= 80
    assert prompt_kv(engine, ours, num_tokens).equal(prompt_kv(plain, theirs, num_tokens))  # type: ignore[arg-type]


def test_a_full_pool_only_shortens_drafts(build_engine: BuildEngine, drafting: Callable[..., Engine]) -> None:
    request = {"max_tokens": 44, "temperature": 1.0, "seed": 4}
    expected, _ = answer_of(build_engine(speculate="off"), make_prompt(20), **request)
    engine = drafting(num_blocks=4, speculate="30")  # 64 slots, and 63 tokens with KV
    tokens, num_steps = answer_of(engine, make_prompt(20), prediction=tuple(expected), **request)
    assert tokens == expected
    assert num_steps < 6
    assert engine.scheduler.num_preemptions == 0


def test_cancelled_while_it_drafts(drafting: Callable[..., Engine]) -> None:
    engine = drafting()
    for number in range(3):
        predicted = tuple(make_prompt(50, seed=number))
        add(engine, str(number), [*make_prompt(20), *predicted], prediction=predicted, max_tokens=100)
    for number in range(3):
        engine.step()
        engine.step()
        assert engine.abort(str(number))
        engine.check_integrity()
    engine.check_integrity(idle=True)


@pytest.mark.parametrize("num_known", [1, 2, 5, 40])
def test_another_engine_goes_on(num_known: int, build_engine: BuildEngine, drafting: Callable[..., Engine]) -> None:
    """As after a worker's death: the answer so far comes with the request."""
    request = {"max_tokens": 60, "temperature": 1.0, "seed": 9, "frequency_penalty": 0.4}
    expected, _ = answer_of(build_engine(speculate="off"), make_prompt(20), **request)
    engine = drafting()
    sampling = make_sampling(prediction=tuple(expected), **request)
    sequence = engine.factory.make_sequence("r", make_prompt(20), sampling, output_ids=expected[:num_known])
    engine.add(sequence)
    while engine.has_work:
        engine.step()
    assert output(sequence) == expected
    assert engine.speculator is not None
    assert engine.speculator.num_accepted > 10


def test_tokens_of_the_prediction_are_counted(build_engine: BuildEngine, drafting: Callable[..., Engine]) -> None:
    expected, _ = answer_of(build_engine(speculate="off"), make_prompt(20), max_tokens=41, temperature=1.0, seed=1)
    wrong = [*expected[:20], *([VOCAB_SIZE - 200] * 8)]
    engine = drafting()
    add(engine, "r", make_prompt(20), max_tokens=41, temperature=1.0, seed=1, prediction=tuple(wrong))
    outputs = [output for _ in range(60) for result in engine.step() for output in result.outputs]
    accepted, rejected = (
        sum(getattr(one, f"num_{kind}_tokens") for one in outputs) for kind in ("accepted", "rejected")
    )
    assert [one.token_id for one in outputs] == expected
    assert 15 <= accepted <= 20
    assert 1 <= rejected <= 10
    assert not engine.has_work


def test_a_step_that_fails_is_computed_again_with_its_drafts(
    build_engine: BuildEngine, drafting: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"max_tokens": 50, "temperature": 1.0, "seed": 3}
    expected, _ = answer_of(build_engine(speculate="off"), make_prompt(20), **request)
    engine = drafting()
    run, source = engine.runner.run, random.Random(1)

    def run_or_fail(chunks: list[ScheduledChunk], *others: Any) -> Any:
        logits = run(chunks, *others)
        if len(chunks) > 1 and source.random() < 0.5:
            raise ArithmeticError("a failure behind the forward")
        return logits

    monkeypatch.setattr(engine.runner, "run", run_or_fail)
    sequences = [add(engine, str(i), make_prompt(20), prediction=tuple(expected), **request) for i in range(3)]
    while engine.has_work:
        assert all(not result.failures for result in engine.step())
    assert [output(sequence) for sequence in sequences] == [expected] * 3
    engine.check_integrity(idle=True)
