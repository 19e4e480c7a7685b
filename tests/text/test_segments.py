"""Cut texts give the ids of whole texts: with byte-level BPE, with metaspaces, and with tokenizers that never cut."""

from __future__ import annotations

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from tandem.text import segments
from tandem.text.segments import ENTRY_CHARS, SegmentCache, SegmentEncoder
from tandem.text.tokenizer import Tokenizer

SPECIALS = ["<|im_start|>", "<|im_end|>", "<s>", "<|im_end|>x"]


def byte_level(**flags: bool) -> FastTokenizer:
    """Like GPT-2, Llama 3 and Qwen: bytes, a splitting pattern, merges over spaces and letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    merges = [pair.split("+") for pair in ["h+e", "l+l", "he+ll", "Ġ+w", "o+r", "Ċ+Ċ", "Ġ+Ġ", "<+|", "|+>"]]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in merges]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS[1:]])
    fast.add_special_tokens([AddedToken(SPECIALS[0], special=True, normalized=False, **flags)])
    return fast


def metaspaced(scheme: str) -> FastTokenizer:
    """Like Llama 2 and Mistral: spaces become letters, and one is put before a text, or before each part of it."""
    chars = ["▁", *"abcdehlorw <|>_imstndx\n"]
    vocab = {"<unk>": 0} | {char: i + 1 for i, char in enumerate(dict.fromkeys(chars))}
    merges = [("▁", "w"), ("h", "e"), ("l", "l"), ("▁", "▁")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    fast = FastTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True))
    if scheme == "normalizer":
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return fast


SCHEMES = ("first", "always", "never", "normalizer")
TOKENIZERS = {"byte-level": byte_level()} | {scheme: metaspaced(scheme) for scheme in SCHEMES}
PARTS = st.one_of(
    st.sampled_from([*SPECIALS, " ", "  ", "\n", "<", "|>", "<|im_", "x", "é", "日"]), st.text(max_size=6)
)


def whole(fast: FastTokenizer, text: str) -> list[int]:
    return list(fast.encode(text, add_special_tokens=False).ids)


@pytest.fixture(autouse=True)
def _cut_short_texts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "MIN_TEXT_CHARS", 0)


def cuts_texts(encoder: SegmentEncoder) -> bool:
    encoder.encode("a", "probe")
    return len(encoder.cache) > 0


@pytest.mark.hypothesis
@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_text_gives_the_ids_of_the_whole(name: str) -> None:
    encoder = SegmentEncoder(TOKENIZERS[name], SegmentCache(3000))
    assert cuts_texts(encoder)

    @given(st.lists(PARTS, max_size=12), st.sampled_from(["", "a", "b"]))
    def check(parts: list[str], salt: str) -> None:
        text = "".join(parts)
        assert encoder.encode(text, salt) == whole(TOKENIZERS[name], text)
        assert encoder.cache.num_chars <= 3000

    check()


@pytest.mark.parametrize("seed", range(3))
def test_each_turn_gives_the_ids_of_the_whole_and_encodes_only_its_part(seed: int) -> None:
    rng, fast, text = random.Random(seed), byte_level(), ""
    encoder = SegmentEncoder(fast)
    for turn in range(20):
        question = "".join(rng.choice("hello world <|>\n é") for _ in range(rng.randint(0, 200)))
        text += f"<|im_start|>user\n{turn}{question}<|im_end|>\n<|im_start|>assistant\n"
        before = len(encoder.cache)
        assert encoder.encode(text, "") == whole(fast, text)
        assert len(encoder.cache) - before <= 6  # the message, its end, the answer's head
        text += "".join(rng.choice("hello world\n") for _ in range(100)) + "<|im_end|>\n"


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", ""])
def test_texts_are_not_cut_at_tokens_that_absorb_spaces_or_without_any(flag: str) -> None:
    fast = byte_level(**{flag: True}) if flag else FastTokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    encoder = SegmentEncoder(fast)
    assert not cuts_texts(encoder)
    text = "he <|im_start|> llo <s>\n"
    assert encoder.encode(text, "") == whole(fast, text)


def test_a_tokenizer_that_breaks_the_rule_is_detected(caplog: pytest.LogCaptureFixture) -> None:
    class Merging:
        """A tokenizer that gives one id less for a text of several segments."""

        def __init__(self) -> None:
            self._fast = byte_level()

        def get_added_tokens_decoder(self) -> object:
            return self._fast.get_added_tokens_decoder()

        def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[object]:
            encodings = self._fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            if "\n<|im" in texts[0]:
                encodings[0].truncate(len(encodings[0]) - 1)
            return encodings

    assert not cuts_texts(SegmentEncoder(Merging()))
    assert "encoded whole" in caplog.text


def test_segments_of_one_tenant_are_not_cached_for_another() -> None:
    encoder = SegmentEncoder(byte_level())
    encoder.encode("<s>secret", "a")
    assert encoder.cache.get("a", "<s>secret") is not None
    assert encoder.cache.get("b", "<s>secret") is None


def test_the_cache_keeps_its_bound_and_drops_the_least_recently_used() -> None:
    cache = SegmentCache(8 * (10 + ENTRY_CHARS))
    for i in range(8):
        cache.put("", f"{i}" * 10, [i])
    assert cache.get("", "0" * 10) is not None
    cache.put("", "8" * 10, [8])
    assert (cache.get("", "1" * 10), cache.num_chars, len(cache)) == (None, 8 * (10 + ENTRY_CHARS), 8)
    cache.put("", "x" * 11, [1])  # more than an eighth
    assert cache.get("", "x" * 11) is None
    cache.put("", "8" * 10, [8])
    assert cache.num_chars == 8 * (10 + ENTRY_CHARS)


def test_long_salts_and_many_short_segments_keep_the_bound_too() -> None:
    cache = SegmentCache(100_000)
    for i in range(5000):
        cache.put("", f"{i}", [i])
    assert len(cache) <= 100_000 // ENTRY_CHARS
    for i in range(200):
        cache.put(f"{i}".ljust(10_000, "s"), "hello", [i])
    assert len(cache) <= 10
    cache.put("s" * 20_000, "hello", [1])  # more than an eighth
    assert cache.get("s" * 20_000, "hello") is None


def test_many_threads_encode_at_once() -> None:
    fast = byte_level()
    encoder = SegmentEncoder(fast, SegmentCache(2000))
    texts = [f"<s>{i % 7} hello<|im_end|>\nworld {i}" for i in range(200)]
    expected = {text: whole(fast, text) for text in texts}
    wrong: list[str] = []

    def work(offset: int) -> None:
        for i in range(len(texts)):
            text = texts[(i + offset) % len(texts)]
            if encoder.encode(text, "") != expected[text]:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(50 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert encoder.cache.num_chars <= 2000


def test_the_frontends_tokenizer_cuts_chats(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": f"hello </s> world {i}"} for i in range(20)]
    options = {"add_generation_prompt": True}
    text = tokenizer.render_chat(messages, options)
    assert tokenizer.encode_chat(messages, options, "") == tokenizer.encode(text, add_special_tokens=False)
