from __future__ import annotations

import json
from typing import Any

import llguidance
import numpy as np
import pytest

from tandem.engine.number_tokens import MAX_NUMBER_CHARS
from tandem.engine.structured_output import GrammarMatcher, MaskRequest, StructuredOutput
from tandem.text.structured_output.compile_process import make_grammar
from tandem.text.tokenizer import Tokenizer
from tests.support.toy_tokenizer import build_tokenizer

END = 263  # </s>
LONG = "1" * MAX_NUMBER_CHARS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(build_tokenizer(tmp_path_factory.mktemp("numbers")))


@pytest.fixture(scope="module")
def structured(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = StructuredOutput(build_tokenizer(tmp_path_factory.mktemp("again")), 300, frozenset({END}))
    yield made
    made.close()


def schema(value: Any) -> str:
    return make_grammar("json", json.dumps(value))


def allowed_after(structured: StructuredOutput, grammar: str, ids: list[int], *, at_once: bool = True) -> set[int]:
    """The tokens that the mask allows after an output, consumed at once or token by token."""
    matcher = structured.matcher(grammar)
    matcher._compilation.compiled.result()
    pieces = [ids] if at_once else [[i] for i in ids]
    mask = b""
    for piece in pieces:
        mask = _mask(structured, matcher, piece)
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def _mask(structured: StructuredOutput, matcher: GrammarMatcher, ids: list[int]) -> bytes:
    structured.begin_masks([MaskRequest(matcher, ids)])
    assert matcher.pending is not None
    matcher.pending.rows.result()
    mask = matcher.take_mask()
    assert isinstance(mask, np.ndarray), mask
    return mask.tobytes()


def can_write(structured: StructuredOutput, tokenizer: Tokenizer, grammar: str, text: str, following: str) -> bool:
    ids = tokenizer.encode(text, add_special_tokens=False)
    (next_id,) = tokenizer.encode(following, add_special_tokens=False)
    allowed = allowed_after(structured, grammar, ids)
    assert allowed == allowed_after(structured, grammar, ids, at_once=False)
    assert allowed, "a mask must allow something"
    return next_id in allowed


@pytest.mark.parametrize(
    ("value", "before", "start"),
    [
        ({}, "", ""),
        ({}, '{"a": [true, ', ""),
        ({}, "", "0."),
        ({}, "", "-1e"),
        ({"type": "number"}, "", "-"),
        ({"type": "number"}, "", "3.1E+"),
        ({"type": "integer"}, "", ""),
        ({"type": "integer", "minimum": 0}, "", ""),
        ({"type": "object", "properties": {"a": {"type": "number"}}}, '{"a": ', ""),
        ({"type": "array", "items": {"type": ["integer", "string"]}}, '["1", ', ""),
    ],
)
def test_a_number_ends(structured: StructuredOutput, tokenizer: Tokenizer, value: Any, before: str, start: str) -> None:
    grammar, number = schema(value), start + LONG[len(start) :]
    assert can_write(structured, tokenizer, grammar, before + number[:-1], "1")
    for longer in (number, number + "1"):
        for following in "1.eE":
            assert not can_write(structured, tokenizer, grammar, before + longer, following)


@pytest.mark.parametrize("last", [".", "e", "E-"])
def test_a_number_goes_on_until_it_may_end(structured: StructuredOutput, tokenizer: Tokenizer, last: str) -> None:
    number = LONG[: -len(last)] + last
    assert can_write(structured, tokenizer, schema({}), number, "1")
    assert not can_write(structured, tokenizer, schema({}), number + "1", "1")


@pytest.mark.parametrize(
    ("grammar", "before"),
    [
        (schema({"type": "string"}), '"'),
        (schema({}), '{"key": "'),
        (schema({}), '{"'),
        (schema({"type": "string", "pattern": "^[0-9]+$"}), '"'),
        (schema({"type": "string", "minLength": 500}), '"'),
        (schema({"type": "string", "pattern": "^[0-9]{300}$"}), '"'),
        (make_grammar("regex", "[0-9]+"), ""),
        (llguidance.LLMatcher.grammar_from_lark("start: /[0-9]+/"), ""),
    ],
    ids=["string", "value", "key", "digits", "long", "300", "regex", "lark"],
)
def test_digits_elsewhere_go_on(structured: StructuredOutput, tokenizer: Tokenizer, grammar: str, before: str) -> None:
    assert can_write(structured, tokenizer, grammar, before + LONG + "1", "1")


def test_the_next_number_may_be_long_again(structured: StructuredOutput, tokenizer: Tokenizer) -> None:
    assert can_write(structured, tokenizer, schema({"type": "array"}), f"[{LONG}, {LONG[:-1]}", "1")
