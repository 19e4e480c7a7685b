"""Where drafts come from, how good they are, and when they pay."""

from __future__ import annotations

import random

import pytest

from tandem.engine.sequence import ScheduledChunk, Sequence, SequenceStatus
from tandem.engine.speculation import sources as sources_module
from tandem.engine.speculation.acceptance import Acceptance
from tandem.engine.speculation.sources import RecentAnswers
from tandem.engine.speculation.speculator import Speculator
from tandem.engine.speculation.step_time import StepTime
from tandem.engine.speculation.token_index import GRAM, MAX_MATCH, SEPARATOR, TokenIndex
from tandem.engine.token_array import token_array
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import WorkerPriority
from tandem.protocol.sampling import SamplingParams


def make_sequence(token_ids: list[int], num_prompt: int = 1, **fields: object) -> Sequence:
    sampling = SamplingParams(max_tokens=1000)
    sequence = Sequence("r", token_array(token_ids), num_prompt, sampling, b"root", **fields)  # type: ignore[arg-type]
    sequence.num_computed_tokens = len(token_ids) - 1
    sequence.status = SequenceStatus.RUNNING
    return sequence


def chunk_of(sequence: Sequence) -> ScheduledChunk:
    return ScheduledChunk(sequence, len(sequence.token_ids) - 1, 1, samples=True)


def make_speculator(speculate: str = "auto", max_tokens: int = 64, max_rows: int = 64) -> Speculator:
    return Speculator(speculate, max_model_len=4096, max_tokens=max_tokens, max_rows=max_rows)


def longest_match(tokens: list[int], tail: list[int]) -> int:
    """Length of the longest end of `tail` in `tokens` that another token follows; 0 if it is shorter than a gram."""
    best = 0
    for place in range(GRAM, len(tokens)):
        length = 0
        while length < min(place, len(tail), MAX_MATCH) and tokens[place - 1 - length] == tail[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= GRAM else 0


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_match_is_found(seed: int) -> None:
    source = random.Random(seed)
    tokens: list[int] = []
    index = TokenIndex(tokens)
    for _ in range(200):
        if len(tokens) > 20 and source.random() < 0.2:
            start = source.randrange(len(tokens) - 10)
            tokens += tokens[start : start + source.randint(1, 10)]
        tokens.append(source.randrange(8))
        index.extend(len(tokens), 1000)
        match = index.find(tokens[-MAX_MATCH:])
        longest = longest_match(tokens, tokens[-MAX_MATCH:])
        assert (match is None) == (longest == 0)
        if match is not None:  # of many places only the latest few are compared
            assert GRAM <= match.length <= longest
            assert tokens[match.place - match.length : match.place] == tokens[-match.length :]
            assert match.draft(1) == [tokens[match.place]]


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end() -> None:
    tokens = [9, 1, 2, 3, 1, 2, 3]
    index = TokenIndex(tokens)
    index.extend(len(tokens), 1000)
    match = index.find(tokens)
    assert match is not None
    assert match.draft(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_no_draft_reaches_into_another_text() -> None:
    tokens = [SEPARATOR, 1, 2, 3, 4, 5, SEPARATOR, 6, 7, 8, 9]
    index = TokenIndex(tokens)
    index.extend(len(tokens), 1000)
    match = index.find([1, 2, 3])
    assert match is not None
    assert match.draft(9) == [4, 5]
    assert index.find([5, 6, 7]) is None
    at_end = index.find([3, 4, 5])
    assert at_end is not None
    assert at_end.draft(9) == []


def test_a_long_text_is_indexed_piece_by_piece() -> None:
    tokens = [i % 1000 for i in range(10_000)]
    index = TokenIndex(tokens)
    index.extend(len(tokens), max_grams=100)
    assert index.find([200, 201, 202]) is None
    for _ in range(3):
        index.extend(len(tokens), max_grams=100)
    assert index.find([200, 201, 202]) is not None


def test_recent_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "_MAX_TOKENS", 1000)
    monkeypatch.setattr(sources_module, "_SCOPE_TOKENS", 400)
    monkeypatch.setattr(sources_module, "_MAX_SCOPES", 5)
    answers, source = RecentAnswers(), random.Random(0)
    for number in range(300):
        root = bytes([source.randrange(9)])
        answers.add(root, list(range(source.choice([2, 30, 150, 5000]))), 1)
        assert answers.of(root).num_tokens > 0, "the latest answer is kept"
        assert answers.of(root).num_tokens <= 400 + 2
        assert answers.num_tokens <= 1000
        answers.of(bytes([20 + number % 9]))
        assert len(answers) <= 5


def test_many_long_prompts_delay_no_step_much() -> None:
    """Forks of one long prompt, or as many requests: a step indexes as much as for a single one."""
    speculator, source = make_speculator(), random.Random(0)
    sequences = [make_sequence(source.choices(range(1000), k=20_000), 20_000) for _ in range(32)]
    for step in range(1, 4):
        speculator.add_drafts([chunk_of(sequence) for sequence in sequences])
        assert sum(one.drafts.num_indexed for one in sequences if one.drafts) <= step * 3 * 2048 + 32 * 3 * GRAM


def test_the_acceptance_follows_what_comes() -> None:
    scope = Acceptance()
    mine = Acceptance(scope)
    assert mine.share(3) < mine.share(MAX_MATCH) < 1
    for _ in range(50):
        assert mine.observe(3, [1, 2, 3], [1, 2, 4]) == 2
    assert mine.share(3) > 0.9
    assert mine.share(4) > 0.9
    assert mine.share(5) < 0.1
    assert Acceptance(scope).share(5) < 0.2, "another sequence of the scope begins with what was learned"
    for _ in range(100):
        mine.observe(5, [1], [1])
    assert mine.share(5) > 0.9


@pytest.mark.parametrize(("base_s", "row_s"), [(20e-3, 1e-3), (20e-3, 0.0), (1e-3, 1e-3), (0.0, 1e-3)])
def test_the_time_of_a_step_is_learned(base_s: float, row_s: float) -> None:
    model, source = StepTime(), random.Random(0)
    assert model.seconds(1) == 0.0
    for _ in range(300):
        rows = source.choice([1, 1, 1, 2, 5, 9])
        model.observe(rows, (base_s + row_s * rows) * source.uniform(0.9, 1.1) * (20 if source.random() < 0.02 else 1))
    for rows in (1, 4, 12):
        assert model.seconds(rows) == pytest.approx(base_s + row_s * rows, rel=0.35)


def test_steps_of_one_size_leave_the_prior() -> None:
    model = StepTime()
    for _ in range(500):
        model.observe(8, 0.02)
    assert model.seconds(8) == pytest.approx(0.02)
    assert 0.02 < model.seconds(9) < 0.022


def run(speculator: Speculator, text: list[int], row_share: float, num_sequences: int = 1) -> float:
    """Let sequences write this text behind itself, and return seconds a token. A step of one row takes a second."""
    sequences = [make_sequence(list(text)) for _ in range(num_sequences)]
    elapsed, num = 0.0, 0
    written = [0] * num_sequences
    while min(written) < 300:
        chunks = speculator.add_drafts([chunk_of(sequence) for sequence in sequences])
        duration = 1 + row_share * (sum(chunk.num_rows for chunk in chunks) - 1)
        for i, chunk in enumerate(chunks):
            for drafted in (*chunk.draft, None):
                token = text[written[i] % len(text)] if row_share >= 0 else 0
                chunk.sequence.token_ids.append(token)
                written[i] += 1
                num += 1
                if token != drafted:
                    break
        speculator.note_step(chunks, duration)
        elapsed += duration
    return elapsed / num


def test_auto_drafts_what_comes_true_and_stops_what_does_not() -> None:
    source = random.Random(0)
    repeated = [source.randrange(1000) for _ in range(150)]
    assert run(make_speculator(), repeated, 0.1) < 0.4
    misleading: list[int] = []
    for _ in range(100):  # three tokens that always come together, and something else behind them
        misleading += [1, 2, 3, source.randrange(10, 1000)]
    speculator = make_speculator()
    plain = [source.choice(misleading) for _ in range(400)]
    assert run(speculator, misleading, 0.1) < 1.01
    assert run(make_speculator(), plain, 0.1) < 1.02


def test_auto_does_not_draft_where_rows_cost_as_much_as_steps() -> None:
    source = random.Random(0)
    repeated = [source.randrange(1000) for _ in range(150)]
    assert run(make_speculator(), repeated, 1.0) < 1.02
    assert run(make_speculator("8"), repeated, 1.0) == pytest.approx(1.0, rel=0.2)
    assert run(make_speculator(), repeated, 0.5, num_sequences=16) < 0.55


def test_drafts_leave_the_budget_to_others() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    sequences = [make_sequence(list(text)) for _ in range(3)]
    chunks = make_speculator("8", max_tokens=13).add_drafts([chunk_of(one) for one in sequences])
    assert [len(chunk.draft) for chunk in chunks] == [8, 2, 0]
    chunks = make_speculator("8", max_rows=9).add_drafts([chunk_of(one) for one in sequences])
    assert sum(len(chunk.draft) for chunk in chunks) == 9
    prompt = make_sequence([1, 2, 3], 3, priority=WorkerPriority(0.0, max_step_tokens=2))
    short = ScheduledChunk(prompt, 0, 2, samples=False)
    assert not any(chunk.draft for chunk in make_speculator("8").add_drafts([chunk_of(sequences[0]), short]))


@pytest.mark.parametrize("value", ["", "on", "0", "65", "-1", "1.5", "0064", "²"])
def test_wrong_settings(value: str) -> None:
    with pytest.raises(ConfigError, match="speculate"):
        EngineConfig(speculate=value)
