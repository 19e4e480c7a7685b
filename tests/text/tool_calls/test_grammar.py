"""What a grammar lets through are calls that fit their schemas, and what models write in its format is let through."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import llguidance
import pytest

from tandem.protocol.grammar import compile_grammar, make_grammar_tokenizer
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_calls.formats import TOOL_FORMATS
from tandem.text.tool_calls.grammar import MAX_CALLS, tool_call_grammar
from tandem.text.tool_calls.parser import AnswerParser
from tandem.text.tool_calls.reasoning import REASONING_FORMATS
from tests.support.toy_tokenizer import build_tokenizer
from tests.text.tool_calls.answers import Joined, joined, seeded

SPECIAL = (
    "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|python_tag|>",
    "<|python_start|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "｜DSML｜", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "<minimax:tool_call>", "</minimax:tool_call>",
)  # fmt: skip
TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["days"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
                            "additionalProperties": False}},
    },
    "now": {},
}  # fmt: skip


class Walker(NamedTuple):
    tokenizer: Tokenizer
    grammar_tokenizer: llguidance.LLTokenizer

    def grammar(self, format: str, **options: Any) -> str:
        reasoning = REASONING_FORMATS.get(options.pop("reasoning", ""))
        tools = options.pop("tools", TOOLS)
        used = {*TOOL_FORMATS[format].markers, *(reasoning.markers if reasoning else ())}
        special_ids = {text: i for text, i in self.tokenizer.special_tokens.items() if text in used}
        settings = {"max_calls": None, "is_reasoning_open": False} | options
        return tool_call_grammar(TOOL_FORMATS[format], tools, reasoning=reasoning, special_ids=special_ids, **settings)

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        return compile_grammar(self.grammar_tokenizer, grammar)

    def allows(self, grammar: str, text: str) -> bool:
        """Whether this is a whole answer."""
        matcher = self.matcher(grammar)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return int(matcher.validate_tokens(ids)) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    def walk(self, grammar: str, rng: random.Random) -> str:
        matcher, ids = self.matcher(grammar), list[int]()
        endings = [self.tokenizer.encode(text, add_special_tokens=False) for text in ENDINGS]
        while not matcher.is_stopped() and not (matcher.is_accepting() and rng.random() < 0.3):
            chosen = next((e for e in endings if rng.random() < 0.2 and matcher.validate_tokens(e) == len(e)), None)
            if chosen is None:
                mask = matcher.compute_logit_bias()
                chosen = [rng.choice([i for i, allowed in enumerate(mask) if allowed and i != self.eos_id])]
            assert matcher.consume_tokens(chosen)
            ids += chosen
            assert len(ids) < 4000
        return self.tokenizer.decode(ids)

    @property
    def eos_id(self) -> int:
        return self.tokenizer.special_tokens["</s>"]


ENDINGS = [
    *("</think>", "\n</parameter>\n", "</parameter>\n", "</｜DSML｜parameter>\n", "</arg_value>", "<|end|>", '"')
]  # which a random walk would rarely find


def walker(folder: Path, special_tokens: tuple[str, ...]) -> Walker:
    tokenizer = Tokenizer(build_tokenizer(folder, special_tokens=special_tokens))
    text = (folder / "tokenizer.json").read_text()
    eos = tokenizer.special_tokens["</s>"]
    return Walker(tokenizer, make_grammar_tokenizer(text, tokenizer.vocab_size, [eos]))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Walker:
    return walker(tmp_path_factory.mktemp("plain"), ())


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Walker:
    return walker(tmp_path_factory.mktemp("special"), SPECIAL)


def read(text: str, format: str, reasoning: str = "", prompt_end: str = "") -> Joined:
    parser = AnswerParser(TOOL_FORMATS[format], REASONING_FORMATS.get(reasoning), tools=TOOLS, prompt_end=prompt_end)
    return joined([*parser.feed(text), *parser.finish()])


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        values = json.loads(arguments)
        assert name in TOOLS
        if name == "now":
            assert values == {}
            continue
        assert values.keys() <= {"city", "unit", "days", "place"}
        assert values["days"] in range(1, 10)
        assert isinstance(values.get("city", ""), str)
        assert values.get("unit", "C") in ("C", "F")
        assert values.get("place", {"x": True}) in ({"x": True}, {"x": False})


@pytest.mark.parametrize("vocabulary", ["plain", "special"])
@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_a_grammar_lets_calls_through_that_fit(format: str, vocabulary: str, request: pytest.FixtureRequest) -> None:
    rng = seeded()
    words: Walker = request.getfixturevalue(vocabulary)
    grammar = words.grammar(format)
    counts: set[int] = set()
    for _ in range(12):
        text = words.walk(grammar, rng)
        answer = read(text, format)
        assert answer.calls, text
        assert answer.content == answer.reasoning == "", text
        assert len(answer.calls) <= MAX_CALLS
        check(answer.calls)
        counts.add(len(answer.calls))
    assert counts == {1} if format == "harmony" else len(counts) > 1


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_one_call_and_one_tool(plain: Walker, format: str) -> None:
    rng = seeded()
    grammar = plain.grammar(format, tools={"now": {}}, max_calls=1)
    for _ in range(5):
        assert [name for name, _ in read(plain.walk(grammar, rng), format).calls] == ["now"]


WHOLE = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Rome", "days": 2}}; {"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome", "days": 2}}, '
    '{"name": "now", "arguments": {}}]',
    "pythonic": '[weather(city="Rome", days=2), now()]',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n<parameter=days>2"
    "</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Rome", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}'
    "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Rome", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Rome'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    ),
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "harmony": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome", "days": 2}',
}
WHOLE["deepseek_v4"] = WHOLE["deepseek_v32"].replace("function_calls", "tool_calls")
TAGGED = {"qwen3_coder", "seed_oss", "minimax_m2", "glm45", "deepseek_v32", "deepseek_v4"}


@pytest.mark.parametrize("vocabulary", ["plain", "special"])
@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_a_grammar_lets_the_models_form_through(format: str, vocabulary: str, request: pytest.FixtureRequest) -> None:
    if (format, vocabulary) == ("mistral", "special"):
        pytest.skip("its form is another one: test_mistrals_later_form")
    words: Walker = request.getfixturevalue(vocabulary)
    grammar, text = words.grammar(format), WHOLE[format]
    assert words.allows(grammar, text)
    check(read(text, format).calls)
    for old, new in (("Rome", "Roma!!"), ("weather", "wether"), ("days", "hours"), ("2", "0"), ("2", '"2"')):
        if format not in TAGGED or new != "Roma!!":  # a string without quotes has no schema but its choices
            assert not words.allows(grammar, text.replace(old, new)), new
    for other in ("Hello", "", f"Hello {text}", f"{text} Hello"):
        assert not words.allows(grammar, other)


def test_glms_later_form_has_no_newlines(plain: Walker) -> None:
    text = "<tool_call>weather<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
    assert plain.allows(plain.grammar("glm45"), text)
    assert plain.allows(plain.grammar("glm45"), "<tool_call>now</tool_call>")


def test_mistrals_later_form(special: Walker) -> None:
    text = '[TOOL_CALLS]weather[ARGS]{"days": 2}[TOOL_CALLS]now[ARGS]{}'
    assert special.allows(special.grammar("mistral"), text)
    assert not special.allows(special.grammar("mistral"), WHOLE["mistral"])


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder"])
def test_reasoning_comes_first(plain: Walker, format: str) -> None:
    grammar, text = plain.grammar(format, reasoning="think"), WHOLE[format]
    assert plain.allows(grammar, text)
    assert plain.allows(grammar, f"<think>\nRome?\n</think>\n\n{text}")
    assert not plain.allows(grammar, f"<think>\nRome?\n{text}")
    opened = plain.grammar(format, reasoning="think", is_reasoning_open=True)
    assert plain.allows(opened, f"Rome?\n</think>\n\n{text}")
    assert not plain.allows(opened, text)
    rng = seeded()
    for _ in range(5):
        check(read(plain.walk(opened, rng), format, "think", "<think>\n").calls)


def test_harmonys_reasoning_comes_first(special: Walker) -> None:
    analysis = "<|channel|>analysis<|message|>Rome?<|end|><|start|>assistant"
    text = analysis + WHOLE["harmony"]
    assert special.allows(special.grammar("harmony", reasoning="harmony"), text)
    assert not special.allows(special.grammar("harmony"), text)


@pytest.mark.parametrize("required", [[], ["b"], ["a", "c"], ["c"], ["a", "b", "c"]])
def test_pythonic_arguments_with_and_without_the_optional_ones(plain: Walker, required: list[str]) -> None:
    number = {"type": "integer"}
    tools = {"f": {"properties": dict.fromkeys("abc", number), "required": required}}
    grammar = plain.grammar("pythonic", tools=tools)
    for given in ("", "a", "b", "c", "ab", "ac", "bc", "abc"):
        text = f"[f({', '.join(f'{name}=1' for name in given)})]"
        assert plain.allows(grammar, text) == set(required).issubset(given), text


@pytest.mark.parametrize(
    ("schema", "values", "others"),
    [
        ({"type": "boolean"}, ["True", "False"], ["true", "1", '"True"']),
        ({"type": "string"}, ['"a\'b"', "'a\"b'", "'it\\'s'", "''"], ["a", "'a\nb'", "'it's'"]),
        ({"type": "string", "enum": ["a", "b'"]}, ["'a'", '"a"', '"b\'"'], ["'c'", "a"]),
        ({"type": "string", "maxLength": 2}, ['"ab"'], ['"abc"', "'abc'"]),
        ({"type": "array", "items": {"type": "boolean"}}, ["[]", "[True, False]"], ["[true]", "[1]", "True"]),
        ({"type": "array", "items": {"type": "string"}, "minItems": 1}, ['["a"]'], ["[]"]),
        ({"$ref": "#/$defs/x"}, ['{"n": 1}'], ["1"]),
        ({"type": "array", "items": {"$ref": "#/$defs/x"}}, ['[{"n": 1}, {"n": 2}]'], ["[1]"]),
    ],
)
def test_values_are_as_in_python(plain: Walker, schema: dict[str, Any], values: list[str], others: list[str]) -> None:
    definition = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
    tools = {"f": {"properties": {"a": schema}, "required": ["a"], "$defs": {"x": definition}}}
    grammar = plain.grammar("pythonic", tools=tools)
    for value in values:
        assert plain.allows(grammar, f"[f(a={value})]"), value
        parser = AnswerParser(TOOL_FORMATS["pythonic"], None, tools=tools)
        (call,) = joined([*parser.feed(f"[f(a={value})]"), *parser.finish()]).calls
        assert json.loads(call[1]) == {"a": ast.literal_eval(value)}
    for value in others:
        assert not plain.allows(grammar, f"[f(a={value})]"), value


@pytest.mark.parametrize(
    ("format", "schema", "message"),
    [
        ("hermes", {"type": "array"}, "must be a schema of an object"),
        ("hermes", {"type": 3}, "must be a schema of an object"),
        ("pythonic", {"properties": {"a-b": {}}}, "not an identifier"),
        ("pythonic", {"properties": []}, "must be an object"),
        ("qwen3_coder", {"properties": {}, "required": "a"}, "must be an object"),
        ("qwen3_coder", {"properties": {"a": {}}, "required": ["b"]}, "requires 'b'"),
        ("qwen3_coder", {"properties": {"a": False}, "required": ["a"]}, "requires 'a'"),
        ("qwen3_coder", {"required": [[1]]}, "requires"),
        ("qwen3_coder", {"properties": {"a": 5}}, "must have a schema"),
        ("qwen3_coder", {"properties": {"a>": {}}}, "cannot be written within a tag"),
        ("qwen3_coder", {"properties": {"a": {"type": "string", "enum": [1]}}}, "must have one"),
    ],
)
def test_an_unwritable_schema_is_refused(plain: Walker, format: str, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plain.grammar(format, tools={"f": schema})


MARKERS = {"llama3_json": "<|python_tag|>", "pythonic": "<|python_start|>"}


def test_content_that_must_match_comes_after_reasoning(plain: Walker, special: Walker) -> None:
    wanted = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    contents = {
        '{"a": 1}': llguidance.LLMatcher.grammar_from_json_schema(json.dumps(wanted)),
        "abbc": llguidance.LLMatcher.grammar_from_regex("ab+c"),
        "<x12": 'start: "<x" /[0-9]+/',
    }
    for text, content in contents.items():
        for format in set(TOOL_FORMATS) - {"harmony"}:
            either, marker = plain.grammar(format, content=content), MARKERS.get(format)
            assert plain.allows(either, text)
            assert plain.allows(either, WHOLE[format]) == (marker is None)
            assert not plain.allows(either, "Hello")
            if marker:
                either = special.grammar(format, content=content)
                assert special.allows(either, text)
                assert special.allows(either, marker + WHOLE[format])
        opened = plain.grammar("hermes", content=content, tools={}, reasoning="think", is_reasoning_open=True)
        assert plain.allows(opened, f"Hm.</think>\n\n{text}")
        assert not plain.allows(opened, text)
        assert not plain.allows(opened, f"Hm.</think>\n\n{WHOLE['hermes']}")
        harmony = special.grammar("harmony", content=content, reasoning="harmony")
        final = f"<|channel|>final<|message|>{text}"
        assert special.allows(harmony, final)
        assert special.allows(harmony, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{final}")
        assert special.allows(harmony, WHOLE["harmony"])
        assert not special.allows(harmony, text)


def test_a_name_that_is_not_an_identifier_cannot_be_called_in_python(plain: Walker) -> None:
    with pytest.raises(ValueError, match="not an identifier"):
        plain.grammar("pythonic", tools={"get-weather": {}})
    plain.matcher(plain.grammar("pythonic", tools={"weather.get": {"properties": {"a": True, "b": False}}}))


@pytest.mark.parametrize("format", TOOL_FORMATS)
def test_a_grammar_that_becomes_too_large_is_refused(plain: Walker, format: str) -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(2000)}
    with pytest.raises(ValueError, match="more than"):
        plain.grammar(format, tools={f"f{i}": {"properties": properties, "$defs": {"x" * 5000: {}}} for i in range(9)})


def test_a_null_schema_and_open_schemas(plain: Walker) -> None:
    grammar = plain.grammar("hermes", tools={"f": {"type": ["object", "null"], "anyOf": [{}]}})
    assert plain.allows(grammar, '<tool_call>\n{"name": "f", "arguments": {"any": 1}}\n</tool_call>')
    assert not plain.allows(grammar, '<tool_call>\n{"name": "f", "arguments": null}\n</tool_call>')
