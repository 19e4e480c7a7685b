from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.text.stop_strings import StopMatcher, StopStrings
from tandem.text.tokenizer import Tokenizer
from tests.text.test_detokenizer import split, stream


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the stop string that starts first; of several that start together, the shortest."""
    starts = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not starts:
        return text, None
    start, _, stop = min(starts)
    return text[:start], stop


def matched(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(StopStrings(stops) if stops else None)
    shown = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    text, stop = matcher.flush()
    return [*shown, text], stop


@given(
    text=st.text("abé", max_size=24), stops=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3), data=st.data()
)
def test_joined_stream_is_the_text_cut_at_the_earliest_stop(
    tokenizer: Tokenizer, text: str, stops: list[str], data: st.DataObject
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer.detokenizer([]), split(ids, data))
    shown, stop = matched(stops, pieces)
    assert ("".join(shown), stop) == cut_at_stop(text, stops)


def naive(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """The slow version: searches the whole held text again for each piece."""
    shown, held = [], ""
    for piece in pieces:
        held += piece
        text, stop = cut_at_stop(held, stops)
        begun = (i for i in range(len(text)) if any(stop.startswith(held[i:]) for stop in stops))
        start = next(begun, len(text))  # an incomplete stop string begins here
        if stop is not None and start == len(text):
            return [*shown, text], stop
        shown.append(held[:start])
        held = held[start:]
    text, stop = cut_at_stop(held, stops)
    return [*shown, text], stop


@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=7), min_size=1, max_size=6),
    pieces=st.lists(st.text("ab\n", max_size=9), max_size=9),
)
def test_the_matcher_shows_the_same_after_each_piece_as_a_naive_one(stops: list[str], pieces: list[str]) -> None:
    assert matched(stops, pieces) == naive(stops, pieces)


@pytest.mark.parametrize("num_stops", [1, 64, 1024])
def test_a_piece_costs_the_same_however_many_stops_are_held_back_for(num_stops: int) -> None:
    class Counting(dict[int, int]):
        num_lookups = 0

        def get(self, *args: int) -> int | None:
            self.num_lookups += 1
            return super().get(*args)

    stops = StopStrings(["a" * 12 + f"{i:04d}" for i in range(num_stops)])
    stops.next = lookups = Counting(stops.next)
    matcher = StopMatcher(stops)
    for _ in range(1000):
        assert matcher.push("aaab").stop is None
    assert lookups.num_lookups <= 4 * 4000  # per character: one that fails, and one for each state it falls back to


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "stop"),
    [
        (["END"], ["abE", "NDx"], ["ab", ""], "END"),
        (["END"], ["abE", "Nx"], ["ab", "ENx", ""], None),
        (["END"], ["abEN"], ["ab", "EN"], None),
        (["ab"], ["abc"], [""], "ab"),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""], "\n\n"),
        (["abcd", "bc"], ["xabc", "d"], ["x", ""], "abcd"),
        (["abcd", "bc"], ["xabc", "e"], ["x", "a"], "bc"),
        (["abcd", "bc"], ["xabc"], ["x", "a"], "bc"),
        (["🎉"], ["a🎉b"], ["a"], "🎉"),
        ([], ["a"], ["a", ""], None),
        ([f"({i}.*" for i in range(500)], ["a(7.", "*b"], ["a", ""], "(7.*"),
    ],
)
def test_nothing_that_may_become_a_stop_string_is_shown(
    stops: list[str], pieces: list[str], shown: list[str], stop: str | None
) -> None:
    assert matched(stops, pieces) == (shown, stop)
