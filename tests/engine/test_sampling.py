from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tandem.engine.sampling.distribution import choose, most_likely, top_values
from tandem.engine.sampling.draw import philox, uniform_draw, uniform_draws
from tandem.engine.sampling.row_plan import NO_EDITS, plan_row
from tandem.engine.sampling.sampler import SampledToken, Sampler
from tandem.engine.sequence import Sequence
from tandem.engine.token_array import token_array
from tandem.protocol.sampling import SamplingParams

VOCAB = 50
EOS = 2


def make_logits(seed: int = 0, *, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def make_sequence(prompt: list[int] | None = None, output: list[int] | None = None, **sampling: Any) -> Sequence:
    prompt, output = prompt or [1, 3], output or []
    return Sequence(
        "r", token_array(prompt + output), len(prompt), SamplingParams(**{"max_tokens": 9, **sampling}), root=b""
    )


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


def draw_token(logits: torch.Tensor, sampling: SamplingParams, draw: float) -> int | None:
    """The token of one row [vocab] at this draw; None if no probability is left."""
    sequence = make_sequence()
    sequence.sampling = sampling
    plan = plan_row(sequence, len(logits), frozenset(), draw)
    choice = choose(logits[None], [plan])
    if not choice.is_final:
        choice = choose(logits[None], [plan], is_exhaustive=True)
    return int(choice.token_ids) if choice.is_final else None


def oracle(logits: np.ndarray[Any, Any], sampling: SamplingParams, draw: float) -> tuple[int, list[int]]:
    """(token, possible tokens in the order of their draws), by sorting all tokens in float64."""
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
    return int(order[min(idx, len(order) - 1)]), order.tolist()


def adjusted(raw: torch.Tensor, sequence: Sequence) -> np.ndarray[Any, Any]:
    """The logits of one row after penalties, bias and bans, in float64."""
    sampling, logits = sequence.sampling, raw.numpy().astype(np.float64)
    seen = list(set(sequence.token_ids))
    penalty = np.where(logits[seen] > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
    logits[seen] *= penalty
    for token_id, count in Counter(sequence.output_ids).items():
        logits[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += bias
    if sequence.num_output_tokens < sampling.min_tokens:
        logits[[EOS, *sampling.stop_token_ids]] = -np.inf
    return logits


WORD = 0xFFFFFFFF
# From the generator's paper: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD, WORD, WORD, WORD), (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_the_generator_gives_its_known_answers(counter: Any, key: Any, expected: Any) -> None:
    assert philox(counter, key) == expected


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_ints_numpy_and_torch_give_the_same_bits(device: str) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, size=(6, 1000))
    counter: Any
    by_int = [philox(tuple(column[:4]), tuple(column[4:])) for column in words.T.tolist()]
    *counter, key_0, key_1 = words
    by_numpy = np.stack(philox(tuple(counter), (key_0, key_1)))
    *counter, key_0, key_1 = torch.from_numpy(words).to(device)
    by_torch = torch.stack(philox(tuple(counter), (key_0, key_1)))
    assert by_numpy.T.tolist() == [list(answer) for answer in by_int]
    assert by_torch.T.tolist() == by_numpy.T.tolist()


@pytest.mark.parametrize("num_rows", [1, 16, 17, 300])
def test_draws_of_many_rows_are_those_of_each(num_rows: int) -> None:
    source = random.Random(num_rows)
    seeds = [source.choice((0, 2**64 - 1, source.randrange(2**64))) for _ in range(num_rows)]
    positions = [source.choice((0, 2**31, source.randrange(1000))) for _ in range(num_rows)]
    assert uniform_draws(seeds, positions) == list(map(uniform_draw, seeds, positions))


def test_a_plan_follows_the_request() -> None:
    """What does not change from token to token is planned once, and the rest for each."""
    sequence = make_sequence()
    sequence.sampling = SamplingParams(max_tokens=9, temperature=0.5, min_tokens=2)
    assert plan_row(sequence, 50, frozenset({EOS}), 0.1).edits != NO_EDITS, "the end is banned"
    request = sequence.request_plan
    sequence.token_ids.extend([7, 7])
    assert plan_row(sequence, 50, frozenset({EOS}), 0.2).edits == NO_EDITS
    assert sequence.request_plan is request
    sequence.sampling = SamplingParams(max_tokens=9, temperature=0.5, frequency_penalty=1.0)
    assert plan_row(sequence, 50, frozenset({EOS}), 0.3).edits != NO_EDITS
    sequence.sampling = SamplingParams(max_tokens=9, temperature=0.0)
    assert plan_row(sequence, 50, frozenset({EOS}), 0.4).request.is_plain_greedy


def test_draws_are_stable_across_versions() -> None:
    # Two workers of different versions must continue one another's streams.
    draws = [uniform_draw(1, 0), uniform_draw(1, 1), uniform_draw(2**64 - 1, 5)]
    assert draws == [0.8902591757080309, 0.6719982689180368, 0.4311373818027474]


@example(1, 0.01, 0, 1.0, 0.0, 0.0)  # tokens whose probabilities float32 rounds to 0
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
    _, possible = oracle(logits.numpy(), sampling, draw)
    chosen = draw_token(logits, sampling, draw)
    assert chosen in possible
    # Only a draw within rounding of a boundary may fall on the other side of it, or of several that are so close.
    shifted = (min(max(draw + shift, 0.0), 1 - 1e-12) for shift in (-1e-5, 1e-5))
    first, last = (possible.index(oracle(logits.numpy(), sampling, one)[0]) for one in shifted)
    assert first <= possible.index(chosen) <= last


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-9, 1e-3, 1.0, 100.0, 1e300])
def test_extreme_temperatures_and_draws_give_a_possible_token(temperature: float, draw: float) -> None:
    logits = make_logits(spread=30.0)
    logits[7] = float("-inf")
    token = draw_token(logits, Unchecked(max_tokens=1, temperature=temperature), draw)
    assert token not in (7, None)
    if temperature <= 1e-3:
        assert token == int(logits.argmax())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(20))
def test_the_most_likely_is_that_of_torch(dtype: torch.dtype, seed: int) -> None:
    """With few different values, so that many are equal; both zeros, infinite ones and nan of either sign."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-math.nan, -math.inf, -1.5, -0.0, 0.0, 1.5, math.inf, math.nan])[: seed % 8 + 1]
    logits = values[torch.randint(len(values), (9, 50), generator=generator)].to(dtype)
    assert most_likely(logits).tolist() == logits.argmax(dim=-1).tolist()
    assert most_likely(logits[:, 3:40:2]).tolist() == logits[:, 3:40:2].argmax(dim=-1).tolist()
    assert most_likely(logits[:0]).shape == (0,)


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, [9, 4]] = 1.0
    biased = make_sequence(temperature=0, logit_bias={0: -1.0})
    greedy, scored = make_sequence(temperature=0), make_sequence(temperature=0, num_logprobs=1)
    assert sample(logits, greedy, biased, scored) == [4] * 3


def random_sequence(source: random.Random, vocab: int) -> Sequence:
    """A request with a random part of all parameters."""

    def maybe(value: Any, default: Any) -> Any:
        return value if source.random() < 0.35 else default

    prompt, output = (source.choices(range(vocab), k=source.randint(1, 20)) for _ in range(2))
    return make_sequence(
        prompt,
        output,
        max_tokens=99,
        seed=source.getrandbits(64),
        temperature=source.choice([0.0, 0.2, 0.7, 1.0, 1.5]),
        top_k=maybe(source.choice([1, 5, 40, 300, vocab]), 0),
        top_p=maybe(source.choice([0.1, 0.5, 0.9, 0.999]), 1.0),
        min_p=maybe(source.choice([0.01, 0.2]), 0.0),
        repetition_penalty=maybe(1.3, 1.0),
        frequency_penalty=maybe(0.4, 0.0),
        presence_penalty=maybe(-0.3, 0.0),
        logit_bias=maybe({source.randrange(vocab): source.uniform(-5, 5) for _ in range(3)}, {}),
        min_tokens=maybe(50, 0),
        stop_token_ids=maybe((source.randrange(vocab),), ()),
        num_logprobs=maybe(source.choice([0, 3, 20]), None),
    )


@pytest.mark.parametrize("vocab", [50, 2000])
@pytest.mark.parametrize("seed", range(6))
def test_a_batch_gives_what_the_oracle_gives_row_by_row(seed: int, vocab: int) -> None:
    source = random.Random(seed)
    sequences = [random_sequence(source, vocab) for _ in range(60)]
    logits = torch.stack([make_logits(source.getrandbits(30), vocab=vocab, spread=3.0) for _ in sequences])
    for token, raw, sequence in zip(sample_tokens(logits, *sequences), logits, sequences, strict=True):
        sampling, row = sequence.sampling, adjusted(raw, sequence)
        draw = uniform_draw(sampling.seed, sequence.num_output_tokens)
        assert token.token_id == (int(row.argmax()) if sampling.temperature == 0 else oracle(row, sampling, draw)[0])
        assert (token.logprobs is None) is (sampling.num_logprobs is None)
        if token.logprobs is not None and sampling.num_logprobs is not None:
            logprobs = raw.log_softmax(-1)
            assert token.logprobs.logprob == pytest.approx(float(logprobs[token.token_id]), abs=1e-6)
            likeliest = logprobs.topk(sampling.num_logprobs).indices.tolist()
            assert [token_id for token_id, _ in token.logprobs.top] == likeliest


@pytest.mark.parametrize("slab_rows", [1, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(
    dtype: torch.dtype, slab_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 many logits are equal, and some of these rows have only a few different ones, or none."""
    vocab = 700
    monkeypatch.setattr("tandem.engine.sampling.logprobs._SLAB_BYTES", {"cpu": slab_rows * 4 * vocab})
    source = random.Random(5)
    print("seed 5")
    sequences = [random_sequence(source, vocab) for _ in range(40)]
    logits = torch.stack([make_logits(i, vocab=vocab) for i in range(40)])
    logits[::5] = logits[::5].round()
    logits[3], logits[4] = math.nan, -math.inf
    logits = logits.to(dtype)
    alone = [sample_tokens(logits[i : i + 1], sequence)[0] for i, sequence in enumerate(sequences)]
    for _ in range(4):
        order = source.sample(range(40), k=source.randint(2, 40))
        assert sample_tokens(logits[order], *(sequences[i] for i in order)) == [alone[i] for i in order]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_launching_waits_for_nothing_on_a_gpu() -> None:
    source = random.Random(6)
    sequences = [random_sequence(source, 2000) for _ in range(60)]
    logits = torch.stack([make_logits(i, vocab=2000, spread=3.0) for i in range(60)])
    on_device = logits.cuda()
    sampler = Sampler(frozenset({EOS}))
    sampler.sample(on_device, sequences)  # allocators are warm
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched = sampler.launch(on_device, sampler.plan(sequences, 2000))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    tokens = [token for token in launched.read() if isinstance(token, SampledToken)]
    assert [token.token_id for token in tokens] == sample(logits, *sequences)
    on_device_ids = launched.token_ids.tolist()
    # The host may choose the very token that the device has; where it says that it has, it is that one.
    assert all(token.token_id == i for token, i in zip(tokens, on_device_ids, strict=True) if token.is_on_device)


@pytest.mark.parametrize("num_candidates", [1, 7, 49, 50])
def test_equal_values_are_listed_by_id(num_candidates: int) -> None:
    values = torch.tensor([[0.0, -0.0, 2.0, -1.0, 2.0] * 10, [float(i) for i in range(50)]])
    found, ids = top_values(values, num_candidates)
    assert torch.equal(found, values.gather(1, ids))
    assert ids[1].tolist() == list(range(49, -1, -1))[:num_candidates]
    if num_candidates == 50:
        assert ids[0].tolist() == sorted(range(50), key=lambda i: (-float(values[0, i]), i))


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.3), (60, 0.9)])
def test_where_tokens_are_equally_likely_the_lowest_ids_are_in(top_k: int, top_p: float) -> None:
    """More of them than are looked at first."""
    logits = torch.zeros(1000)
    logits[999] = 1.0
    sampling = SamplingParams(max_tokens=1, top_k=top_k, top_p=top_p)
    chosen = {draw_token(logits, sampling, draw) for draw in np.linspace(0, 1 - 2**-53, 700)}
    num_likely = 999 if top_k == 0 else top_k - 1
    assert chosen == {999, *range(math.ceil((math.e + num_likely) * top_p - math.e))}


@pytest.mark.parametrize("num_output", [0, 2, 3, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_bans_end_and_stop_tokens_exactly_so_long(num_output: int, temperature: float) -> None:
    logits = torch.full((VOCAB,), -50.0)
    logits[[EOS, 9]] = 50.0
    logits[11] = 20.0
    options = {"min_tokens": 3, "stop_token_ids": (9,), "temperature": temperature, "top_p": 0.9}
    sequence = make_sequence(output=[4] * num_output, **options)
    assert (sample(logits, sequence) == [11]) is (num_output < 3)


# Whatever the logits and the parameters are.

LARGEST = float(torch.finfo(torch.float32).max)
ODD_FLOATS = (0, 1, 0.0, -0.0, 1e-300, 1e-40, 1e-30, 0.5, 1.0, 2.0, 1e30, 1e300)
ODD_FLOATS += (-1.0, -1e300, math.inf, -math.inf, math.nan)
ODD_INTS = (0, 1, 3, VOCAB, VOCAB + 1, 2**31 - 1, 2**63, -1, -(2**63))
odd_float, odd_int = st.sampled_from(ODD_FLOATS), st.sampled_from(ODD_INTS)
odd_logit = st.sampled_from((math.inf, -math.inf, math.nan, LARGEST, -LARGEST, 0.0))
ODD_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), odd_float),
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "repetition_penalty"), odd_float),
    **dict.fromkeys(("top_k", "min_tokens", "seed"), odd_int),
    "num_logprobs": st.sampled_from((None, 0, 5, VOCAB + 9, -3)),
    "stop_token_ids": st.sampled_from(((), (3,), tuple(range(VOCAB)))),
    "logit_bias": st.sampled_from(({}, {4: 100.0}, {4: math.inf}, dict.fromkeys(range(VOCAB), -math.inf))),
}


@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from((0.0, 1e-40, 2.0, 1e30, 1e38)),
    odd=st.dictionaries(st.integers(0, VOCAB - 1), odd_logit, max_size=4),
    everywhere=st.none() | odd_logit,
    fields=st.fixed_dictionaries({}, optional=ODD_FIELDS),
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


def test_the_bias_of_a_request_is_made_once() -> None:
    sequences = [make_sequence(temperature=0, logit_bias={4: 100.0}), make_sequence(temperature=0, logit_bias={6: 9.0})]
    logits = torch.zeros(2, VOCAB)
    assert sample(logits, *sequences) == [4, 6]
    kept = [sequence.logit_bias for sequence in sequences]
    assert sample(logits, *sequences) == [4, 6]
    assert all(sequence.logit_bias is bias for sequence, bias in zip(sequences, kept, strict=True))
