from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tandem.text.tool_calls.events import Content, ToolCallArguments, ToolCallBegin, new_call_id
from tandem.text.tool_calls.formats import TOOL_FORMATS
from tandem.text.tool_calls.parser import AnswerParser
from tests.support.work_count import num_lines_run
from tests.text.tool_calls.answers import ANSWERS, Answer, Joined, joined, parsed, parser, seeded

NAMES = [pytest.param(answer, id=f"{answer.format}-{i}") for i, answer in enumerate(ANSWERS)]


def cut(text: str, rng: random.Random) -> Iterator[str]:
    longest = rng.choice([1, 3, 10, 60])
    while text:
        length = rng.randint(0, longest)
        yield text[:length]
        text = text[length:]


@pytest.mark.parametrize("answer", NAMES)
def test_an_answer_is_split_as_its_format_says(answer: Answer) -> None:
    result = parsed([answer.text], answer.format, answer.reasoning_format, prompt_end=answer.prompt_end)
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == answer.calls
    assert (result.content, result.reasoning) == (answer.content, answer.reasoning)


@pytest.mark.parametrize("answer", NAMES)
def test_pieces_of_any_size_give_the_same_result(answer: Answer) -> None:
    rng = seeded()
    for _ in range(30):
        text = answer.text[: rng.randint(0, len(answer.text))] if rng.random() < 0.5 else answer.text
        options = {"prompt_end": answer.prompt_end}
        whole = parsed([text], answer.format, answer.reasoning_format, **options)
        assert parsed(cut(text, rng), answer.format, answer.reasoning_format, **options) == whole


@pytest.mark.parametrize("length", range(len("</tool_call>")))
def test_an_answer_cut_within_the_closing_marker_shows_nothing_of_it(length: int) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
    result = parsed([call + "</tool_call>"[:length]], "hermes")
    assert (result.content, [name for name, _ in result.calls]) == ("", ["add"])


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "<function=add>", "<parameter=a>", "</parameter>", "</function>",
    "<|python_tag|>", "<|python_start|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|channel|>", "<|message|>",
    "<|start|>assistant", "<|end|>", "<|call|>", "analysis", "commentary to=functions.add ", "final", "to=", "<think>",
    "</think>", "[THINK]", "[/THINK]", '{"name": "add"', '"name": "add"', ', "arguments": {"a": ', '"parameters"', ":",
    "null", "1.5", "}", "}}", "]", "[", "{", "(", ")", "add(", "a=1", "now()", ";", ",", '"', "'", "\\", "\n", "  ",
    "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", '<invoke name="add">', '<parameter name="a">',
    "</invoke>", "</minimax:tool_call>", "<tool_call>add\n", "<arg_key>", "a</arg_key>", "<arg_value>", "</arg_value>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "add<｜tool▁sep｜>", "\n```json\n", "```", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="add">',
    '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜tool_calls>",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.add:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>", "｜DSML｜", "hello", "é", "\\ud800",
    '{"name": "\\ud800", "arguments": {}}', "=", "<", "|", ">",
]  # fmt: skip


@pytest.mark.parametrize("format", TOOL_FORMATS)
@pytest.mark.parametrize("reasoning", [None, "think", "mistral"])
def test_hostile_texts_are_split_alike_and_lose_nothing(format: str, reasoning: str | None) -> None:
    rng = seeded()
    for _ in range(300):
        text = "".join(rng.choices(FRAGMENTS, k=rng.randint(0, 25)))
        whole = parsed([text], format, reasoning)
        assert parsed(cut(text, rng), format, reasoning) == whole, text
        assert parsed(text, format, reasoning) == whole, text
        if not whole.calls and reasoning is None and format != "harmony":
            assert whole.content == text
        for part in [whole.content, whole.reasoning, *(name + arguments for name, arguments in whole.calls)]:
            part.encode()  # can be sent


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_text_without_calls_is_content_as_it_is_and_at_once(format: str) -> None:
    one = parser(format)
    text = "A <b>list</b> [1, 2] {of} things;\n\n f(x) = 'y'"
    shown = [joined(one.feed(char)).content for char in text]
    assert ("".join(shown[:20]), "".join(shown) + joined(one.finish()).content) == (text[:20], text)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "<tool_call>hello</tool_call>"),
        ("hermes", "<tool_call>"),
        ("hermes", 'x\n<tool_call>\n{"name": "add", "argume'),
        ("hermes", '<tool_call>{"name": "add", "arguments": 5}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": {"x": 1}, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "\\ud800"}</tool_call>'),
        ("hermes", "a <tool_cal"),
        ("llama3_json", '{"name": "unknown", "parameters": {}}'),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", '{"name": "add", "age": 42}'),
        ("llama3_json", 'Use {"name": "add", "parameters": {}}'),
        ("llama3_json", "[1, 2, 3]"),
        ("mistral", "[TOOL_CALLS]hello"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][1]"),
        ("pythonic", "[link](https://example.com)"),
        ("pythonic", "[add(1, 2)]"),
        ("pythonic", "[add(a=b)]"),
        ("pythonic", "[add(a=__import__('os').getcwd())]"),
        ("pythonic", "[add(**{'a': 1})]"),
        ("pythonic", "[add(a=1e999)]"),
        ("pythonic", "[add(a={1: 2})]"),
        ("pythonic", "[add(a=(" + "(" * 1000 + ")" * 1000 + "))]"),
        ("pythonic", "[add(a=" + "-" * 50_000 + "1)]"),
        ("pythonic", "[add(a=" + "1+" * 50_000 + "1)]"),
        ("pythonic", "[add(a=" + "9" * 5000 + ")]"),
        ("pythonic", "[unknown(a=1)]"),
        ("qwen3_coder", "<tool_call>{}</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=add>\nhello"),
        ("qwen3_coder", "Write <function=add> here"),
        ("qwen3_coder", "<tool_call>\n<function=add\n<parameter=a>\n1\n</parameter>"),
        ("glm45", "<tool_call>\nhello there</tool_call>"),
        ("glm45", "<tool_call>add\n<arg_ke"),
        ("minimax_m2", "<minimax:tool_call>\n</minimax:tool_call>"),
        ("deepseek_v32", '<｜DSML｜invoke name="a b">\n</｜DSML｜invoke>'),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"),
        ("harmony", "<|channel|>analysis"),
        ("harmony", "tomorrow"),
        (None, "<think>a</think> <tool_call>{}</tool_call>"),
    ],
)
def test_what_is_not_a_call_is_content(format: str | None, text: str) -> None:
    assert parsed([text], format) == joined([Content(text)])


def test_special_tokens_never_become_content() -> None:
    hidden = {"[TOOL_CALLS]", "[ARGS]"}
    assert parsed(["x [TOOL_CALLS]hello[ARGS] there"], "mistral", hidden=hidden).content == "x hello there"

    assert parsed(["hello[ARGS] there"], "mistral", hidden=hidden).content == "hello there"
    assert parsed(["a [TOOL_CALLS]", '{"[ARGS]b": 1}'], "mistral", hidden=hidden).content == 'a {"b": 1}'
    for pieces in (["x[TOOL_CALLS][ARGS]1"], "x[TOOL_CALLS][ARGS]1"):
        assert parsed(pieces, "mistral", hidden=hidden).content == "x1"


@pytest.mark.parametrize(
    "text",
    [
        'Hi\n\n<｜DSML｜ctills>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="',
        'Hi <｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="true"x',
        'Hi <｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>",
    ],
)
def test_a_special_token_within_a_longer_marker_waits_for_the_rest(text: str) -> None:
    special = "｜DSML｜"
    pieces = [piece for part in text.split(special) for piece in (*part, special)][:-1]
    assert "".join(pieces) == text
    assert parsed(pieces, "deepseek_v32", hidden={special}) == parsed([text], "deepseek_v32", hidden={special})


@pytest.mark.parametrize(
    ("format", "text", "name", "arguments", "content"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "Par', "add", '{"a": "Par', ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call> sorry', "add", '{"a": 1', "sorry"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\nPar\n",
            "get_weather",
            '{"days": 3, "city": "Par\\n',
            "",
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n/function>\n</tool_call>",
            "add",
            '{"a": 1}',
            "/function>\n</tool_call>",
        ),
        ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n", "add", '{"a": 1}', ""),
    ],
)
def test_a_broken_call_keeps_what_came_of_it(format: str, text: str, name: str, arguments: str, content: str) -> None:
    assert parsed([text], format) == Joined(content, calls=[(name, arguments)])


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n"
            "<parameter=zip>\nx\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n<arg_key>zip</arg_key>\n"
            "<arg_value>x</arg_value>\n</tool_call>",
        ),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">{}</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="zip" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            "</｜DSML｜function_calls>",
        ),
    ],
)
def test_a_string_may_quote_the_tag_that_closes_it(format: str, text: str) -> None:
    for closing in ("</parameter>", "</arg_value>", "</｜DSML｜parameter>", "\n</parameter>\n\n"):
        city = f"a {closing} b{closing}</x>\n{closing}\n\nc"
        whole = parsed([text.format(city)], format)
        ((name, arguments),) = whole.calls
        assert (name, json.loads(arguments)) == ("get_weather", {"city": city, "zip": "x"})
        assert parsed(text.format(city), format) == whole
        unknown = text.replace("city", "not_in_its_schema").format(city)
        assert json.loads(parsed([unknown], format).calls[0][1]) == {"not_in_its_schema": city, "zip": "x"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "12", 12),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, '"a"', "a"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "True", "True"),
        ({"type": ["string", "number"]}, "12", 12),
        ({"anyOf": [{"type": "string"}, {}]}, "12", 12),
        ({"type": "boolean"}, "True", True),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "object"}, "NaN", "NaN"),
        ({"type": 5}, "[1]", [1]),
        (True, "[1]", [1]),
    ],
)
def test_values_in_tags_are_typed_by_the_schema(schema: Any, text: str, value: Any) -> None:
    tools = {"f": {"type": "object", "properties": {"x": schema}}}
    one = AnswerParser(TOOL_FORMATS["qwen3_coder"], None, tools=tools)
    events = [*one.feed(f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>"), *one.finish()]
    assert json.loads(joined(events).calls[0][1]) == {"x": value}


def test_a_call_has_the_id_that_the_model_gives_it() -> None:
    call = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    ids = ["functions.now:0", "functions.now:0", "now:1", "functions.a.b:12"]
    events = parser("kimi_k2").feed("<|tool_calls_section_begin|>" + "".join(map(call.format, ids)))
    begun = [event for event in events if isinstance(event, ToolCallBegin)]
    assert [one.id for one in begun] == ["functions.now:0", "0", "1", "functions.a.b:12"]
    assert [one.name for one in begun] == ["now", "now", "now", "a.b"]


def test_arguments_are_streamed_as_they_come() -> None:
    one = parser("hermes")
    assert one.feed('<tool_call>{"name": "get_weather", "arg') == []
    begin, first = one.feed('uments": {"ci')
    assert (begin, first) == (ToolCallBegin(0, "0", "get_weather"), ToolCallArguments(0, '{"ci'))
    assert one.feed('ty": "Par') == [ToolCallArguments(0, 'ty": "Par')]
    assert (one.feed('is"'), one.feed("}}</tool_call>")) == ([ToolCallArguments(0, 'is"')], [ToolCallArguments(0, "}")])
    assert one.finish() == []


def test_strings_in_tags_are_streamed_as_they_come() -> None:
    one = parser("qwen3_coder")
    assert one.feed("<tool_call>\n<function=get_weather>\n<param") == []
    begin, first = one.feed('eter=city>\nA "B')
    assert (begin, first) == (ToolCallBegin(0, "0", "get_weather"), ToolCallArguments(0, '{"city": "A \\"B'))
    assert (one.feed("\n"), one.feed("C\n</para")) == ([], [ToolCallArguments(0, "\\nC")])
    assert one.feed("meter>\n</function>") == [ToolCallArguments(0, '"}')]


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<think>I call.\n{CALL}\n", ["add"]),
        (f"<think>I call.\n{CALL}\n{CALL}", ["add", "add"]),
        (f"<think>{CALL}</think>\n\n", ["add"]),
        (f"<think>{CALL[:-12]}", ["add"]),  # without its end
        (f"<think>First {CALL}, then\n{CALL}", ["add"]),
        (f"<think>{CALL} is a draft.", []),
        (f"<think>{CALL}</think>It is 1.", []),
        (f"<think>Either {CALL}</think>{CALL.replace('add', 'now')}", ["now"]),
        (f"<think>{CALL[:-20]}", []),  # cut
        (f"<think>{CALL.replace('add', 'unknown')}", []),
        ("<think><tool_call>", []),
    ],
)
def test_calls_at_the_end_of_the_reasoning_count_if_nothing_follows_it(text: str, calls: list[str]) -> None:
    answer = parsed([text], "hermes", "think")
    assert [name for name, _ in answer.calls] == calls
    assert all(arguments == '{"a": 1}' for _, arguments in answer.calls)
    assert answer.reasoning.strip() == text.removeprefix("<think>").partition("</think>")[0].strip()
    assert (parsed(text, "hermes", "think"), parsed([text], None, "think").calls) == (answer, [])


def test_the_calls_of_kimi_k2_end_its_reasoning() -> None:
    call = "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"Hm. <|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"
    one = parser("kimi_k2", "think", prompt_end="<think>")
    events = [event for char in text for event in one.feed(char)]  # all before the end
    assert (joined(events), one.finish()) == (Joined(reasoning="Hm.", calls=[("add", "{}")]), [])


def test_harmony_without_tools_or_reasoning_shows_all_texts() -> None:
    text = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"
    assert parsed([text], "harmony", None).content == "a\nb"
    call = '<|channel|>commentary to=functions.add<|message|>{"a": 1}'
    assert parsed([call], None, "harmony") == joined([Content('{"a": 1}')])


def test_ids() -> None:
    assert len(new_call_id(9)) == 9
    assert new_call_id(9).isalnum()
    assert new_call_id(24).startswith("call_")
    assert TOOL_FORMATS["mistral"].num_id_chars == 9


HOSTILE = ["{", "<", "[", "(", " ", '"', "\\", "}", "<tool_call>", '{"name": "add", "arguments": {', "<|channel|>",
           "[TOOL_CALLS]", "<function=add><parameter=a>", "[add(a=[", '<tool_call>{"a":', "<think>", "\n<"]  # fmt: skip

OPENINGS = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a":',
    "llama3_json": '{"name": ',
    "pythonic": "[add(a=",
    "mistral": "[TOOL_CALLS][",
    "qwen3_coder": "<function=add><parameter=a>",
    "harmony": "<|channel|>",
    "seed_oss": "<seed:tool_call><function=add><parameter=a>",
    "minimax_m2": '<minimax:tool_call><invoke name="get_weather"><parameter name="city">',
    "glm45": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{",
    "deepseek_v32": '<｜DSML｜function_calls><｜DSML｜invoke name="',
    "deepseek_v4": '<｜DSML｜tool_calls><｜DSML｜invoke name="add">',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
}


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_the_work_is_linear_in_the_text(format: str) -> None:
    """A text eight times as long costs eight times as much, and little of it is ever looked at again."""

    def feed(text: str) -> None:
        one = parser(format, "think")
        for i in range(0, len(text), 4):
            one.feed(text[i : i + 4])
            assert one.num_unread_chars < 32
        one.finish()

    for opening in ("", OPENINGS[format]):
        for fragment in HOSTILE:
            short, long = (opening + fragment * (size // len(fragment)) for size in (250, 2_000))
            base = num_lines_run(partial(feed, short))
            assert num_lines_run(partial(feed, long)) < 10 * base, (opening, fragment)
