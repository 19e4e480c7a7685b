from __future__ import annotations

import random

import pytest

from tandem.engine.output_lengths import OutputLengths


def lengths_of(*answers: tuple[int, int]) -> OutputLengths:
    lengths = OutputLengths()
    for num_tokens, max_tokens in answers:
        lengths.note(num_tokens, max_tokens)
    return lengths


def test_of_answers_as_long_four_in_five_end_sooner() -> None:
    lengths = lengths_of(*((num_tokens, 8000) for num_tokens in range(1, 101)))
    assert lengths.expected_rest(0, 8000) == 80
    assert lengths.expected_rest(50, 8000) == 40
    assert lengths.expected_rest(50, 60) == 10
    assert lengths.expected_rest(0, 1) == 1


def test_an_answer_that_was_cut_says_only_that_it_is_longer() -> None:
    lengths = lengths_of(*((10, 10) for _ in range(50)), *((300, 8000) for _ in range(10)))
    assert lengths.expected_rest(0, 8000) == 300
    assert lengths.expected_rest(0, 10) == 10


def test_the_share_that_ends_soon_is_that_of_answers_which_got_as_long() -> None:
    lengths = lengths_of(*((num_tokens, 8000) for num_tokens in range(1, 101)))
    assert lengths.share_ending(0, 0, 8000) == 0
    assert lengths.share_ending(0, 25, 8000) == pytest.approx(0.25)
    assert lengths.share_ending(50, 25, 8000) == pytest.approx(0.5)
    assert lengths.share_ending(50, 500, 8000) == pytest.approx(1)


def test_nothing_but_its_bound_ends_an_answer_of_which_nothing_is_known() -> None:
    assert lengths_of().share_ending(5, 1000, 8000) == 0
    assert lengths_of().share_ending(5, 1000, 1005) == 1
    lengths = lengths_of(*((num_tokens, 8000) for num_tokens in range(1, 101)))
    assert lengths.share_ending(92, 8, 8000) > 0, "eight got longer"
    assert lengths.share_ending(93, 8, 8000) == 0, "seven did"
    cut = lengths_of(*((10, 10) for _ in range(50)), *((300, 8000) for _ in range(10)))
    assert cut.share_ending(0, 20, 8000) == 0, "a cut answer would have gone on"


def test_where_nothing_is_known_a_long_answer_is_expected() -> None:
    assert lengths_of().expected_rest(0, 100) == 100
    assert lengths_of().expected_rest(0, 1_000_000) == 2048
    assert lengths_of((5000, 8000)).expected_rest(0, 8000) == 5000
    assert lengths_of((5000, 8000)).expected_rest(4000, 100_000) == 4000


def test_old_answers_are_forgotten() -> None:
    lengths = lengths_of(*((3000, 8000) for _ in range(300)), *((20, 8000) for _ in range(256)))
    assert lengths.expected_rest(0, 8000) == 20


@pytest.mark.parametrize("seed", range(3))
def test_every_expectation_is_within_its_bound(seed: int) -> None:
    rng = random.Random(seed)
    lengths = OutputLengths()
    for _ in range(600):
        max_tokens = rng.randint(1, 5000)
        lengths.note(rng.randint(1, max_tokens), max_tokens)
        num_tokens = rng.randint(0, 4999)
        bound = rng.randint(num_tokens + 1, 6000)
        assert 1 <= lengths.expected_rest(num_tokens, bound) <= bound - num_tokens
        shares = [lengths.share_ending(num_tokens, num_more, bound) for num_more in range(0, 6000, 50)]
        assert shares == sorted(shares)
        assert 0 <= shares[0] <= shares[-1] == 1
