from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.sampling.draw import uniform_draw
from tandem.engine.sampling.sampler import SampledToken, Sampler, draw_token
from tandem.engine.sequence import Sequence
from tandem.protocol.sampling import SamplingParams

VOCAB = 50
EOS = 2


def make_logits(seed: int = 0, *, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def make_sequence(prompt: list[int] | None = None, output: list[int] | None = None, **sampling: Any) -> Sequence:
    prompt, output = prompt or [1, 3], output or []
    return Sequence("r", prompt + output, len(prompt), SamplingParams(**{"max_tokens": 9, **sampling}), root=b"")


class Unchecked(SamplingParams, frozen=True):
    """Parameters that were not validated."""

    def __post_init__(self) -> None:
        pass


def sample_tokens(logits: torch.Tensor, *sequences: Sequence, eos: int = EOS) -> list[SampledToken]:
    rows = logits if logits.dim() == 2 else logits.repeat(len(sequences), 1)
    tokens = []
    for token in Sampler(frozenset({eos})).sample(rows, sequences):
        assert isinstance(token, SampledToken), repr(token)
        tokens.append(token)
    return tokens


def sample(logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    return [token.token_id for token in sample_tokens(logits, *sequences)]


def oracle(logits: np.ndarray[Any, Any], sampling: SamplingParams, draw: float) -> tuple[int, set[int]]:
    """(token, possible tokens), by sorting all tokens in float64."""
    scaled = logits.astype(np.float64) / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    if sampling.top_p < 1.0:
        share = p[order] / p[order].sum()
        before = np.concatenate([[0.0], np.cumsum(share)[:-1]])
        order = order[(before < sampling.top_p) | (np.arange(len(order)) == 0)]
    order = order[p[order] >= sampling.min_p * p[order].max()]
    if sampling.top_k <= 0 and sampling.top_p >= 1.0:
        order = np.sort(order)  # without a nucleus, tokens keep the vocabulary's order
    cumulative = np.cumsum(p[order])
    idx = int(np.searchsorted(cumulative, cumulative[-1] * draw, side="right"))
    return int(order[min(idx, len(order) - 1)]), set(order.tolist())


def test_draws_are_stable_across_versions() -> None:
    # Two workers of different versions must continue one another's streams.
    assert [uniform_draw(1, 0), uniform_draw(1, 1), uniform_draw(2**64 - 1, 5)] == [
        0.07215243592631282,
        0.11458833399520885,
        0.3078863209575955,
    ]


def test_draws_are_uniform_and_uncorrelated() -> None:
    draws = np.array([[uniform_draw(seed, position) for position in range(100)] for seed in range(100)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 50  # chi-squared of 19 degrees: 1 in 10,000
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.05


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.01, 0.5, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 10, VOCAB, VOCAB + 5]),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.floats(0, 1, exclude_max=True),
)
def test_filters_agree_with_the_oracle(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, draw: float
) -> None:
    logits = make_logits(seed)
    sampling = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    token, possible = oracle(logits.numpy(), sampling, draw)
    chosen = draw_token(logits, sampling, draw)
    assert chosen in possible
    # Only a draw within rounding of a boundary may fall on the other side of it.
    neighbours = {
        oracle(logits.numpy(), sampling, min(max(draw + shift, 0.0), 1 - 1e-12))[0] for shift in (-1e-5, 1e-5)
    }
    assert chosen == token or chosen in neighbours


def test_a_flat_distribution_needs_more_than_the_guessed_nucleus() -> None:
    logits = make_logits(vocab=5000, spread=0.01)
    sampling = SamplingParams(max_tokens=1, top_p=0.9)
    chosen = {draw_token(logits, sampling, draw) for draw in np.linspace(0, 0.999, 200)}
    _, possible = oracle(logits.numpy(), sampling, 0.5)
    assert len(possible) > 4000
    assert chosen <= possible
    assert len(chosen) == 200


def test_frequencies_follow_the_distribution() -> None:
    logits = make_logits(vocab=8, spread=1.0)
    sampling = SamplingParams(max_tokens=1, temperature=0.7)
    draws = [draw_token(logits, sampling, uniform_draw(3, position)) for position in range(2000)]
    expected = (logits / 0.7).softmax(0).numpy() * 2000
    assert ((np.bincount(draws, minlength=8) - expected) ** 2 / expected).sum() < 30  # 7 degrees: 1 in 10,000


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-9, 1e-3, 1.0, 100.0, 1e300])
def test_extreme_temperatures_and_draws_give_a_possible_token(temperature: float, draw: float) -> None:
    logits = make_logits(spread=30.0)
    logits[7] = float("-inf")
    token = draw_token(logits, Unchecked(max_tokens=1, temperature=temperature), draw)
    assert token not in (7, None)
    if temperature <= 1e-3:
        assert token == int(logits.argmax())


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, [9, 4]] = 1.0
    biased = make_sequence(temperature=0, logit_bias={0: -1.0})
    assert sample(logits, make_sequence(temperature=0), biased, make_sequence(temperature=0, num_logprobs=1)) == [
        4,
        4,
        4,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    logits = torch.stack([make_logits(seed) for seed in range(6)]).to(dtype)
    sequences = [
        make_sequence(temperature=0),
        make_sequence(seed=5),
        make_sequence(seed=5, top_p=0.9),
        make_sequence(seed=7, top_k=3),
        make_sequence(temperature=0, repetition_penalty=1.3),
        make_sequence(seed=9, min_p=0.1, output=[4]),
    ]
    together = sample(logits, *sequences)
    assert together == [sample(logits[i : i + 1], sequence)[0] for i, sequence in enumerate(sequences)]
    backwards = sample(logits.flip(0), *sequences[::-1])
    assert together == backwards[::-1]


def test_the_draw_depends_on_seed_and_position_only() -> None:
    logits = make_logits(spread=0.1)
    first = sample(logits, make_sequence([1, 3], [4, 5], seed=11))
    assert first == sample(logits, make_sequence([9, 8, 7, 6], [1, 2], seed=11))
    others = [sample(logits, make_sequence([1, 3], [4, 5], seed=seed))[0] for seed in range(12, 32)]
    assert len(set(others)) > 5


def test_penalties_follow_their_definitions() -> None:
    logits = make_logits()
    sequence = make_sequence(
        [1, 3],
        [4, 4, 5],
        temperature=0,
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        logit_bias={6: 3.0, 4: -1.0},
    )
    expected = logits.clone()
    for token in (1, 3, 4, 5):  # prompt and output
        expected[token] = expected[token] / 2 if expected[token] > 0 else expected[token] * 2
    expected[4] -= 2 * 0.5 + 0.25  # output only
    expected[5] -= 0.5 + 0.25
    expected[6] += 3.0
    expected[4] -= 1.0
    torch.testing.assert_close(Sampler(frozenset()).adjust(logits, sequence), expected)


@pytest.mark.parametrize("num_output", [0, 2, 3, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bans_end_and_stop_tokens_exactly_so_long(num_output: int, temperature: float) -> None:
    logits = torch.full((VOCAB,), -50.0)
    logits[[EOS, 9]] = 50.0
    logits[11] = 20.0
    sequence = make_sequence(
        output=[4] * num_output, min_tokens=3, stop_token_ids=(9,), temperature=temperature, top_p=0.9
    )
    assert (sample(logits, sequence) == [11]) is (num_output < 3)


@pytest.mark.parametrize("num_logprobs", [0, 1, 5])
def test_logprobs_are_of_the_models_own_distribution(num_logprobs: int) -> None:
    logits = make_logits()
    sequence = make_sequence(temperature=0.5, logit_bias={6: 100.0}, num_logprobs=num_logprobs)
    [token] = sample_tokens(logits, sequence)
    assert token.token_id == 6
    assert token.logprobs is not None
    expected = logits.log_softmax(0)
    assert token.logprobs.logprob == pytest.approx(float(expected[6]), abs=1e-6)
    assert [token_id for token_id, _ in token.logprobs.top] == expected.argsort(descending=True)[:num_logprobs].tolist()


def test_no_logprobs_unless_asked_for() -> None:
    [token] = sample_tokens(make_logits(), make_sequence())
    assert token.logprobs is None


# Whatever the logits and the parameters are.

LARGEST = float(torch.finfo(torch.float32).max)
ODD_FLOATS = (
    0,
    1,
    0.0,
    -0.0,
    1e-300,
    1e-40,
    1e-30,
    0.5,
    1.0,
    2.0,
    1e30,
    1e300,
    -1.0,
    -1e300,
    math.inf,
    -math.inf,
    math.nan,
)
ODD_INTS = (0, 1, 3, VOCAB, VOCAB + 1, 2**31 - 1, 2**63, -1, -(2**63))
odd_float, odd_int = st.sampled_from(ODD_FLOATS), st.sampled_from(ODD_INTS)
odd_logit = st.sampled_from((math.inf, -math.inf, math.nan, LARGEST, -LARGEST, 0.0))


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from((0.0, 1e-40, 2.0, 1e30, 1e38)),
    odd=st.dictionaries(st.integers(0, VOCAB - 1), odd_logit, max_size=4),
    everywhere=st.none() | odd_logit,
    fields=st.fixed_dictionaries(
        {},
        optional={
            "temperature": odd_float,
            "top_p": odd_float,
            "top_k": odd_int,
            "min_p": odd_float,
            "min_tokens": odd_int,
            "seed": odd_int,
            "frequency_penalty": odd_float,
            "presence_penalty": odd_float,
            "repetition_penalty": odd_float,
            "num_logprobs": st.sampled_from((None, 0, 5, VOCAB + 9, -3)),
            "stop_token_ids": st.sampled_from(((), (3,), tuple(range(VOCAB)))),
            "logit_bias": st.sampled_from(({}, {4: 100.0}, {4: math.inf}, dict.fromkeys(range(VOCAB), -math.inf))),
        },
    ),
)
def test_every_row_gives_a_token(
    seed: int, spread: float, odd: dict[int, float], everywhere: float | None, fields: dict[str, Any]
) -> None:
    logits = make_logits(seed, spread=spread) if everywhere is None else torch.full((VOCAB,), everywhere)
    for token_id, value in odd.items():
        logits[token_id] = value
    sequence = make_sequence([1, 3], [4, 4, 5])
    sequence.sampling = Unchecked(**{"max_tokens": 9, **fields})
    for dtype in (torch.float32, torch.bfloat16):
        [token] = sample_tokens(logits.to(dtype), sequence)
        assert 0 <= token.token_id < VOCAB
        if token.logprobs is not None:
            assert math.isfinite(token.logprobs.logprob)
            assert all(math.isfinite(logprob) for _, logprob in token.logprobs.top)


def test_the_request_that_left_no_probability_gets_a_token() -> None:
    sequence = make_sequence([1] * 20)
    sequence.sampling = Unchecked(max_tokens=4, repetition_penalty=1e-40, min_p=0.5)
    logits = make_logits()
    logits[1] = 1.0  # made infinite by the penalty
    assert sample(logits, sequence) == [1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_every_token_banned_the_models_own_first_choice_is_taken(temperature: float) -> None:
    logits = make_logits()
    everything = tuple(range(VOCAB))
    sequence = make_sequence(min_tokens=9, stop_token_ids=everything, temperature=temperature)
    assert sample(logits, sequence) == [int(logits.argmax())]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_a_number_is_not_chosen_while_anything_else_is_left(temperature: float) -> None:
    logits = make_logits()
    logits[[3, 20]] = math.nan
    logits[EOS] = math.inf
    first, second = logits.nan_to_num(nan=-math.inf, posinf=-math.inf).topk(2).indices.tolist()
    banned = make_sequence(temperature=temperature, min_tokens=9, stop_token_ids=(first,), num_logprobs=2)
    assert sample(logits, banned) == [second]


def test_what_a_row_raises_is_returned_in_its_place() -> None:
    logits = make_logits().repeat(3, 1)
    broken = make_sequence(logit_bias={VOCAB: 1.0})  # refused by the engine: an id outside the vocabulary
    first, error, last = Sampler(frozenset()).sample(logits, [make_sequence(seed=1), broken, make_sequence(seed=2)])
    assert isinstance(error, IndexError | RuntimeError)
    alone = sample(logits[:1], make_sequence(seed=1)), sample(logits[:1], make_sequence(seed=2))
    assert isinstance(first, SampledToken)
    assert isinstance(last, SampledToken)
    assert ([first.token_id], [last.token_id]) == alone


def test_the_bias_of_a_request_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [make_sequence(temperature=0, logit_bias={4: 100.0}), make_sequence(temperature=0, logit_bias={6: 9.0})]
    logits = torch.zeros(2, VOCAB)
    assert sample(logits, *sequences) == [4, 6]
    kept = [sequence.logit_bias for sequence in sequences]
    monkeypatch.setattr(torch, "tensor", None)  # of which nothing is made any more
    assert sample(logits, *sequences) == [4, 6]
    assert all(sequence.logit_bias is bias for sequence, bias in zip(sequences, kept, strict=True))
