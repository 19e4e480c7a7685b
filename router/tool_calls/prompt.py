"""Tools, calls and their results as plain text, for models whose chat template does not show them.

Calls are asked for, and shown, in the format `hermes`, which most models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["with_calls_as_text", "with_tools_as_text"]

Message = dict[str, Any]

_INSTRUCTIONS = """\
You can call the tools below. Each line between <tools> and </tools> describes one, with a JSON schema of its arguments.
<tools>
{tools}
</tools>
To call a tool, answer with its name and its arguments as JSON, between <tool_call> and </tool_call>:
<tool_call>
{{"name": "NAME", "arguments": {{...}}}}
</tool_call>"""


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, adds_system: bool
) -> list[Message]:
    """The messages with a description of the tools at the end of the system message.

    If there is none, it gets one of its own with `adds_system`, and otherwise begins the first message.
    """
    shown = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=shown)
    first, *others = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *others]
    if adds_system:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *others]


def with_calls_as_text(messages: Sequence[Message]) -> list[Message]:
    """The messages with calls as text of the assistant, and the results in a row as one message of the user."""
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


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    shown = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"<tool_call>\n{json.dumps(shown, ensure_ascii=False)}\n</tool_call>"
