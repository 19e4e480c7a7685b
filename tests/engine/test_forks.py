"""Several answers to one prompt: it is computed once, and what they share is stored once. No token may show it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.block_pool import BlockPool
from tandem.engine.engine import Engine
from tandem.engine.sequence import Phase, Sequence
from tandem.engine.sequence_blocks import SequenceBlocks
from tandem.engine.step_result import SequenceOutput
from tandem.engine.token_array import token_array
from tandem.protocol.messages import FinishReason, Fork
from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import make_prompt, make_sampling
from tests.engine.test_structured_output import make_engine
from tests.support.answers import Expects
from tests.support.forking import fork_sequence
from tests.support.structured_requests import FORCING, GRAMMARS

pytestmark = pytest.mark.cluster

BLOCK_SIZE = 16
DRAWN = {"temperature": 1.0, "seed": 5}
Told = dict[str, list[SequenceOutput]]


def make_forks(num_forks: int) -> list[Fork]:
    return [Fork(f"r-{number}", 100 + number) for number in range(1, num_forks + 1)]


def add_forked(
    engine: Engine, prompt: list[int], num_answers: int, phase: Phase = Phase.WHOLE, **sampling: Any
) -> Sequence:
    """A request for several answers."""
    forks = make_forks(num_answers - 1)
    sequence = fork_sequence(engine, "r", prompt, make_sampling(**{**DRAWN, **sampling}), forks, phase=phase)
    engine.add(sequence)
    return sequence


def step(engine: Engine, told: Told) -> None:
    for result in engine.step():
        assert result.failures == []
        for output in result.outputs:
            assert output.offset == len(told.setdefault(output.sequence.request_id, []))
            told[output.sequence.request_id].append(output)
    engine.check_integrity()
    check_slots(engine)


def check_slots(engine: Engine) -> None:
    """The slots in the load are those that are found one by one."""
    slots, live = engine.load().pool_slots, [one for one in engine.sequences.values() if one.blocks]
    if any(one.phase is Phase.PREFILL_ONLY for one in live) or not live:
        return
    written = {(s.blocks[i // BLOCK_SIZE], i % BLOCK_SIZE) for s in live for i in range(s.num_computed_tokens)}
    assert slots.written == len(written)
    assert slots.written + slots.reserved + slots.waste == engine.pool.num_used * BLOCK_SIZE
    assert slots.waste < len(live) * BLOCK_SIZE
    num_unwritten = sum(len(s.token_ids) - s.num_computed_tokens for s in live)
    assert slots.reserved <= num_unwritten


def drain(engine: Engine, told: Told) -> Told:
    while engine.has_work:
        step(engine, told)
    engine.check_integrity(idle=True)
    return told


def facts(told: Told) -> dict[str, list[Any]]:
    """Everything reported about each answer."""
    return {
        name: [(one.token_id, one.logprobs, one.finish_reason, one.stop_token_id) for one in outputs]
        for name, outputs in told.items()
    }


def forked(engine: Engine, prompt: list[int], num_answers: int, **sampling: Any) -> dict[str, list[Any]]:
    add_forked(engine, prompt, num_answers, **sampling)
    return facts(drain(engine, {}))


def separate(engine: Engine, prompt: list[int], num_answers: int, **sampling: Any) -> dict[str, list[Any]]:
    """The same answers, each as a request of its own."""
    told: Told = {}
    for fork in [Fork("r", 5), *make_forks(num_answers - 1)]:
        params = make_sampling(**{**DRAWN, **sampling, "seed": fork.seed})
        engine.add(engine.factory.make_sequence(fork.request_id, prompt, params))
        drain(engine, told)
    return facts(told)


@pytest.mark.exact_bits("the same tokens are computed beside others")
@pytest.mark.parametrize(
    ("length", "fields"),
    [
        *((length, {}) for length in (1, 15, 16, 17, 32, 100)),
        (33, {"num_logprobs": 3}),
        (30, {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}),
        (20, {"temperature": 0}),
        (31, {"max_tokens": 1}),
        (9, {"min_tokens": 4, "ignore_eos": False, "stop_token_ids": tuple(range(3, 40))}),
        (40, {"num_prompt_logprobs": 2}),
        (32, {"num_prompt_logprobs": 0, "num_logprobs": 0}),
    ],
)
def test_forks_are_as_separate_requests(length: int, fields: dict[str, Any], build_engine: BuildEngine) -> None:
    prompt, engine = make_prompt(length), build_engine(max_num_batched_tokens=24)
    found = forked(engine, prompt, 4, **fields)
    assert found == separate(build_engine(), prompt, 4, **fields)
    assert fields.get("temperature") == 0 or len({str(answer) for answer in found.values()}) > 1


@pytest.mark.parametrize(
    ("grammar", "num_answers"),
    [*((grammar, 3) for grammar in [*FORCING, *GRAMMARS[-3:]]), *((grammar, 9) for grammar in FORCING)],
)
def test_forks_keep_to_their_grammar(grammar: str, num_answers: int, folder: Path) -> None:
    """Those that wait for a seat may then have several tokens to compute, which their grammar forces."""
    fields = {"grammar": grammar, "max_tokens": 120, "ignore_eos": False}
    engine, other = make_engine(folder, max_num_seqs=3), make_engine(folder)
    assert forked(engine, make_prompt(20), num_answers, **fields) == separate(
        other, make_prompt(20), num_answers, **fields
    )


def test_many_answers_while_the_pool_is_full(build_engine: BuildEngine) -> None:
    """A pool of ten blocks: forks find no block for a copy, are preempted and come back."""
    prompt, engine = make_prompt(40), build_engine(num_blocks=10)
    engine.scheduler.admission.lengths = Expects(1)
    found = forked(engine, prompt, 12, max_tokens=60)
    assert engine.scheduler.num_preemptions > 0
    assert found == separate(build_engine(), prompt, 12, max_tokens=60)


@pytest.mark.cpu_engine("each step has its results when it returns")
@pytest.mark.parametrize(("num_prompt", "num_output"), [(10, 3), (16, 40), (40, 24), (40, 25), (64, 1), (65, 20)])
def test_what_forks_share_is_stored_once(num_prompt: int, num_output: int, build_engine: BuildEngine) -> None:
    engine = build_engine()
    add_forked(engine, make_prompt(num_prompt), 8, max_tokens=num_output + 1)
    told: Told = {}
    while not told or len(told["r"]) < num_output:
        step(engine, told)
    num_stored = num_prompt + num_output - 1  # the newest token's KV is computed in the next step
    num_shared = num_prompt // BLOCK_SIZE if num_output > 1 else -(-num_prompt // BLOCK_SIZE)
    num_own = -(-num_stored // BLOCK_SIZE) - num_shared
    assert engine.pool.num_used == num_shared + 8 * num_own
    drain(engine, told)


@pytest.mark.cpu_engine("each step has its results when it returns")
def test_the_prompt_is_computed_once(build_engine: BuildEngine) -> None:
    engine = build_engine()
    add_forked(engine, make_prompt(60), 8)
    (result,) = engine.step()
    assert result.stats.num_prefill_tokens == 60
    assert [output.sequence.request_id for output in result.outputs] == ["r", *(f"r-{n}" for n in range(1, 8))]
    drain(engine, {output.sequence.request_id: [output] for output in result.outputs})


@pytest.mark.exact_bits("nothing is drafted without")
def test_what_drafts_are_looked_for_in_is_stored_once(build_engine: BuildEngine) -> None:
    engine, prediction = build_engine(speculate="8"), tuple(make_prompt(500))
    sequence = add_forked(engine, make_prompt(400), 6, max_tokens=40, prediction=prediction)
    answers = (sequence, *sequence.forks)
    told: Told = {}
    for _ in range(12):
        step(engine, told)
    assert {id(one.texts) for one in answers} == {id(sequence.texts)}
    own = [one.drafts.num_indexed - one.texts.num_indexed for one in answers if one.drafts and one.texts]
    assert len(own) == 6
    assert max(own) < 100, "its answer, not its prompt"
    drain(engine, told)


def test_a_fork_that_is_preempted_comes_back(build_engine: BuildEngine) -> None:
    prompt = make_prompt(40)
    expected = separate(build_engine(), prompt, 4, max_tokens=30)
    for number in range(4):
        engine, told = build_engine(), Told()
        add_forked(engine, prompt, 4, max_tokens=30)
        while len(told.get("r", ())) < 5:
            step(engine, told)
        engine.scheduler.preempt(engine.scheduler.running[number])
        engine.check_integrity()
        assert facts(drain(engine, told)) == expected


@pytest.mark.parametrize("when", ["before its first step", "within the prompt", "after some tokens"])
@pytest.mark.parametrize("aborted", [["r"], ["r-2"], ["r", "r-1"], ["r-3", "r-1"], ["r", "r-1", "r-2", "r-3"]])
def test_the_others_go_on_when_some_are_aborted(when: str, aborted: list[str], build_engine: BuildEngine) -> None:
    prompt = make_prompt(60)
    expected = separate(build_engine(), prompt, 4)
    engine, told = build_engine(max_num_batched_tokens=24), Told()
    add_forked(engine, prompt, 4)
    if when == "within the prompt":
        step(engine, told)
    while when == "after some tokens" and len(told.get("r", ())) < 4:
        step(engine, told)
    for name in aborted:
        assert engine.abort(name)
        engine.check_integrity()
    found = facts(drain(engine, told))
    for name, answer in expected.items():
        assert found.get(name, []) == (answer[: len(found.get(name, []))] if name in aborted else answer)


def test_an_answer_that_ends_at_once_ends_alone(build_engine: BuildEngine) -> None:
    prompt = make_prompt(20)
    expected = separate(build_engine(), prompt, 8)
    stop = expected["r-3"][0][0]
    found = forked(build_engine(), prompt, 8, stop_token_ids=(stop,))
    assert found["r-3"] == [(stop, None, FinishReason.STOP, stop)]
    assert found == separate(build_engine(), prompt, 8, stop_token_ids=(stop,))


@pytest.mark.cpu_engine("each step has its results when it returns")
def test_a_failing_prompt_fails_with_its_forks(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine()
    run = engine.runner.run

    def run_others(chunks: Any, *others: Any) -> Any:
        if any(chunk.sequence.request_id == "r" for chunk in chunks):
            raise RuntimeError("no")
        return run(chunks, *others)

    monkeypatch.setattr(engine.runner, "run", run_others)
    add_forked(engine, make_prompt(20), 3)
    engine.add(engine.factory.make_sequence("other", make_prompt(5), make_sampling()))
    (result,) = engine.step()
    assert [failure.sequence.request_id for failure in result.failures] == ["r", "r-1", "r-2"]
    drain(engine, {"other": result.outputs})


def test_a_prompt_that_is_handed_over_gives_a_token_for_each_fork(build_engine: BuildEngine) -> None:
    prompt = make_prompt(40)
    expected = separate(build_engine(), prompt, 4)
    engine, told = build_engine(), Told()
    sequence = add_forked(engine, prompt, 4, Phase.PREFILL_ONLY)
    while engine.has_work:
        step(engine, told)
    assert {name: [output.token_id for output in outputs] for name, outputs in told.items()} == {
        name: [answer[0][0]] for name, answer in expected.items()
    }
    assert engine.pool.num_used == len(sequence.blocks) == 3
    engine.scheduler.blocks.release(sequence)
    engine.check_integrity(idle=True)


@pytest.mark.cpu_engine("each step has its results when it returns")
def test_other_requests_leave_room_for_the_forks_of_a_prompt(build_engine: BuildEngine) -> None:
    engine = build_engine(num_blocks=40, max_num_seqs=4)
    engine.scheduler.admission.lengths = Expects(100)
    add_forked(engine, make_prompt(40), 4, max_tokens=100)
    engine.add(engine.factory.make_sequence("other", make_prompt(10), make_sampling()))
    told: Told = {}
    step(engine, told)
    assert sorted(told) == ["r", "r-1", "r-2", "r-3"]
    assert [one.request_id for one in engine.scheduler.waiting] == ["other"]
    assert engine.load().num_free_seats == 0
    drain(engine, told)


@pytest.mark.parametrize("seed", range(20))
def test_forks_leave_no_reference_behind(seed: int) -> None:
    """Random sequences fork, grow, are preempted and end. A block that is written to has one owner and its content."""
    source, pool, content = random.Random(seed), BlockPool(30), dict[int, list[int]]()

    def copy(old: int, new: int) -> None:
        content[new] = list(content[old])

    blocks = SequenceBlocks(pool, 4, [], copy)
    live: list[Sequence] = []
    num_copied = 0
    for number in range(400):
        choice = source.random()
        if choice < 0.15:
            prompt = [source.randrange(9) for _ in range(source.randint(1, 20))]
            live.append(Sequence(str(number), token_array(prompt), len(prompt), make_sampling(), b""))
        elif live and choice < 0.3:
            parent = source.choice(live)
            fork = Sequence(str(number), parent.token_ids[:], parent.num_prompt_tokens, make_sampling(), b"")
            blocks.fork(parent, fork)
            live.append(fork)
        elif live and choice < 0.45:
            ended = live.pop(source.randrange(len(live)))
            blocks.release(ended)
        elif live and choice < 0.5:
            blocks.take_back(source.choice(live))
        elif live:
            one = source.choice(live)
            before = list(one.blocks)
            if blocks.try_extend(one):
                for place in range(one.num_computed_tokens, len(one.token_ids)):
                    block = one.blocks[place // 4]
                    assert not pool.is_shared(block)
                    content.setdefault(block, [0] * 4)[place % 4] = one.token_ids[place]
                one.num_computed_tokens = len(one.token_ids)
                one.token_ids.append(source.randrange(9))
                num_copied += any(old != new for old, new in zip(before, one.blocks, strict=False))
            else:
                assert one.blocks == before
        pool.check_integrity()
        for one in live:
            stored = [token for block in one.blocks for token in content.get(block, [0] * 4)]
            assert stored[: one.num_computed_tokens] == one.token_ids[: one.num_computed_tokens].tolist()
    assert num_copied > 0
    for one in live:
        blocks.release(one)
    pool.check_integrity(idle=True)
