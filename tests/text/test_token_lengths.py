"""No text that fits is refused before it is encoded, for any parts of a tokenizer."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from tandem.protocol.errors import ContextLengthExceeded
from tandem.text import tokenizer as tokenizer_module
from tandem.text.token_lengths import PromptLimit, TokenLength, _byte_level_names, byte_shares, token_length
from tandem.text.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
SPACES = 7  # of the longest token


def byte_level(*, without: str = "", normalizer: object = None) -> FastTokenizer:
    names = [name for name in ALPHABET if name not in without]
    vocab = {name: i for i, name in enumerate([*names, *("Ġ" * n for n in range(2, SPACES + 1))])}
    merges = [("Ġ" * n, "Ġ") for n in range(1, SPACES)]
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        fast.normalizer = normalizer
    return fast


def byte_fallback(model: type = models.BPE) -> FastTokenizer:
    tokens = ["<unk>", *BYTE_TOKENS, "▁", "▁▁", "a", "▁▁▁▁"]
    if model is models.Unigram:
        fast = FastTokenizer(models.Unigram([(token, -1.0) for token in tokens], 0, True))
    else:
        merges = [("▁", "▁"), ("▁▁", "▁▁")]
        vocab = {token: i for i, token in enumerate(tokens)}
        fast = FastTokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return fast


BOUNDED = {
    "byte level": byte_level(),
    "byte level that leaves control characters out": byte_level(without="Ăă"),
    "composed": byte_level(normalizer=normalizers.NFC()),
    "two become one": byte_level(normalizer=normalizers.Replace("ab", "c")),
    "nested": byte_level(normalizer=normalizers.Sequence([normalizers.Sequence([normalizers.NFKC()])])),
    "byte fallback": byte_fallback(),
    "unigram": byte_fallback(models.Unigram),
}


MARKS = ("é", "e\u0301", "\u03b1\u0313\u0300\u0345", "각", "🎉", "日")


def texts_of(*parts: str) -> Iterator[str]:
    rng = random.Random(5)
    for _ in range(2000):
        yield "".join(rng.choice(parts) * rng.randint(1, 20) for _ in range(rng.randint(0, 4)))


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_the_bound(name: str) -> None:
    fast = BOUNDED[name]
    length = token_length(fast)
    assert length is not None
    for text in texts_of(" ", "ab", "\x02", "\x03", "a", *MARKS, "\u1f82", "ﬁ", "İ"):
        assert length.min_tokens(text) <= len(fast.encode(text, add_special_tokens=False).ids), repr(text)


def test_the_bound_is_reached_by_the_longest_token() -> None:
    length = token_length(byte_level())
    assert (length, length.min_tokens(" " * SPACES * 100)) == (TokenLength(SPACES, SPACES), 100)


def test_characters_that_a_tokenizer_drops_do_not_count() -> None:
    fast = BOUNDED["byte level that leaves control characters out"]
    length = token_length(fast)
    assert length is not None
    assert length.left_out == "\x02\x03"
    text = "\x02" * 10_000 + " "
    assert (length.min_tokens(text), len(fast.encode(text).ids)) == (1, 1)


@pytest.mark.parametrize("name", ["byte level", "byte level that leaves control characters out", "composed"])
def test_no_text_has_fewer_tokens_than_its_bytes_say(name: str) -> None:
    fast = BOUNDED[name]
    fast.add_special_tokens([AddedToken("<end of text>")])
    shares = byte_shares(fast)
    assert shares is not None
    for text in texts_of("  ", "ab", "\x02", *MARKS, "<end of text>", "<end"):
        assert shares.min_tokens(text) <= len(fast.encode(text, add_special_tokens=False).ids), repr(text)


@pytest.mark.parametrize(("text", "num_tokens"), [(" " * SPACES * 9, 9), ("q" * 1000, 1000), ("日" * 1000, 3000)])
def test_a_byte_counts_by_the_longest_token_that_contains_it(text: str, num_tokens: int) -> None:
    shares = byte_shares(byte_level())
    assert shares is not None
    assert shares.min_tokens(text) == num_tokens


@pytest.mark.parametrize("name", ["two become one", "nested", "byte fallback", "unigram"])
def test_bytes_say_nothing_where_tokens_are_not_bytes_of_the_text(name: str) -> None:
    assert byte_shares(BOUNDED[name]) is None


def test_a_long_word_is_refused_before_it_is_encoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding a word takes more than linear time, and nobody else's text goes on meanwhile."""
    longest = max(map(len, tokenizer._fast.get_vocab()))
    word = "q" * (longest * 10)
    assert len(tokenizer.encode(word)) > 10
    tokenizer.check_length(word, PromptLimit(10, "prompt"))  # by its length alone it might fit
    monkeypatch.setattr(tokenizer, "_fast", None)
    monkeypatch.setattr(tokenizer_module, "FEW_CHARS", 1)  # this tokenizer has no long tokens
    with pytest.raises(ContextLengthExceeded, match="characters, which are at least"):
        tokenizer.encode(word, limit=PromptLimit(10, "prompt"))


def changed(**parts: object) -> FastTokenizer:
    fast = byte_level()
    for name, part in parts.items():
        setattr(fast, name, part)
    return fast


def with_token(**fields: bool) -> FastTokenizer:
    fast = byte_level()
    fast.add_tokens([AddedToken("<end>", **fields)])
    return fast


@pytest.mark.parametrize(
    "fast",
    [
        changed(normalizer=normalizers.Strip()),
        changed(normalizer=normalizers.Replace(Regex(" +"), " ")),
        changed(normalizer=normalizers.Replace("a", "")),
        changed(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])),
        changed(pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        changed(
            pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
        ),
        with_token(lstrip=True),
        with_token(rstrip=True),
        byte_level(without="ģ"),  # a byte within characters
        FastTokenizer(models.BPE({"a": 0}, [])),
        FastTokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)),
        FastTokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
        FastTokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
    ],
)
def test_if_a_token_can_have_any_length_there_is_no_bound(fast: FastTokenizer) -> None:
    assert token_length(fast) is None


def test_byte_names_are_those_of_the_library() -> None:
    names = _byte_level_names()
    assert set(names.values()) == set(ALPHABET)
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for char in map(chr, [*range(128), 0xE9, 0x7FF, 0xFFFD, 0x10FFFF]):
        assert byte.pre_tokenize_str(char)[0][0] == "".join(names[byte] for byte in char.encode())


def test_a_text_that_cannot_fit_is_refused_by_its_length(tokenizer: Tokenizer) -> None:
    limit = PromptLimit(10, "prompt")
    longest = max(map(len, tokenizer._fast.get_vocab()))
    tokenizer.check_length("x" * longest * 10, limit)
    with pytest.raises(
        ContextLengthExceeded, match=rf"10 tokens, but the prompt has {longest * 10 + 1} characters"
    ) as told:
        tokenizer.encode("x" * (longest * 10 + 1), limit=limit)
    assert "at least 11 tokens" in str(told.value)
    assert told.value.param == "prompt"


def test_a_text_that_could_fit_is_refused_by_its_tokens(tokenizer: Tokenizer) -> None:
    limit = PromptLimit(10, "messages")
    assert len(tokenizer.encode("x" * 9, limit=limit)) == 10  # with <s>
    with pytest.raises(ContextLengthExceeded, match="10 tokens, but the prompt has 11 tokens"):
        tokenizer.encode("x" * 10, limit=limit)
    for num_chars in (11, 2000):  # whole, and in segments
        with pytest.raises(ContextLengthExceeded):
            tokenizer._segments.encode("x" * num_chars, "", limit)
