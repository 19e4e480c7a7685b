"""The fields of a request about tools, and what they result in."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.frontend.http.ignored_fields import note_ignored
from tandem.protocol.errors import RequestError, missing_parameter
from tandem.text.tool_calls.events import TOOL_NAME
from tandem.text.tool_calls.formats import Tools

MAX_TOOLS_BYTES = 1 << 21  # of all tools as JSON: 1,000 large ones. To check them takes 10 to 20 ms

_NAME = re.compile(TOOL_NAME, re.ASCII)


class ToolFunction(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(description="Letters, digits, `_`, `-`, `.`, `:` and `/`, at most 256.")]
    description: Annotated[str | None, Meta(description="What it does, for the model.")] = None
    parameters: Annotated[
        dict[str, Any] | None, Meta(description="JSON schema of its arguments; by default it has none.")
    ] = None
    strict: Annotated[
        bool | None, Meta(description="Accepted. Calls follow the schema if `tool_choice` forces them.")
    ] = None


class Tool(msgspec.Struct, frozen=True):
    """One of the tools of a request."""

    type: Annotated[str, Meta(description="`function`. The model does not see tools of other types.")]
    function: Annotated[ToolFunction | None, Meta(description="The function.")] = None


class FunctionName(msgspec.Struct, frozen=True):
    """The name of a function."""

    name: Annotated[str, Meta(description="The name of one of the tools.")]


class AllowedTools(msgspec.Struct, frozen=True):
    """Some of the tools of a request."""

    mode: Annotated[Literal["auto", "required"], Meta(description="Whether the model may or must call one of them.")]
    tools: Annotated[list[Tool], Meta(description="The tools that it sees, by type and name.")]


class NamedToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A choice of one tool, which the model must call, or of some of them."""

    type: Annotated[Literal["function", "allowed_tools"], Meta(description="`function` or `allowed_tools`.")]
    function: Annotated[FunctionName | None, Meta(description="The function to call.")] = None
    allowed_tools: Annotated[AllowedTools | None, Meta(description="The tools that the model sees.")] = None


@dataclass(frozen=True, slots=True)
class RequestedTools:
    """The tools that the model may call, at least one. `tools` are as chat templates expect them."""

    tools: list[dict[str, Any]]
    schemas: Tools
    is_required: bool  # whether the model must call one
    max_calls: int | None


def requested_tools(
    given: Sequence[Tool] | None, choice: str | NamedToolChoice | None, *, parallel: bool = True
) -> RequestedTools | None:
    """The tools that the model may call, if any. Raises `RequestError` for fields that are wrong."""
    tools = _functions(given or ())
    by_name = {tool.name: tool for tool in tools}
    shown = _checked(tools, by_name)
    named = None
    if isinstance(choice, NamedToolChoice) and choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise missing_parameter("tool_choice.allowed_tools")
        by_name = _allowed(choice.allowed_tools, by_name)
        shown = [tool for tool in shown if tool["function"]["name"] in by_name]
        choice = choice.allowed_tools.mode
    elif isinstance(choice, NamedToolChoice):
        if choice.function is None:
            raise missing_parameter("tool_choice.function")
        named = choice.function.name
    if named is None and choice not in (None, "auto", "none", "required"):
        raise RequestError(
            f"Invalid value for 'tool_choice': {str(choice)[:50]!r}; expected 'none', 'auto', 'required' or "
            '{"type": "function", "function": {"name": ...}}.',
            param="tool_choice",
        )
    if named is not None and named not in by_name:
        raise RequestError(
            f"'tool_choice' names the tool {named[:50]!r}, which is not in 'tools'.", param="tool_choice"
        )
    if choice == "required" and not by_name:
        raise RequestError("'tool_choice' is 'required', but there are no 'tools'.", param="tool_choice")
    if choice == "none" or not by_name:
        return None
    called = by_name if named is None else {named: by_name[named]}
    return RequestedTools(
        tools=shown,
        schemas={name: tool.parameters or {} for name, tool in called.items()},
        is_required=choice == "required" or named is not None,
        max_calls=None if parallel and named is None else 1,
    )


def _allowed(allowed: AllowedTools, by_name: dict[str, ToolFunction]) -> dict[str, ToolFunction]:
    """The tools that are allowed, in their order; of hosted ones there are none. Raises `RequestError` for others."""
    names = {tool.function.name for tool in allowed.tools if tool.function is not None}
    if unknown := sorted(names - by_name.keys()):
        raise RequestError(
            f"'tool_choice' allows the tool {unknown[0][:50]!r}, which is not in 'tools'.",
            param="tool_choice.allowed_tools.tools",
        )
    return {name: tool for name, tool in by_name.items() if name in names}


def _functions(tools: Sequence[Tool]) -> list[ToolFunction]:
    """Those that the client runs. Raises `RequestError` for one that is incomplete or has a wrong name.

    Hosted ones, such as a search, are left out: this server runs no tools.
    """
    functions = []
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.type != "function" and tool.function is not None:
            raise RequestError(
                f"Invalid value for '{where}.type': {tool.type[:50]!r}; expected 'function'.", param=f"{where}.type"
            )
        if tool.type != "function":
            note_ignored(f"tools.{tool.type}", "the model does not see it")
        elif tool.function is None:
            raise missing_parameter(f"{where}.function")
        elif not _NAME.fullmatch(name := tool.function.name):
            raise RequestError(
                f"The tool name {name[:50]!r} must be 1 to 256 letters, digits and characters of '_-.:/'.",
                param=f"{where}.function.name",
            )
        else:
            functions.append(tool.function)
    return functions


def _checked(tools: Sequence[ToolFunction], by_name: dict[str, ToolFunction]) -> list[dict[str, Any]]:
    """The tools as plain values. Raises `RequestError` if they are too large or wrong."""
    if len(by_name) < len(tools):
        twice = next(name for name, number in Counter(tool.name for tool in tools).items() if number > 1)
        raise RequestError(f"Two of the 'tools' have the same name, {twice[:50]!r}; rename one.", param="tools")
    try:
        shown = [_shown(tool) for tool in tools]
        num_bytes = len(msgspec.json.encode(shown))
    except RecursionError as exc:
        raise RequestError("The 'tools' are nested too deeply.", param="tools") from exc
    if num_bytes > MAX_TOOLS_BYTES:
        raise RequestError(
            f"The 'tools' have {num_bytes} bytes as JSON; the limit is {MAX_TOOLS_BYTES}.", param="tools"
        )
    return shown


def _shown(function: ToolFunction) -> dict[str, Any]:
    """A tool with all fields: many chat templates fail for one without a description or parameters."""
    shown: dict[str, Any] = {
        "name": function.name,
        "description": function.description or "",
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }
    if function.strict is not None:
        shown["strict"] = function.strict
    return {"type": "function", "function": shown}
