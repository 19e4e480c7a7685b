"""Refuses prompts that are too long: by their tokens, and before encoding by the fewest tokens that a text can have.

The most characters that a token can stand for follows from the types of a tokenizer's parts. If one part is unknown
here, or can make a token of any length (a normalizer that drops characters, a word that becomes one unknown token), no
text is refused before it is encoded.

That bound is weak for letters, because the longest tokens are runs of spaces. If tokens are bytes of the text, each
byte adds at least one over the length of the longest token that contains it:

    tokens  =  sum over tokens t of (1 / length(t)) * length(t)  >=  sum over bytes b of 1 / longest(b)
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

from tandem.protocol.errors import ContextLengthExceeded

# Composition makes one character of at most 4, as Unicode guarantees; ASCII characters are never composed.
_COMPOSING = {"NFC": 4, "NFKC": 4}
_GROWING = {"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"}  # normalizers that never make a text shorter
_KEEPING = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}  # pre-tokenizers that drop no characters
_SPLITTING = {"Split", "Punctuation"}  # these drop none unless their behavior is "Removed"
_WINDOW_BYTES = 1 << 16  # counted at once, in two milliseconds, while holding the GIL
_CONTINUATION = range(0x80, 0xC0)  # UTF-8 bytes that every character beyond ASCII contains


class PromptLimit(NamedTuple):
    """The longest allowed prompt, and the request field that holds it."""

    max_tokens: int
    param: str

    def check(self, num_tokens: int, size: str = "") -> None:
        """Raise `ContextLengthExceeded` if there are more tokens; `size` replaces their number in the message."""
        if num_tokens > self.max_tokens:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_tokens} tokens, but the prompt has "
                f"{size or f'{num_tokens} tokens'}. Send less.",
                param=self.param,
                num_tokens=num_tokens,
                max_tokens=self.max_tokens,
            )


class TokenLength(NamedTuple):
    """The most characters that one token can stand for, not counting characters that the tokenizer drops."""

    of_ascii: int
    of_any: int
    left_out: str = ""  # the dropped characters, each once

    def min_tokens(self, text: str) -> int:
        """The fewest tokens that this text can have."""
        num_chars = len(text) - sum(map(text.count, self.left_out))
        return math.ceil(num_chars / (self.of_ascii if text.isascii() else self.of_any))


class ByteShares(NamedTuple):
    """How much of a token each byte of a text is at least."""

    shares: list[float]  # of all 256; 0 for bytes that are dropped
    is_composed: bool  # whether texts are normalized to NFC first

    def min_tokens(self, text: str) -> int:
        """The fewest tokens that this text can have. Takes a twentieth of the time of encoding it."""
        if self.is_composed and not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
        data, total = memoryview(text.encode()), 0.0
        for start in range(0, len(data), _WINDOW_BYTES):
            counts = Counter(data[start : start + _WINDOW_BYTES])
            total += sum(count * self.shares[byte] for byte, count in counts.items())
        return math.ceil(total * (1 - 1e-9))  # rounding may have made it larger


def byte_shares(fast: Any) -> ByteShares | None:
    """The bytes' shares in the tokens of this fast tokenizer; None unless its tokens are bytes of the text."""
    parts = json.loads(fast.to_str())
    normalizers = {part["type"] for part in _flat(parts["normalizer"], "normalizers")}
    splits = {part["type"] for part in _flat(parts["pre_tokenizer"], "pretokenizers")}
    is_byte_level = "ByteLevel" in normalizers | splits
    if not is_byte_level or not normalizers <= {"NFC", "ByteLevel"} or token_length(fast) is None:
        return None
    names = _byte_level_names()
    added = ["".join(names[byte] for byte in token["content"].encode()) for token in parts["added_tokens"]]
    shares = dict.fromkeys(names.values(), 0.0)
    left = set(shares)
    for token in sorted([*fast.get_vocab(with_added_tokens=False), *added], key=len, reverse=True):
        found = left.intersection(token)  # this is the longest token with these bytes
        shares.update(dict.fromkeys(found, 1 / len(token)))
        left -= found
    return ByteShares([shares[names[byte]] for byte in range(256)], "NFC" in normalizers)


def token_length(fast: Any) -> TokenLength | None:
    """The most characters that a token of this fast tokenizer can stand for; None if there is no bound."""
    parts = json.loads(fast.to_str())
    normalizers = list(_flat(parts["normalizer"], "normalizers"))
    splits = list(_flat(parts["pre_tokenizer"], "pretokenizers"))
    vocab = fast.get_vocab(with_added_tokens=True)
    left_out = _left_out(
        parts["model"], vocab, is_byte_level=any(p["type"] == "ByteLevel" for p in normalizers + splits)
    )
    if (
        left_out is None
        or (left_out and any(part["type"] == "Replace" for part in normalizers))  # it could insert dropped characters
        or not all(map(_is_bounded, normalizers))
        or not all(map(_drops_nothing, splits))
        or any(
            token["lstrip"] or token["rstrip"] for token in parts["added_tokens"]
        )  # these absorb any number of spaces
    ):
        return None
    # Each character of a token's name is a character of the normalized text, or a byte of it, or neither.
    of_ascii = max(map(len, vocab)) * math.prod(map(_shrinking, normalizers))
    return TokenLength(of_ascii, of_ascii * math.prod(_COMPOSING.get(p["type"], 1) for p in normalizers), left_out)


def _flat(part: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """A part, or the parts of a sequence, which may contain sequences; nothing for None."""
    if part is not None:
        if part["type"] == "Sequence":
            for inner in part[name]:
                yield from _flat(inner, name)
        else:
            yield part


def _is_bounded(normalizer: dict[str, Any]) -> bool:
    kind = normalizer["type"]
    if kind == "Replace":
        return "String" in normalizer["pattern"] and bool(normalizer["content"])
    return kind in _COMPOSING or kind in _GROWING


def _shrinking(normalizer: dict[str, Any]) -> int:
    """How many characters become one, without composition."""
    if normalizer["type"] != "Replace":
        return 1
    return math.ceil(len(normalizer["pattern"]["String"]) / len(normalizer["content"]))


def _drops_nothing(split: dict[str, Any]) -> bool:
    return split["type"] in _KEEPING or (split["type"] in _SPLITTING and split["behavior"] != "Removed")


def _left_out(model: dict[str, Any], vocab: Container[str], *, is_byte_level: bool) -> str | None:
    """ASCII characters that the model does not know and drops; None if it may not know others either.

    A model drops an unknown character, or makes one token of it and the unknown characters beside it.
    """
    if model["type"] not in ("BPE", "Unigram"):
        return None
    if model.get("byte_fallback"):
        return "" if all(f"<0x{byte:02X}>" in vocab for byte in range(0x100)) else None
    names = _byte_level_names()
    # If a first byte is unknown, only that byte is dropped: the rest of its character still counts as one.
    if not is_byte_level or not all(names[byte] in vocab for byte in _CONTINUATION):
        return None
    return "".join(chr(byte) for byte in range(0x80) if names[byte] not in vocab)


def _byte_level_names() -> dict[int, str]:
    """The character that byte-level vocabularies use for each byte. All such vocabularies took it from GPT-2.

    A printable byte is the character of that number; the others are characters from 0x100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
