"""Probes: matchers that look for forced tokens, and whose making must not take long either."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import llguidance
import pytest

from tandem.protocol import grammar as module
from tandem.protocol.grammar import compile_probe

LETTERS = "abcxyz"
_END = {"id": 0, "content": "</s>", "special": True}
_END |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_VOCAB = {"</s>": 0} | {letter: number for number, letter in enumerate(LETTERS, 1)}
TOKENIZER = json.dumps(
    dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    | {"version": "1.0", "added_tokens": [_END], "pre_tokenizer": _BYTES, "decoder": _BYTES}
    | {"model": {"type": "BPE", "vocab": _VOCAB, "merges": []}}
)


@pytest.fixture
def num_masks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the masks that probes compute."""
    counted = [0]

    class Counting:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._matcher = llguidance.LLMatcher(*arguments, **options)

        def compute_bitmask(self) -> bytes:
            counted[0] += 1
            return self._matcher.compute_bitmask()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._matcher, name)

    monkeypatch.setattr(module, "llguidance", SimpleNamespace(LLMatcher=Counting))
    return counted


def probe_of(regex: str) -> Any:
    tokenizer = module.make_grammar_tokenizer(TOKENIZER, len(LETTERS) + 1, [0])
    return compile_probe(tokenizer, llguidance.grammar_from("regex", regex))


def test_a_probe_stands_at_the_beginning_of_its_grammar() -> None:
    probe = probe_of("abc[xy]z{20}")
    assert probe.compute_ff_bytes() == b"abc"
    probe.consume_tokens([1, 2, 3, 4])
    assert probe.compute_ff_bytes() == b"z" * 20


def test_what_begins_with_a_long_fixed_text_has_none_and_costs_one_mask(num_masks: list[int]) -> None:
    tokenizer = llguidance.LLTokenizer(TOKENIZER, n_vocab=len(LETTERS) + 1, eos_token=[0])
    for regex in ("a{600}[xy]", "ab{513}[xy]"):
        num_masks[0] = 0
        assert compile_probe(tokenizer, llguidance.grammar_from("regex", regex)) is None
        assert num_masks[0] == 1
    num_masks[0] = 0
    assert compile_probe(tokenizer, llguidance.grammar_from("regex", "a{40}[xy]")) is not None
    assert num_masks[0] <= 41


def test_a_grammar_that_is_all_fixed_text_has_none() -> None:
    assert probe_of("abc") is None
