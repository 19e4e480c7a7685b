"""Python's literals as JSON, beside what Python itself reads."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest

from tests.support.work_count import num_lines_run
from tests.text.tool_calls.answers import parsed, parser, seeded

LITERALS = [
    "1", "-1", "+1", "- 2", "0", "00", "007", "1_000", "0x1F", "0b101", "0o17", "1.", ".5", "1.5e3", "-2E-3", "1e+2",
    "1e999", "-1e999", "1j", "5 .real", "9" * 4300, "9" * 4301, "0x" + "f" * 5000, "True", "False", "None", "-True",
    "''", '""', "''''''", '""" " ""\\""""', "'it\\'s'", '"a" \'b\'', "('a'\n'b')", "r'\\n\\''", "R'x' u'y' U'z'",
    "b'x'", "f'x'", "'\\x41\\u00e9\\U0001F600\\101\\0'", "'\\x4'", "'\\U00110000'", "'\\N{BULLET}\\N{EM DASH}'",
    "'\\N{no such}'", "'\\q\\\nx'", "'\\ud83d'", "'é\u2028😀'", "[]", "[1]", "[1,]", "[,]", "[1,,2]", "[1 2]", "()",
    "(1)", "(1,)", "((1, 2))", "(((1,),),)", "{}", "{'a': 1}", "{'a': {'b': [()]}, 'c': None,}", "{1: 2}", "{'a'}",
    "{'a': 1, **b}", "{'a' 'b': 'c' 'd'}", "{r'a': 1}", "[1", "1]", "'a", "1 + 1", "a", "f(1)", "'a'.b", "not True",
    "'a' if True else 'b'", "[x for x in y]", "--1", "[" * 99 + "]" * 99, "(" * 99 + "1" + ")" * 99,
]  # fmt: skip


def by_python(text: str) -> Any:
    """What `f(a=<text>)` says that `a` is, as JSON; None if it is not a literal of JSON."""
    try:
        call = ast.parse(f"f(a={text})", mode="eval").body
        assert isinstance(call, ast.Call)
        (keyword,) = call.keywords
        shown = json.dumps(ast.literal_eval(keyword.value), allow_nan=False)
        return None if "__set__" in shown or not has_string_keys(ast.literal_eval(keyword.value)) else shown
    except (AssertionError, TypeError, ValueError, SyntaxError):
        return None


def has_string_keys(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and has_string_keys(one) for key, one in value.items())
    return all(map(has_string_keys, value)) if isinstance(value, list | tuple) else True


def check(literal: str) -> None:
    text = f"[add(a={literal})]"
    answer = parsed([text], "pythonic")
    assert parsed(text, "pythonic") == answer
    expected = by_python(literal)
    if expected is None:
        assert (answer.calls, answer.content) == ([], text)
    else:
        ((_, arguments),) = answer.calls
        assert json.loads(arguments) == {"a": json.loads(expected)}


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("literal", LITERALS)
def test_literals_are_read_as_python_does(literal: str) -> None:
    check(literal)


PARTS = ["'", '"', "'''", "\\", "\\x4", "\\101", "\\N{BULLET}", "a", "r", "u", " ", "1", "0", ".", "e", "-", "+", "_",
         ",", ":", "[", "]", "(", ")", "{", "}", "None", "'k': ", "'v'", "[1, 2]", "{'a': 1}", "(1,)", "é"]  # fmt: skip


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_random_texts_are_read_as_python_does() -> None:
    rng = seeded()
    for _ in range(3000):
        literal = "".join(rng.choices(PARTS, k=rng.randint(1, 7)))
        if ")" in literal and by_python(literal) is None:
            continue  # the call may end before the text
        check(literal)


def test_newlines_in_strings_and_pythons_own_names_are_understood() -> None:
    answer = parsed(["[add(from='a\nb', class=1, a=null)]"], "pythonic")
    ((name, arguments),) = answer.calls
    assert (name, json.loads(arguments)) == ("add", {"from": "a\nb", "class": 1, "a": None})
    assert parsed(["[add(a=1, a=2)]"], "pythonic").calls == []


def test_the_end_of_a_long_call_costs_as_little_as_any_other_part() -> None:
    one = parser("pythonic")
    one.feed("[add(a=[" + "12, 'x', " * 20_000)
    assert num_lines_run(lambda: one.feed("1])")) < 500
    assert one.num_calls == 1


def test_brackets_that_are_too_deep_are_content() -> None:
    text = "[add(a=" + "[" * 101 + "]" * 101 + ")]"
    assert parsed([text], "pythonic").content == text
