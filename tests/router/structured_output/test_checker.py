"""Grammars are compiled in a real process of its own, which ends if one takes too much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tandem.protocol.errors import InternalError, Overloaded
from tandem.protocol.grammar import GrammarError
from tandem.protocol.sampling import MAX_GRAMMAR_CHARS
from tandem.router.structured_output import checker as checker_module
from tandem.router.structured_output.checker import MAX_WAITING, GrammarChecker
from tandem.router.structured_output.constraint import Constraint
from tandem.router.text.tokenizer import Tokenizer

OBJECT = Constraint("json", '{"type": "object"}', "response_format")
HOSTILE = Constraint("json", '{"type": "integer", "multipleOf": 99999989}', "response_format")  # takes hours
TAG = '{"structures": [{"begin": "<f=x>", "end": "</f>", "schema": {"type": "object"}}], "triggers": ["<f="]}'


@pytest.fixture
async def checker(tokenizer: Tokenizer) -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(tokenizer.to_json)
    yield made
    await made.close()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        ("json", "true"),
        ("regex", "(yes|no)+"),
        ("choice", '["a", "say \\"b\\"", "é🎉", ""]'),
        ("grammar", 'root ::= "a" | "b" root'),
        ("grammar", 'start: "a"+'),
        ("structural_tag", TAG),
    ],
)
async def test_what_can_be_kept_becomes_a_grammar(checker: GrammarChecker, kind: str, text: str) -> None:
    assert await checker.grammar(Constraint(kind, text, "x"))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json", '{"type": 7}', "type must be"),
        ("json", '{"oneOf": [{"type": "string"}, {"minLength": 3, "type": "string"}]}', "oneOf"),
        ("json", '{"$ref": "http://127.0.0.1/schema"}', "http://127.0.0.1/schema"),
        ("json", '{"$ref": "file:///etc/passwd"}', "file:///etc/passwd"),
        ("json", "[" * 20_000 + "]" * 20_000, "recursion"),
        ("json", "{", "malformed"),
        ("regex", "(((", "unclosed group"),
        ("grammar", "start: ((", "Expected token"),
        ("structural_tag", TAG.replace('["<f="]', '["<g="]'), "none of the triggers"),
        ("structural_tag", "{}", "structures"),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_name(
    checker: GrammarChecker, kind: str, text: str, message: str
) -> None:
    with pytest.raises(GrammarError, match="Invalid value for 'x'") as error:
        await checker.grammar(Constraint(kind, text, "x"))
    assert message in error.value.message
    assert error.value.param == "x"


async def test_a_grammar_that_takes_too_long_is_refused_and_others_go_on(checker: GrammarChecker) -> None:
    asked = [checker.grammar(one) for one in (HOSTILE, OBJECT, HOSTILE)]
    first, second, third = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, GrammarError)
    assert "takes more than 1 s" in first.message
    assert isinstance(second, str)
    assert isinstance(third, GrammarError)  # known by then: nothing is compiled again
    assert third.message == first.message


async def test_a_process_that_dies_is_replaced(checker: GrammarChecker) -> None:
    await checker.grammar(OBJECT)
    assert checker._process is not None
    checker._process.kill()
    await checker._process.wait()
    assert await checker.grammar(Constraint("regex", "a", "x"))


async def test_a_request_that_is_given_up_does_not_leave_its_answer_to_another(checker: GrammarChecker) -> None:
    given_up = asyncio.ensure_future(checker.grammar(HOSTILE))
    await asyncio.wait([given_up], timeout=0.2)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert await checker.grammar(Constraint("regex", "b", "x"))


async def test_too_much_text_is_refused_unread(checker: GrammarChecker) -> None:
    with pytest.raises(GrammarError, match=f"at most {MAX_GRAMMAR_CHARS}"):
        await checker.grammar(Constraint("regex", "a" * (MAX_GRAMMAR_CHARS + 1), "x"))
    assert checker._process is None


async def test_a_flood_of_new_grammars_is_refused(checker: GrammarChecker) -> None:
    asked = [checker.grammar(Constraint("regex", f"a{{{i + 1}}}", "x")) for i in range(MAX_WAITING + 5)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(answer, Overloaded) for answer in answers) == 5
    assert sum(isinstance(answer, str) for answer in answers) == MAX_WAITING


async def test_what_is_kept_is_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "MAX_KEPT_CHARS", 5000)
    for i in range(60):
        await checker.grammar(Constraint("regex", f"a{{{i + 1}}}", "x"))
    kept = sum(len(text) + len(one.grammar) for (_, text), one in checker._known.items())
    assert kept == checker._num_kept_chars <= 5000
    assert ("regex", "a{60}") in checker._known


async def test_a_process_that_does_not_start_is_an_error_of_ours() -> None:
    checker = GrammarChecker(lambda: "no tokenizer")
    with pytest.raises(InternalError):
        await checker.grammar(OBJECT)
    await checker.close()
