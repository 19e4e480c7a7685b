from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from tandem.router.text.detokenizer import Detokenizer, StopMatcher, StopStrings
from tandem.router.text.tokenizer import Tokenizer

FAST = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def stream(detokenizer: Detokenizer, runs: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(run) for run in runs), detokenizer.flush()]


def split(items: list[int], data: st.DataObject) -> list[list[int]]:
    runs = []
    while items:
        size = data.draw(st.integers(1, 5))
        runs.append(items[:size])
        items = items[size:]
    return runs


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The plain definition: the stop string that starts first, of those the shortest."""
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


@FAST
@given(text=st.text(max_size=40), data=st.data())
def test_joined_stream_is_the_text_whatever_the_split(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer.detokenizer([]), split(ids, data))
    assert "".join(pieces) == text


@FAST
@given(ids=st.lists(st.integers(0, 263), max_size=30), prompt=st.text(max_size=10), data=st.data())
def test_joined_stream_is_the_full_decode_for_any_tokens(
    tokenizer: Tokenizer, ids: list[int], prompt: str, data: st.DataObject
) -> None:
    prompt_ids = tokenizer.encode(prompt)
    pieces = stream(tokenizer.detokenizer(prompt_ids), split(ids, data))
    assert prompt + "".join(pieces) == tokenizer.decode([*prompt_ids, *ids], skip_special_tokens=True)


@FAST
@given(
    text=st.text("abé", max_size=24),
    stops=st.lists(st.text("abé", min_size=1, max_size=4), max_size=3),
    data=st.data(),
)
def test_joined_stream_is_the_text_cut_at_the_earliest_stop(
    tokenizer: Tokenizer, text: str, stops: list[str], data: st.DataObject
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer.detokenizer([]), split(ids, data))
    shown, stop = matched(stops, pieces)
    assert ("".join(shown), stop) == cut_at_stop(text, stops)


def test_an_incomplete_character_is_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🎉b", add_special_tokens=False)
    assert stream(tokenizer.detokenizer([]), [[i] for i in ids]) == ["a", "", "", "", "🎉", "b", ""]


def test_complete_characters_are_sent_though_the_last_one_is_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab🎉", add_special_tokens=False)
    assert stream(tokenizer.detokenizer([]), [ids[:3], ids[3:]]) == ["ab", "🎉", ""]


def test_runs_that_all_end_within_a_character_are_not_taken_for_invalid_bytes(tokenizer: Tokenizer) -> None:
    text = "\x80" * 40  # two tokens each
    ids = tokenizer.encode(text, add_special_tokens=False)
    runs = [ids[:1], *(ids[i : i + 2] for i in range(1, len(ids), 2))]
    assert "".join(stream(tokenizer.detokenizer([]), runs)) == text


def test_a_character_cut_short_is_flushed_as_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🎉", add_special_tokens=False)[:-1]
    assert stream(tokenizer.detokenizer([]), [ids]) == ["a", "\ufffd"]


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), *tokenizer.encode("b")]
    assert "".join(stream(tokenizer.detokenizer([]), [ids])) == "ab"
    assert "".join(stream(tokenizer.detokenizer([], skip_special_tokens=False), [ids])) == "<s>a<s>b"


def test_endless_invalid_bytes_do_not_grow_the_window(tokenizer: Tokenizer) -> None:
    byte_id = tokenizer.encode("é", add_special_tokens=False)  # one merged token
    first_byte = tokenizer.encode("🎉", add_special_tokens=False)[:1]
    detokenizer = tokenizer.detokenizer([])
    pieces = [detokenizer.push(first_byte) for _ in range(100)]
    assert sum(map(len, pieces)) >= 64
    assert detokenizer.push(byte_id).endswith("é")


def test_leading_space_and_byte_fallback_of_a_sentencepiece_decoder() -> None:
    tokens = ["▁Hello", "▁world", "<0xE2>", "<0x82>", "<0xAC>", "!"]
    fast = FastTokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    runs = [[i] for i in range(len(tokens))]
    assert stream(Detokenizer(fast.decode), runs) == ["Hello", " world", "", "", "€", "!", ""]
    assert stream(Detokenizer(fast.decode, prompt_ids=[0]), runs[1:])[0] == " world"


def naive(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """Looks at all that is held again for each piece."""
    shown, held = [], ""
    for piece in pieces:
        held += piece
        text, stop = cut_at_stop(held, stops)
        begun = (i for i in range(len(text)) if any(stop.startswith(held[i:]) for stop in stops))
        start = next(begun, len(text))  # a stop string begins here that is not complete
        if stop is not None and start == len(text):
            return [*shown, text], stop
        shown.append(held[:start])
        held = held[start:]
    text, stop = cut_at_stop(held, stops)
    return [*shown, text], stop


@settings(max_examples=1000, deadline=None)
@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=7), min_size=1, max_size=6),
    pieces=st.lists(st.text("ab\n", max_size=9), max_size=9),
)
def test_the_matcher_shows_after_each_piece_what_a_naive_one_does(stops: list[str], pieces: list[str]) -> None:
    assert matched(stops, pieces) == naive(stops, pieces)


@pytest.mark.parametrize("num_stops", [1, 64, 1024])
def test_a_piece_costs_the_same_however_many_stops_are_held_back_for(num_stops: int) -> None:
    class Counting(dict[int, int]):
        num_looks = 0

        def get(self, *args: int) -> int | None:
            self.num_looks += 1
            return super().get(*args)

    stops = StopStrings(["a" * 12 + f"{i:04d}" for i in range(num_stops)])
    stops.next = looks = Counting(stops.next)
    matcher = StopMatcher(stops)
    for _ in range(1000):
        assert matcher.push("aaab").stop is None
    assert looks.num_looks <= 4 * 4000  # for a character one to see that it does not go on, one for each way back


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
    ],
)
def test_stop_matcher_shows_nothing_that_may_be_a_stop(
    stops: list[str], pieces: list[str], shown: list[str], stop: str | None
) -> None:
    assert matched(stops, pieces) == (shown, stop)


def test_hundreds_of_stops_with_regex_characters() -> None:
    stops = [f"({i}.*" for i in range(500)]
    assert matched(stops, ["a(7.", "*b"]) == (["a", ""], "(7.*")
    assert re.escape(stops[0]) != stops[0]
