from __future__ import annotations

import pytest

from tandem.router.tool_calls.detection import detect_reasoning_format, detect_tool_format, renders_tools

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
    ("<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>", None, None),
    ("{{ '<|im_start|>' + message['role'] }}", None, None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_formats_are_found_in_the_chat_template(template: str, tools: str | None, reasoning: str | None) -> None:
    tool_format, reasoning_format = detect_tool_format(template), detect_reasoning_format(template)
    assert (tool_format and tool_format.name) == tools
    assert (reasoning_format and reasoning_format.name) == reasoning


def test_a_template_without_the_word_does_not_show_tools() -> None:
    assert not renders_tools("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert renders_tools("{% if tools %}{{ tools | tojson }}{% endif %}")
