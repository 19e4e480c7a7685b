from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from tandem.text.detokenizer import Detokenizer
from tandem.text.tokenizer import Tokenizer


def stream(detokenizer: Detokenizer, runs: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(run) for run in runs), detokenizer.flush()]


def split(items: list[int], data: st.DataObject) -> list[list[int]]:
    runs = []
    while items:
        size = data.draw(st.integers(1, 5))
        runs.append(items[:size])
        items = items[size:]
    return runs


@given(
    ids=st.lists(st.integers(0, 263), max_size=30),
    text=st.text(max_size=40),
    prompt=st.text(max_size=10),
    data=st.data(),
)
def test_joined_stream_is_the_text_whatever_the_split(
    tokenizer: Tokenizer, ids: list[int], text: str, prompt: str, data: st.DataObject
) -> None:
    ids, prompt_ids = ids + tokenizer.encode(text, add_special_tokens=False), tokenizer.encode(prompt)
    pieces = stream(tokenizer.detokenizer(prompt_ids), split(ids, data))
    assert prompt + "".join(pieces) == tokenizer.decode([*prompt_ids, *ids], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("text", "ends", "expected"),
    [
        ("a🎉b", range(1, 7), ["a", "", "", "", "🎉", "b", ""]),
        ("ab🎉", [3, 6], ["ab", "🎉", ""]),
        ("a🎉", [4], ["a", "\ufffd"]),
    ],
    ids=["token by token", "behind a whole one", "never completed"],
)
def test_incomplete_characters_wait(tokenizer: Tokenizer, text: str, ends: Sequence[int], expected: list[str]) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert stream(tokenizer.detokenizer([]), [ids[start:end] for start, end in pairwise([0, *ends])]) == expected


def test_runs_that_all_end_within_a_character_are_not_invalid_bytes(tokenizer: Tokenizer) -> None:
    text = "\x80" * 40  # two tokens each
    ids = tokenizer.encode(text, add_special_tokens=False)
    runs = [ids[:1], *(ids[i : i + 2] for i in range(1, len(ids), 2))]
    assert "".join(stream(tokenizer.detokenizer([]), runs)) == text


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
    assert stream(Detokenizer(fast), runs) == ["Hello", " world", "", "", "€", "!", ""]
    assert stream(Detokenizer(fast, prompt_ids=[0]), runs[1:])[0] == " world"


def test_a_token_that_changes_text_already_sent_ends_nothing() -> None:
    fast = FastTokenizer(models.BPE(vocab={"a": 0, "b": 1, "d": 2}, merges=[]))
    fast.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")])
    assert stream(Detokenizer(fast), [[0], [1], [2], [2]]) == ["a", "", "d", "d", ""]
