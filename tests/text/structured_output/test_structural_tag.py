"""Structural tags: which texts they take, by format."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tandem.protocol.grammar import compile_grammar, make_grammar_tokenizer
from tandem.text.structured_output.compile_process import WHITESPACE
from tandem.text.structured_output.structural_tag import structural_tag_grammar
from tandem.text.tokenizer import Tokenizer

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}
ANY = {"type": "any_text"}
A = {"type": "tag", "begin": "<f=a>", "content": INTEGER, "end": "</f>"}
B = {"type": "tag", "begin": "<f=b>", "content": {"type": "const_string", "value": "x"}, "end": ["</f>", "</g>"]}
TAGS = {"triggers": ["<f="], "tags": [A, B]}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def row(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def takes(tokenizer: Tokenizer, document: dict[str, Any], text: str) -> bool:
    grammar = structural_tag_grammar(json.dumps(document), WHITESPACE)
    matcher = compile_grammar(make_grammar_tokenizer(tokenizer.to_json(), None, ()), grammar)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(matcher.consume_token(token_id) for token_id in ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("form", "taken", "refused"),
    [
        (const('say "a"\n\\'), ['say "a"\n\\'], ["say", ""]),
        (INTEGER, ["7", "-12"], ["x", "1.5"]),
        ({"type": "json_schema", "json_schema": True}, ['{"a": [1]}', "null"], ["nul"]),
        (ANY, ["", "a\nb </f>"], []),
        ({**ANY, "excludes": ["foo", "/"]}, ["fo o", "bar"], ["a foo", "a/b"]),
        ({"type": "regex", "pattern": "[a/]+\\/\n?b"}, ["a//b", "/a/\nb"], ["b", "a//"]),
        ({"type": "grammar", "grammar": 'root ::= "a" | "b" root'}, ["a", "bba"], ["b"]),
        (row(const("a"), INTEGER, const("b")), ["a5b"], ["ab", "a5"]),
        (row(ANY, const("end")), ["end", "any end"], ["any", "end more"]),
        (row(ANY, A, ANY), ["say <f=a>1</f> more", "<f=a>1</f>"], ["say", "say <f=a>x</f>"]),
        ({"type": "or", "elements": [const("a"), INTEGER]}, ["a", "3"], ["b", "a3"]),
        (row({"type": "optional", "content": const("a")}, const("b")), ["ab", "b"], ["aab"]),
        ({"type": "plus", "content": const("a")}, ["a", "aaa"], [""]),
        ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
        ({"type": "repeat", "min": 2, "max": 3, "content": const("a")}, ["aa", "aaa"], ["a", "aaaa"]),
        ({"type": "repeat", "min": 1, "max": -1, "content": const("a")}, ["a", "aaaaaa"], [""]),
        (A, ["<f=a>1</f>"], ["1", "<f=a>1"]),
        (B, ["<f=b>x</f>", "<f=b>x</g>"], ["<f=b>x"]),
        ({**A, "content": ANY}, ["<f=a></f>", "<f=a>any <f=a></f>"], ["<f=a>any", "<f=a></f></f>"]),
        ({**A, "content": row(A, const("-"))}, ["<f=a><f=a>1</f>-</f>"], ["<f=a>1</f>"]),
        ({"type": "triggered_tags", **TAGS}, ["", "a", "a<f=a>1</f>b<f=b>x</g>", "<f"], ["<f=a>x</f>", "<f=c"]),
        ({"type": "triggered_tags", **TAGS, "at_least_one": True}, ["<f=a>1</f>", "<f=b>x</f>c"], ["", "a<f=a>1</f>"]),
        ({"type": "triggered_tags", **TAGS, "stop_after_first": True}, ["a", "a<f=a>1</f>"], ["<f=a>1</f>b"]),
        (
            {"type": "triggered_tags", **TAGS, "stop_after_first": True, "at_least_one": True},
            ["<f=a>1</f>"],
            ["a", "<f=a>1</f>b"],
        ),
        ({"type": "triggered_tags", **TAGS, "excludes": ["no"]}, ["yes<f=a>1</f>yes"], ["no", "<f=a>1</f>no"]),
        (
            {"type": "tags_with_separator", "tags": [A, B], "separator": ", "},
            ["", "<f=a>1</f>", "<f=a>1</f>, <f=b>x</f>"],
            ["<f=a>1</f>, ", "a"],
        ),
        ({"type": "tags_with_separator", "tags": [A], "separator": ",", "at_least_one": True}, ["<f=a>1</f>"], [""]),
        (
            {"type": "tags_with_separator", "tags": [A], "separator": ",", "stop_after_first": True},
            ["", "<f=a>1</f>"],
            ["<f=a>1</f>,<f=a>1</f>"],
        ),
    ],
)
def test_formats(tokenizer: Tokenizer, form: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    assert [text for text in taken if not takes(tokenizer, {"type": "structural_tag", "format": form}, text)] == []
    assert [text for text in refused if takes(tokenizer, {"type": "structural_tag", "format": form}, text)] == []


@pytest.mark.parametrize("schema", [{"type": "integer"}, '{"type": "integer"}'])
def test_the_older_form(tokenizer: Tokenizer, schema: Any) -> None:
    document = {"structures": [{"begin": "<f=a>", "schema": schema, "end": "</f>"}], "triggers": ["<f="]}
    assert takes(tokenizer, document, "a <f=a>1</f> b")
    assert not takes(tokenizer, document, "a <f=a>x</f> b")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "'format', or 'structures' and 'triggers'"),
        ({"structures": [], "triggers": ["<"]}, "'format', or 'structures' and 'triggers'"),
        ({"format": {"type": "token", "token": 5}}, "'token'"),
        ({"format": {"type": "any_text", "max_chars": 5}}, "max_chars"),
        ({"format": {"type": "any_text", "excludes": [""]}}, "length >= 1"),
        ({"format": {**INTEGER, "style": "qwen_xml"}}, "'qwen_xml' - at `$.format.style`"),
        ({"format": {**INTEGER, "any_order": True}}, "any_order"),
        ({"format": {"type": "json_schema", "json_schema": False}}, "no JSON fits"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": ANY}}, "must come last"),
        ({"format": {"type": "repeat", "min": 3, "max": 2, "content": A}}, "max 2 is less than min 3"),
        ({"format": row(ANY, INTEGER)}, "must come last"),
        ({"format": row({"type": "triggered_tags", **TAGS}, const("x"))}, "must come last"),
        ({"format": {"type": "star", "content": ANY}}, "must come last"),
        ({"format": {**A, "content": ANY, "end": ""}}, "needs a text that closes it"),
        ({"format": {"type": "triggered_tags", "triggers": ["<g="], "tags": [A]}}, "none of the triggers begins"),
        ({"format": {"type": "or", "elements": []}}, "length >= 1"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(document: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)) as error:
        structural_tag_grammar(json.dumps(document), WHITESPACE)
    assert message in str(error.value)


def test_deep_nesting_is_an_error() -> None:
    text = '{"type": "optional", "content": ' * 5000 + json.dumps(A) + "}" * 5000
    with pytest.raises((RecursionError, msgspec.MsgspecError)):
        structural_tag_grammar(f'{{"format": {text}}}', WHITESPACE)
