"""Answers as models write them, by format, and what they consist of. The forms are those that their makers document."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tandem.text.tool_calls.events import Content, Event, Reasoning, ToolCallArguments, ToolCallBegin
from tandem.text.tool_calls.formats import TOOL_FORMATS
from tandem.text.tool_calls.parser import AnswerParser
from tandem.text.tool_calls.reasoning import REASONING_FORMATS

STRING, NUMBER = {"type": "string"}, {"type": "number"}
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": STRING, "days": {"type": "integer"}, "zip": STRING}},
    "add": {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}},
    "now": {"type": "object", "properties": {}},
}


@dataclass
class Joined:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name and arguments


def joined(events: Iterable[Event]) -> Joined:
    """Join events, and check that each call begins once and its arguments come while it is the last."""
    answer = Joined()
    ids: set[str] = set()
    for event in events:
        match event:
            case Content(text):
                answer.content += text
            case Reasoning(text):
                answer.reasoning += text
            case ToolCallBegin(index, id, name):
                assert index == len(answer.calls)
                assert id not in ids
                ids.add(id)
                answer.calls.append((name, ""))
            case ToolCallArguments(index, text):
                assert index == len(answer.calls) - 1
                name, arguments = answer.calls[index]
                answer.calls[index] = (name, arguments + text)
    return answer


def seeded() -> random.Random:
    """Another one in each run; its seed is in the output of a test that fails."""
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def parser(tool_format: str | None, reasoning_format: str | None = None, **options: Any) -> AnswerParser:
    """A parser that knows `TOOLS`, and gives calls the ids "0", "1" and so on."""
    ids = map(str, itertools.count())
    tool, reasoning = TOOL_FORMATS.get(tool_format or ""), REASONING_FORMATS.get(reasoning_format or "")
    return AnswerParser(tool, reasoning, tools=TOOLS, new_id=lambda: next(ids), **options)


def parsed(pieces: Iterable[str], tool_format: str | None, reasoning: str | None = None, **options: Any) -> Joined:
    one = parser(tool_format, reasoning, **options)
    events = [event for piece in pieces for event in one.feed(piece)]
    return joined([*events, *one.finish()])


@dataclass
class Answer:
    format: str
    text: str
    calls: list[tuple[str, Any]] = field(default_factory=list)  # name and arguments, decoded
    content: str = ""
    reasoning: str = ""
    reasoning_format: str | None = None
    prompt_end: str = ""


WEATHER = ("get_weather", {"city": "Paris"})
ADD = ("add", {"a": 1, "b": -2.5e3})

ANSWERS = [
    # Hermes 2 Pro writes the arguments first, Qwen the name; several calls stand in a row.
    Answer("hermes", '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>\n', [WEATHER]),
    Answer(
        "hermes",
        'I will look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": -2.5e3}}\n</tool_call>',
        [WEATHER, ADD],
        "I will look.",
    ),
    Answer("hermes", '<tool_call>{"name": "now"}</tool_call>', [("now", {})]),
    Answer("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', [("now", {})]),
    Answer("hermes", '<tool_call>{"name":"add","arguments":"{\\"a\\": 1}"}</tool_call>', [("add", {"a": 1})]),
    Answer("hermes", '<tool_call>{"name": "other_tool", "arguments": {}}</tool_call>', [("other_tool", {})]),
    # SmolLM2 writes a list between the markers.
    Answer(
        "hermes",
        '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]'
        "</tool_call>",
        [WEATHER, ("now", {})],
    ),
    Answer(
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "a \\"}</tool_call>{[ \\\\", "x": [{"y": []}]}}'
        "</tool_call> done",
        [("get_weather", {"city": 'a "}</tool_call>{[ \\', "x": [{"y": []}]})],
        "done",
    ),
    Answer("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>', [("add", {"a": 1})]),  # no }
    Answer(
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}<tool_call>{"name": "now"}',
        [("add", {"a": 1}), ("now", {})],
    ),
    # Llama 3.1 and 3.2
    Answer("llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', [WEATHER]),
    Answer("llama3_json", '\n{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', [WEATHER]),
    Answer("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}', [WEATHER]),
    Answer(
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        [WEATHER, ("now", {})],
    ),
    Answer("llama3_json", '{"function": "now", "parameters": {}} ok', [("now", {})], "ok"),
    # Mistral: up to tokenizer version 7, and from 11 and 13 on
    Answer("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]', [WEATHER]),
    Answer(
        "mistral",
        'Sure.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "D681PevKs"}, '
        '{"name": "add", "arguments": {"a": 1, "b": -2.5e3}}]',
        [WEATHER, ADD],
        "Sure.",
    ),
    Answer("mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}', [WEATHER]),
    Answer(
        "mistral",
        '[TOOL_CALLS]get_weather[CALL_ID]VvvODy9mT[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
        [WEATHER, ("now", {})],
    ),
    Answer(
        "mistral",
        '[THINK]Paris?[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
        [WEATHER],
        reasoning="Paris?",
        reasoning_format="mistral",
    ),
    # pythonic: Llama 3.2, Llama 4
    Answer("pythonic", "[get_weather(city='Paris'), now()]", [WEATHER, ("now", {})]),
    Answer("pythonic", '<|python_start|>[get_weather(city="Paris")]<|python_end|>', [WEATHER]),
    Answer(
        "pythonic",
        '[get_weather(city="it\'s )],", days=[1, (2, 3)], zip={"a": None, "b": [True, False]})]',
        [("get_weather", {"city": "it's )],", "days": [1, [2, 3]], "zip": {"a": None, "b": [True, False]}})],
    ),
    # Qwen3-Coder: values are typed by the tool's schema
    Answer(
        "qwen3_coder",
        "Let me see.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=zip>\n075\n</parameter>\n</function>\n</tool_call>",
        [("get_weather", {"city": "Paris", "days": 3, "zip": "075"})],
        "Let me see.",
    ),
    Answer(
        "qwen3_coder",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>\n<function=add><parameter=a>{\n\n}</parameter></function>",
        [("now", {}), ("add", {"a": {}})],
    ),
    Answer(
        "qwen3_coder",
        '<function=get_weather><parameter=city>\n\na "b"\n\n</parameter></function> done',
        [("get_weather", {"city": '\na "b"\n'})],
        "done",
    ),
    # The values that Python's way of writing them gives, as the chat template shows them
    Answer(
        "qwen3_coder",
        "<tool_call>\n<function=other>\n<parameter=x>\nTrue\n</parameter>\n<parameter=y>\nNone\n</parameter>\n</tool_call>",
        [("other", {"x": True, "y": None})],
    ),
    # Seed-OSS
    Answer(
        "seed_oss",
        "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
        [("get_weather", {"city": "Paris", "days": 3})],
        reasoning="Hm.",
        reasoning_format="seed_oss",
    ),
    # MiniMax M2: several calls between two markers
    Answer(
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="zip">075</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>\nOK',
        [("get_weather", {"city": "Paris", "zip": "075"}), ("now", {})],
        "I look.OK",
    ),
    # GLM 4.5 and 4.6, and 4.7, which leaves out the newlines
    Answer(
        "glm45",
        "<think>Hm.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        [("get_weather", {"city": "Paris", "days": 3}), ("now", {})],
        "I look.",
        "Hm.",
        "think",
    ),
    Answer(
        "glm45",
        "<tool_call>add<arg_key> a </arg_key><arg_value>[1, {}]</arg_value></tool_call><tool_call>now</tool_call>",
        [("add", {"a": [1, {}]}), ("now", {})],
    ),
    # DeepSeek V3 and R1, V3.1, V3.2, V4
    Answer(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [WEATHER, ("now", {})],
    ),
    Answer(
        "deepseek_v31",
        'Hm.</think>Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [WEATHER, ("now", {})],
        "Sure.",
        "Hm.",
        "think",
        "<｜Assistant｜><think>",
    ),
    Answer(
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
        '075</｜DSML｜parameter>\n<｜DSML｜parameter name="zip" string="false">[1]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [("get_weather", {"city": "075", "zip": [1]}), ("now", {})],
    ),
    Answer(
        "deepseek_v4",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="now"></｜DSML｜invoke></｜DSML｜tool_calls>',
        [("now", {})],
    ),
    # Kimi K2
    Answer(
        "kimi_k2",
        "<think>Hm.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        [WEATHER, ("now", {})],
        "I look.",
        "Hm.",
        "think",
    ),
    # gpt-oss
    Answer(
        "harmony",
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
        [WEATHER],
        reasoning="Need the weather.",
        reasoning_format="harmony",
    ),
    Answer(
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>analysis<|message|>Yes.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello < there > !<|return|>",
        [],
        "Hello < there > !",
        "Easy.\nYes.",
        "harmony",
    ),
    Answer(
        "harmony",
        " to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city": "Paris"}<|end|><|start|>assistant to=functions.now<|channel|>commentary<|message|><|call|>',
        [WEATHER, ("now", {})],
        reasoning_format="harmony",
    ),
    Answer(
        "harmony",
        "<|channel|>commentary<|message|>I will look it up.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather<|message|>{"city": "Paris"}',
        [WEATHER],
        "I will look it up.",
        reasoning_format="harmony",
    ),
    # reasoning before calls and content
    Answer(
        "hermes",
        '<think>\nHm.\n\nParis.\n</think>\n\n<tool_call>\n{"name": "now"}\n</tool_call>',
        [("now", {})],
        reasoning="Hm.\n\nParis.",
        reasoning_format="think",
    ),
    Answer(
        "hermes", "Hm.\n</think>\n\nHello <think>.", [], "Hello <think>.", "Hm.", "think", "<|im_start|>a\n<think>\n"
    ),
    Answer("hermes", "Hello.", [], "Hello.", "", "think", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    Answer("hermes", "\n\nNo thought.\n", [], "\n\nNo thought.\n", "", "think"),
    Answer("hermes", "<think>and so on", [], "", "and so on", "think"),
]
