"""The tools of a response request: as tools of chat, which are all functions, and back to what the client declared.

The model sees a function `f` of the namespace `ns` as `ns__f`, and a custom tool as a function of one string. It does
not see tools that OpenAI's servers would run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import msgspec
from pydantic_core import from_json

from tandem.frontend.http.ignored_fields import note_ignored
from tandem.frontend.http.json_body import decode_body
from tandem.frontend.openai.other_fields import unsupported
from tandem.frontend.openai.tool_fields import FunctionName, NamedToolChoice, Tool, ToolFunction
from tandem.frontend.responses.schema import CustomFormat, CustomTool, FunctionTool, NamespaceTool
from tandem.protocol.errors import RequestError, missing_parameter

Json = dict[str, Any]
S = TypeVar("S", bound=msgspec.Struct)

_INPUT = "input"  # the argument of a custom tool
_GRAMMARS = {"lark": "Lark grammar", "regex": "regular expression"}


class CalledTool(NamedTuple):
    """A tool as the client declared it."""

    kind: str  # function or custom
    name: str
    namespace: str = ""  # "" = none


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools that the model sees."""

    tools: list[Tool] = field(default_factory=list)
    choice: str | NamedToolChoice | None = None
    declared: dict[str, CalledTool] = field(default_factory=dict)  # by the name that the model sees
    field_names: dict[str, str] = field(default_factory=dict)  # of fields in checks of chat's tools -> the client's

    def called(self, name: str) -> CalledTool:
        """The tool that the model calls by this name. It may write one that nobody declared."""
        return self.declared.get(name, CalledTool("function", name))


class _Shown(NamedTuple):
    """A tool that the model sees, and where it was declared."""

    tool: ToolFunction
    declared: CalledTool
    where: str
    is_lark: bool = False


def response_tools(tools: Iterable[Json], items: Iterable[Json], choice: str | Json | None) -> ResponseTools:
    """The tools of a request, and of the items in its input that add some. Raises `RequestError`."""
    shown = [one for i, tool in enumerate(tools) for one in _shown(tool, f"tools[{i}]")]
    names = {one.tool.name for one in shown}
    shown += [one for one in _added(items) if one.tool.name not in names]
    chosen = _chat_choice(choice, shown)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        shown = _allowed(choice, shown)
    _check_grammars(shown, chosen)
    return ResponseTools(
        tools=[Tool("function", one.tool) for one in shown],
        choice=chosen,
        declared={one.tool.name: one.declared for one in shown},
        field_names={f"tools[{i}].function.name": f"{one.where}.name" for i, one in enumerate(shown)},
    )


def shown_name(namespace: str, name: str) -> str:
    """The name of a tool that the model sees."""
    return f"{namespace}__{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """A custom tool's input as arguments of the function that the model sees."""
    return msgspec.json.encode({_INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """The input in the arguments that the model wrote, as far as they can be read; else the arguments as they are."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    texts = list(value.values()) if isinstance(value, dict) else [value]
    text = value.get(_INPUT, texts[0] if len(texts) == 1 else None) if isinstance(value, dict) else value
    return text if isinstance(text, str) else arguments


# -- tools


def _shown(tool: Json, where: str, namespace: str = "", about: str | None = None) -> Iterator[_Shown]:
    """What the model sees of one tool. `about` describes its namespace."""
    kind = tool.get("type")
    match kind:
        case "function":
            function = _read(tool, FunctionTool, where)
            name = shown_name(namespace, function.name)
            seen = ToolFunction(name, function.description or about, function.parameters, function.strict)
            yield _Shown(seen, CalledTool("function", function.name, namespace), where)
        case "custom":
            custom = _read(tool, CustomTool, where)
            is_lark = custom.format is not None and custom.format.syntax == "lark"
            seen = _custom_function(custom, shown_name(namespace, custom.name), about, where)
            yield _Shown(seen, CalledTool("custom", custom.name, namespace), where, is_lark)
        case "namespace" if not namespace:
            group = _read(tool, NamespaceTool, where)
            for i, one in enumerate(group.tools):
                yield from _shown(one, f"{where}.tools[{i}]", group.name, group.description)
        case str() if not {"name", "parameters"} <= tool.keys():
            note_ignored(f"tools.{kind}", "this server runs no tools")
        case _:
            raise RequestError(
                f"Tools of type {str(kind)[:50]!r} are not supported; expected 'function', 'custom' or 'namespace'.",
                param=f"{where}.type",
            )


def _added(items: Iterable[Json]) -> Iterator[_Shown]:
    for i, item in enumerate(items):
        if item.get("type") == "additional_tools":
            tools = item.get("tools")
            for j, tool in enumerate(tools if isinstance(tools, list) else ()):
                if isinstance(tool, dict):
                    yield from _shown(tool, f"input[{i}].tools[{j}]")


def _custom_function(tool: CustomTool, name: str, about: str | None, where: str) -> ToolFunction:
    """A custom tool as a function. The model sees its grammar, and a regular expression is part of the schema."""
    schema: Json = {"type": "string"}
    description = tool.description or about or ""
    if tool.format is not None and tool.format.type == "grammar":
        syntax, definition = _grammar(tool.format, f"{where}.format")
        description += f"\n\nThe {_INPUT} must match this {_GRAMMARS[syntax]}:\n{definition}"
        if syntax == "regex":
            schema["pattern"] = f"^(?:{definition})$"
    parameters = {"type": "object", "properties": {_INPUT: schema}, "required": [_INPUT], "additionalProperties": False}
    return ToolFunction(name, description.strip(), parameters)


def _grammar(format: CustomFormat, where: str) -> tuple[str, str]:
    if format.syntax is not None and format.definition is not None:
        return format.syntax, format.definition
    param = f"{where}.{'syntax' if format.syntax is None else 'definition'}"
    raise missing_parameter(param)


def _read(tool: Json, kind: type[S], where: str) -> S:
    try:
        return decode_body(msgspec.json.encode(tool), kind)
    except RequestError as exc:
        exc.message = exc.message.replace(f"'{exc.param}'", f"'{where}.{exc.param}'")
        exc.param = f"{where}.{exc.param}"
        raise


# -- the choice of a tool


def _chat_choice(choice: str | Json | None, shown: list[_Shown]) -> str | NamedToolChoice | None:
    if choice is None or isinstance(choice, str):
        return choice
    kind, name = choice.get("type"), choice.get("name")
    if kind == "allowed_tools":
        return "required" if choice.get("mode") == "required" else "auto"
    if kind in ("function", "custom") and isinstance(name, str):
        named = next((one.tool.name for one in shown if _is_named(one, choice)), name)
        return NamedToolChoice("function", FunctionName(named))
    raise unsupported("tool_choice", msgspec.json.encode(choice), ["auto"])


def _allowed(choice: Json, shown: list[_Shown]) -> list[_Shown]:
    allowed = [one for one in choice.get("tools") or () if isinstance(one, dict)]
    return [one for one in shown if any(_is_named(one, name) for name in allowed)]


def _is_named(one: _Shown, given: Mapping[str, Any]) -> bool:
    if given.get("type") == "namespace":
        return one.declared.namespace == given.get("name")
    name, namespace = given.get("name"), given.get("namespace") or ""
    return name == one.tool.name or (name, namespace) == (one.declared.name, one.declared.namespace)


def _check_grammars(shown: list[_Shown], chosen: str | NamedToolChoice | None) -> None:
    """Raise `RequestError` if a forced call would have to keep to a Lark grammar, which JSON's escapes prevent."""
    named = chosen.function.name if isinstance(chosen, NamedToolChoice) and chosen.function else None
    for one in shown:
        if one.is_lark and (chosen == "required" or one.tool.name == named):
            raise RequestError(
                f"A call of the custom tool {one.declared.name[:50]!r} cannot be forced: its Lark grammar would not be "
                "kept. Send 'tool_choice': 'auto', or a grammar with the syntax 'regex'.",
                param="tool_choice",
                code="unsupported_parameter",
            )
