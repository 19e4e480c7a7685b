"""Prompts that are too long: refused by their tokens, and before that by the fewest tokens that their text can have.

How many characters a token can stand for is known for each part of a tokenizer by its type. One part that is not known
here, or that can make a token of any length (a normalizer that drops characters, a word that becomes one unknown
token), and no text is refused before it is encoded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

from tandem.protocol.errors import ContextLengthExceeded

__all__ = ["PromptLimit", "TokenLength", "token_length"]

# A character of a composed text is made of 4 at most, as Unicode promises for all time; of ASCII nothing is composed.
_COMPOSING = {"NFC": 4, "NFKC": 4}
_GROWING = {"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"}  # normalizers that never make a text shorter
_WHOLE = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}  # pre-tokenizers that drop nothing
_SPLITTING = {"Split", "Punctuation"}  # these neither, unless they are told to
_CONTINUATION = range(0x80, 0xC0)  # bytes that every character beyond ASCII has in UTF-8


class PromptLimit(NamedTuple):
    """The longest prompt there may be, and the field of the request that has it."""

    max_tokens: int
    param: str

    def check(self, num_tokens: int, size: str = "") -> None:
        """Raise `ContextLengthExceeded` for more tokens; `size` says in other words how large the prompt is."""
        if num_tokens > self.max_tokens:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.max_tokens} tokens, but the prompt has "
                f"{size or f'{num_tokens} tokens'}. Send less.",
                param=self.param,
            )


class TokenLength(NamedTuple):
    """The most characters of a text that one token stands for, apart from those that the tokenizer leaves out."""

    of_ascii: int
    of_any: int
    left_out: str = ""  # each once

    def min_tokens(self, text: str) -> int:
        """The fewest tokens that the text can have."""
        num_chars = len(text) - sum(map(text.count, self.left_out))
        return math.ceil(num_chars / (self.of_ascii if text.isascii() else self.of_any))


def token_length(fast: Any) -> TokenLength | None:
    """The most characters that a token of this fast tokenizer stands for; None where there is no bound."""
    parts = json.loads(fast.to_str())
    normalizers = list(_flat(parts["normalizer"], "normalizers"))
    splits = list(_flat(parts["pre_tokenizer"], "pretokenizers"))
    vocab = fast.get_vocab(with_added_tokens=True)
    left_out = _left_out(
        parts["model"], vocab, is_byte_level=any(p["type"] == "ByteLevel" for p in normalizers + splits)
    )
    if (
        left_out is None
        or (left_out and any(part["type"] == "Replace" for part in normalizers))  # which could put such in
        or not all(map(_is_bounded, normalizers))
        or not all(map(_drops_nothing, splits))
        or any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])  # they take in all spaces
    ):
        return None
    # Each character of a token's name is one of the normalized text, or one byte of it, or none.
    of_ascii = max(map(len, vocab)) * math.prod(map(_shrinking, normalizers))
    return TokenLength(of_ascii, of_ascii * math.prod(_COMPOSING.get(p["type"], 1) for p in normalizers), left_out)


def _flat(part: dict[str, Any] | None, name: str) -> Iterator[dict[str, Any]]:
    """The parts of a sequence, also where it is one of sequences; a single part; or none."""
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
    """How many characters become one, composition apart."""
    if normalizer["type"] != "Replace":
        return 1
    return math.ceil(len(normalizer["pattern"]["String"]) / len(normalizer["content"]))


def _drops_nothing(split: dict[str, Any]) -> bool:
    return split["type"] in _WHOLE or (split["type"] in _SPLITTING and split["behavior"] != "Removed")


def _left_out(model: dict[str, Any], vocab: Container[str], *, is_byte_level: bool) -> str | None:
    """ASCII characters that the model does not know and leaves out; None where it may know others not either.

    What is unknown to a model is left out, or becomes one token together with what is unknown beside it.
    """
    if model["type"] not in ("BPE", "Unigram"):
        return None
    if model.get("byte_fallback"):
        return "" if all(f"<0x{byte:02X}>" in vocab for byte in range(0x100)) else None
    names = _byte_level_names()
    # A first byte that is unknown is left out alone: the others of its character still count for one.
    if not is_byte_level or not all(names[byte] in vocab for byte in _CONTINUATION):
        return None
    return "".join(chr(byte) for byte in range(0x80) if names[byte] not in vocab)


def _byte_level_names() -> dict[int, str]:
    """How byte-level vocabularies name each byte: by the printable character of its number, the others by further ones.

    As in GPT-2, of which all such vocabularies have it.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
