"""Tools of the Messages API, and the choice among them, as those of chat. Pure.

Anthropic defines three kinds of tools by a name and a date. Those that the client runs on text are shown to the model
with the schemas that Anthropic publishes. Those that Anthropic runs, and those that answer with pictures, are not shown
and are named in `x-tandem-ignored`: the model answers without them. They are refused only if they are forced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.frontend.http.ignored_fields import note_ignored
from tandem.frontend.messages.schema import MessageTool, MessageToolChoice
from tandem.frontend.openai.tool_fields import FunctionName, NamedToolChoice, Tool, ToolFunction
from tandem.protocol.errors import RequestError, missing_parameter

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_VIEW_RANGE = {"type": "array", "items": _NUMBER, "description": "First and last line to view; -1 is the end."}
_EDIT_COMMANDS = ["view", "create", "str_replace", "insert"]


def chat_tools(tools: Sequence[MessageTool] | None) -> list[Tool] | None:
    """The tools that the model may see. Raises `RequestError` for one that is incomplete."""
    if tools is None:
        return None
    return [shown for i, tool in enumerate(tools) if (shown := _shown(tool, f"tools[{i}]")) is not None]


def tool_choice(
    choice: MessageToolChoice | None, tools: Sequence[MessageTool] | None, shown: Sequence[Tool] | None
) -> str | NamedToolChoice | None:
    """The choice among the tools that are shown. Raises `RequestError` if it forces one that is not."""
    if choice is None or choice.type in ("auto", "none"):
        return None if choice is None else choice.type
    if choice.type == "tool" and choice.name is None:
        raise RequestError("A 'tool_choice' of type 'tool' needs 'name'.", param="tool_choice.name")
    hidden = {tool.name or tool.type for tool in tools or ()} - {
        tool.function.name for tool in shown or () if tool.function
    }
    if choice.name in hidden or (not shown and hidden):
        raise RequestError(
            f"This server does not run the tool '{choice.name or min(map(str, hidden))}', so 'tool_choice' cannot "
            "force it.",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if not shown:
        raise RequestError(f"'tool_choice' is '{choice.type}', but there are no 'tools'.", param="tool_choice")
    return "required" if choice.name is None or choice.type == "any" else _named(choice.name)


def _named(name: str) -> NamedToolChoice:
    return NamedToolChoice("function", FunctionName(name))


def _shown(tool: MessageTool, where: str) -> Tool | None:
    """A tool as the model sees it; None if it does not."""
    description, schema = tool.description, tool.input_schema
    if schema is None and tool.type not in (None, "custom"):
        kind, _, date = (tool.type or "").rpartition("_")
        if kind not in _CLIENT_TOOLS:
            note_ignored(f"tools.{tool.type}", "not run by this server")
            return None
        description, properties, required = _CLIENT_TOOLS[kind](date)
        schema = {"type": "object", "properties": properties, "required": required}
    if tool.name is None or schema is None:
        param = f"{where}.{'name' if tool.name is None else 'input_schema'}"
        raise missing_parameter(param)
    return Tool("function", ToolFunction(tool.name, description, schema, tool.strict))


# -- Anthropic's tools that the client runs: description, properties, required ones, by the date of their type

_ClientTool = tuple[str, dict[str, Any], list[str]]


def _bash(_: str) -> _ClientTool:
    return (
        "Run a command in a persistent bash session.",
        {"command": _TEXT, "restart": {"type": "boolean", "description": "Restart the session."}},
        [],
    )


def _text_editor(date: str) -> _ClientTool:
    commands = [*_EDIT_COMMANDS, *(["undo_edit"] if date < "20250429" else [])]
    inserted = "insert_text" if date >= "20250728" else "new_str"
    return (
        "View, create and edit text files. `view` takes `path` and maybe `view_range`; `create` takes `file_text`; "
        "`str_replace` replaces the only occurrence of `old_str` by `new_str`; `insert` puts "
        f"`{inserted}` after line `insert_line`.",
        _editing(commands) | {inserted: _TEXT},
        ["command", "path"],
    )


def _memory(_: str) -> _ClientTool:
    return (
        "Keep notes in files under /memories, for later conversations too; look there first. `view` lists a folder or "
        "shows a file; `create` takes `file_text`; `str_replace` takes `old_str` and `new_str`; `insert` puts "
        "`insert_text` after line `insert_line`; `delete` takes `path`; `rename` takes `old_path` and `new_path`.",
        _editing([*_EDIT_COMMANDS, "delete", "rename"]) | {"insert_text": _TEXT, "old_path": _TEXT, "new_path": _TEXT},
        ["command"],
    )


def _editing(commands: list[str]) -> dict[str, Any]:
    return {
        "command": {"type": "string", "enum": commands},
        "path": _TEXT,
        "file_text": _TEXT,
        "old_str": _TEXT,
        "new_str": _TEXT,
        "insert_line": _NUMBER,
        "view_range": _VIEW_RANGE,
    }


_CLIENT_TOOLS = {"bash": _bash, "text_editor": _text_editor, "memory": _memory}
