from __future__ import annotations

import pytest

from tandem.text.tool_calls.formats import detect_tool_format
from tandem.text.tool_calls.reasoning import detect_reasoning_format

# Characteristic parts of the chat templates of model families.
TEMPLATES = [
    ("{%- if tools %}within <tool_call></tool_call> XML tags:\n<tool_call>\n{{...}}</tool_call>", "hermes", None),
    ("{%- if tools %}<tool_call>{% endif %}{%- if enable_thinking %}<think>\n\n</think>", "hermes", "think"),
    ("{% set content = content.split('</think>')[-1] %}", None, "think"),
    ("{{ '<tool_call>\\n<function=' + name + '>\\n' }}", "qwen3_coder", None),
    ("{{- '<|python_tag|>' + tool_call.name + \".call(\" }}", "llama3_json", None),
    ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json", None),
    ("{{ '<|python_start|>' }}", "pythonic", None),
    ("{{ '[TOOL_CALLS]' + call.name + '[ARGS]' }}[THINK]", "mistral", "mistral"),
    ("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}", "harmony", "harmony"),
    ("<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>", "glm45", None),
    ("{{ '<seed:tool_call>\\n<function=' + name + '>' }}<seed:think>", "seed_oss", "seed_oss"),
    ("{% set begin = '<minimax:tool_call>' %}<invoke name=", "minimax_m2", None),
    ("<|tool_calls_section_begin|>{{ id }}<think></think>", "kimi_k2", "think"),
    ("'<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n'</think>", "deepseek_v3", "think"),
    ("'<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>'", "deepseek_v31", None),
    ('{% set dsml_token = "｜DSML｜" %}<{{ dsml_token }}function_calls>', "deepseek_v32", None),
    ("<｜DSML｜tool_calls>", "deepseek_v4", None),
    ("{{ '<|im_start|>' + message['role'] }}", None, None),
    (
        "{%- set dsml_token = '｜DSML｜' -%}{{ '<' + dsml_token + 'function_calls>' }}{{ tool_calls }}",
        "deepseek_v32",
        None,
    ),
    ("{%- set dsml_token = '｜DSML｜' -%}{{ '<' + dsml_token + 'tool_calls>' }}", "deepseek_v4", None),
    # Formats that are not known: their marks contain those of others.
    ("{{ '<function=example>{\"a\": 1}</function>' }}<|python_tag|>", None, None),
    ("{%- set ns_token = ']<]minimax[>[' -%}{{ ns_token ~ '<tool_call>' }}", None, None),
    ("within <tool_call></tool_call> tags: <tool_calls>[{}]</tool_calls>", None, None),
    ("{{ '<|start|>system<|message|>' }}", None, None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_formats_are_found_in_the_chat_template(template: str, tools: str | None, reasoning: str | None) -> None:
    tool_format, reasoning_format = detect_tool_format(template), detect_reasoning_format(template)
    assert (tool_format and tool_format.name, reasoning_format and reasoning_format.name) == (tools, reasoning)
