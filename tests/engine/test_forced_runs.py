"""Tokens that a grammar forces are not sampled one by one. Nothing but the number of steps may show it."""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tandem.engine.engine import Engine
from tandem.engine.sequence import Sequence
from tandem.engine.step_result import SequenceOutput
from tandem.engine.structured_output import StructuredOutput
from tandem.protocol.messages import FinishReason
from tests.engine.test_engine import add, make_prompt
from tests.engine.test_structured_output import make_engine
from tests.support.late_device import LateDevice
from tests.support.structured_requests import FORCING, GRAMMARS, lark_grammar, random_sampling

pytestmark = [pytest.mark.cluster, pytest.mark.exact_bits("a forced run is one step of several tokens")]

VOCAB_SIZE = 300
Answer = tuple[list[int], FinishReason | None, list[SequenceOutput]]


def answers(engine: Engine, requests: list[dict[str, Any]], source: random.Random, share_preempted: float) -> list[Any]:
    """What all requests get: tokens, finish reasons, and everything reported about each token."""
    told: dict[str, list[Any]] = defaultdict(list)
    asked: list[Sequence] = []
    while len(asked) < len(requests) or engine.has_work:
        if len(asked) < len(requests) and (not engine.has_work or source.random() < 0.3):
            fields = requests[len(asked)]
            asked.append(add(engine, str(len(asked)), make_prompt(fields["num_prompt"]), **fields["sampling"]))
        for result in engine.step():
            assert result.failures == []
            for output in result.outputs:
                fact = output.token_id, output.logprobs, output.finish_reason, output.stop_token_id
                assert output.offset == len(told[output.sequence.request_id])
                told[output.sequence.request_id].append(fact)
        engine.check_integrity()
        if engine.scheduler.running and source.random() < share_preempted:
            engine.scheduler.preempt(source.choice(engine.scheduler.running))
    engine.check_integrity(idle=True)
    for sequence in asked:
        tokens = sequence.output_ids
        assert tokens == [token for token, *_ in told[sequence.request_id]]
    return [told[sequence.request_id] for sequence in asked]


def one_by_one(folder: Path, requests: list[dict[str, Any]]) -> list[Any]:
    engine = make_engine(folder)
    engine.max_run = 1
    told = [answers(engine, [one], random.Random(0), 0.0)[0] for one in requests]
    engine.close()
    return told


@functools.cache
def random_requests_and_answers(folder: Path, seed: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """The same for every way to compute them."""
    source = random.Random(seed)
    requests = [
        {"num_prompt": source.randint(1, 70), "sampling": random_sampling(source, vocab_size=VOCAB_SIZE)}
        for _ in range(10)
    ]
    return requests, one_by_one(folder, requests)


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 20))])
@pytest.mark.parametrize(
    ("settings", "share_preempted", "is_late"),
    [
        ({}, 0.0, False),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 8}, 0.0, False),
        ({"num_blocks": 34}, 0.0, False),
        ({}, 0.1, False),
        ({"num_blocks": 60}, 0.05, True),
    ],
    ids=["batched", "small steps", "small pool", "preempted", "late device"],
)
def test_nothing_shows_that_tokens_were_forced(
    folder: Path, settings: dict[str, Any], share_preempted: float, is_late: bool, seed: int
) -> None:
    requests, expected = random_requests_and_answers(folder, seed)
    engine = make_engine(folder, **settings)
    if is_late:
        LateDevice(engine, seed)
    assert answers(engine, requests, random.Random(seed), share_preempted) == expected
    engine.close()


@pytest.mark.parametrize("grammar", FORCING)
def test_runs_save_steps(folder: Path, grammar: str) -> None:
    engine = make_engine(folder)
    num_steps = []
    for engine.max_run in (1, 64):
        sequence = add(engine, "a", make_prompt(20), grammar=grammar, max_tokens=400, ignore_eos=False, seed=1)
        num_steps.append(0)
        while engine.has_work:
            num_steps[-1] += len(engine.step())
        assert sequence.finish_reason is FinishReason.STOP
    assert num_steps[1] < 0.8 * num_steps[0]
    engine.close()


def test_a_run_ends_where_the_model_does(folder: Path) -> None:
    grammar = lark_grammar(f'start: "{"a" * 100}" /[xyz]{{600}}/')
    for num_prompt, max_tokens in ((20, 40), (460, 400), (20, 63), (20, 64), (20, 65), (20, 66), (511, 400)):
        request = {"num_prompt": num_prompt, "sampling": {"grammar": grammar, "max_tokens": max_tokens}}
        engine = make_engine(folder)
        told = answers(engine, [request], random.Random(0), 0.0)
        assert told == one_by_one(folder, [request])
        assert len(told[0]) == min(max_tokens, 512 - num_prompt)
        assert told[0][-1][2] is FinishReason.LENGTH
        engine.close()


def test_a_run_ends_at_a_stop_token(folder: Path) -> None:
    engine = make_engine(folder)
    [x] = engine.structured_output.tokenizer.tokenize_str("q")
    grammar = lark_grammar('start: "aaaaqbbbb" /[xyz]{9}/')
    request = {"num_prompt": 20, "sampling": {"grammar": grammar, "max_tokens": 100, "stop_token_ids": (x,)}}
    told = answers(engine, [request], random.Random(0), 0.0)
    assert told == one_by_one(folder, [request])
    assert (len(told[0]), told[0][-1]) == (5, (x, None, FinishReason.STOP, x))
    engine.close()


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> StructuredOutput:
    """With a tokenizer of many merges, whose tokens reach over the ends of fixed texts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    texts = ['{"description": "ab", "quantity": 12}, {"description": "the middle of it, "', "hello, world", "celsius"]
    bpe.train_from_iterator([*texts * 5, *GRAMMARS], trainer)
    folder = tmp_path_factory.mktemp("merging")
    PreTrainedTokenizerFast(tokenizer_object=bpe).save_pretrained(folder)
    return StructuredOutput(folder, bpe.get_vocab_size(), frozenset({0}))


def walk(
    structured_output: StructuredOutput, grammar: str, source: random.Random
) -> Iterator[tuple[int | None, list[int]]]:
    """(what is forced, what the mask allows) along a random output."""
    matcher = structured_output.matcher(grammar)
    new_ids: list[int] = []
    for _ in range(150):
        if matcher.is_complete(new_ids):
            return
        forced = matcher.forced_token(new_ids)
        mask = np.frombuffer(matcher.follow([]).compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        yield forced, allowed
        new_ids = [source.choice(allowed)]


@pytest.mark.parametrize("number", range(len(GRAMMARS)))
def test_a_forced_token_is_the_only_one_that_the_mask_allows(merging: StructuredOutput, number: int) -> None:
    num_forced = 0
    for seed in range(8):
        for forced, allowed in walk(merging, GRAMMARS[number], random.Random(seed)):
            assert forced is None or allowed == [forced]
            num_forced += forced is not None
    assert num_forced > 20 or number >= len(FORCING)
