"""What a chat template does not show, in a form that it shows: tools, calls and their results, later system messages.

The model is asked to write calls in its own format if that is known, and otherwise in the format `hermes`, which most
models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_INSTRUCTIONS = """\
You can call the tools below. Each line between <tools> and </tools> describes one, with a JSON schema of its arguments.
<tools>
{tools}
</tools>
To call a tool, answer with its name and its arguments as JSON, {call}"""

_HERMES_CALL = """between <tool_call> and </tool_call>:
<tool_call>
{"name": "NAME", "arguments": {...}}
</tool_call>"""

# Formats of models whose chat templates show calls but no tools.
TEXT_FORMATS = {
    "deepseek_v3": """in this form, with several calls in a row if you need them:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
```json
{...}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>""",
    "deepseek_v31": """in this form, with several calls in a row if you need them:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>""",
}


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, format: str, adds_system: bool
) -> list[Message]:
    """The messages with a description of the tools, and of calls in this format, at the end of the system message.

    If there is none, it gets one of its own with `adds_system`, and otherwise begins the first message.
    """
    shown = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=shown, call=TEXT_FORMATS.get(format, _HERMES_CALL))
    first, *others = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
    if adds_system:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *others]


def with_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """The messages with calls as text of the assistant, and adjacent results as one message of the user."""
    shown: list[Message] = []
    is_result = False
    for message in messages:
        follows_result, is_result = is_result, message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if follows_result:
                shown[-1]["content"] += f"\n{text}"
            else:
                shown.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            texts = filter(None, [message["content"], *map(_call_text, calls)])
            shown.append({**rest, "content": "\n".join(texts)})
        else:
            shown.append(message)
    return shown


def with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with several calls of one message split into one message per call, each followed by its result."""
    shown: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        calls = message.get("tool_calls") or ()
        at += 1
        if len(calls) < 2:
            shown.append(message)
            continue
        results: dict[Any, list[Message]] = {}
        while at < len(messages) and messages[at]["role"] == "tool":
            results.setdefault(messages[at].get("tool_call_id"), []).append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            said = message if number == 0 else {"role": "assistant", "content": ""}
            shown += [{**said, "tool_calls": [call]}, *results.pop(call.get("id"), ())]
        shown += [one for rest in results.values() for one in rest]
    return shown


def with_system_as_user(messages: Sequence[Message]) -> list[Message]:
    """The messages with later system messages as text of the user, joined with the user's own messages beside them."""
    shown = list(messages[:1])
    joins = False
    for message in messages[1:]:
        is_system = message["role"] == "system"
        if is_system:
            message = {**message, "role": "user"}
        if message["role"] == "user" and shown[-1]["role"] == "user" and (is_system or joins):
            shown[-1] = {**shown[-1], "content": f"{shown[-1]['content']}\n\n{message['content']}"}
        else:
            shown.append(message)
        joins = is_system
    return shown


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    shown = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"<tool_call>\n{json.dumps(shown, ensure_ascii=False)}\n</tool_call>"
