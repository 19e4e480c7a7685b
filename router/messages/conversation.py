"""From a request of the Messages API to the same question as a request of chat. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from tandem.protocol.errors import RequestError
from tandem.router.messages.schema import (
    BILLING_HEADER,
    UNSERVED_FIELDS,
    ContentBlock,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    MessageTool,
    MessageToolChoice,
    OutputConfig,
    Thinking,
)
from tandem.router.openai.other_fields import unsupported
from tandem.router.openai.request_limits import check_num_parts
from tandem.router.openai.schema import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    JsonSchemaFormat,
    ResponseFormat,
    check_cache_salt,
)
from tandem.router.openai.tool_fields import FunctionName, NamedToolChoice, Tool, ToolFunction

__all__ = ["FIELD_NAMES", "chat_prompt", "chat_request"]

T = TypeVar("T")

# Names of fields in checks of the chat request -> names here.
FIELD_NAMES = {
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "stop": "stop_sequences",
}


def chat_request(request: MessagesRequest) -> ChatRequest:
    """The request as one of chat. Raises `RequestError` that names the wrong field."""
    if request.messages[-1].role == "assistant":
        raise RequestError(
            "The last message is the assistant's, and to continue it is not supported: end with a user's message.",
            param=f"messages[{len(request.messages) - 1}].role",
            code="unsupported_parameter",
        )
    return msgspec.structs.replace(
        chat_prompt(request),
        max_tokens=request.max_tokens,
        stream=request.stream,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        conversation_id=request.conversation_id,
        priority=request.priority,
    )


def chat_prompt(request: CountTokensRequest) -> ChatRequest:
    """A request of chat with the same prompt. Raises `RequestError` that names the wrong field."""
    for name in UNSERVED_FIELDS:
        if getattr(request, name):
            raise unsupported(name, msgspec.json.encode(getattr(request, name)))
    check_cache_salt(request.cache_salt)
    check_num_parts(len(request.messages), _num_blocks(request), "messages")
    messages = [part for i, message in enumerate(request.messages) for part in _chat_messages(message, i)]
    if system := _system_content(request.system):
        messages.insert(0, ChatMessage(role="system", content=system))
    choice = request.tool_choice
    return ChatRequest(
        model=request.model,
        messages=messages,
        tools=None if request.tools is None else [_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)],
        tool_choice=None if choice is None else _tool_choice(choice, has_tools=bool(request.tools)),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        response_format=_response_format(request.output_config),
        chat_template_kwargs=_template_kwargs(request) or None,
        cache_salt=request.cache_salt,
    )


def _num_blocks(request: CountTokensRequest) -> int:
    contents = [request.system, *(message.content for message in request.messages)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return len(blocks) + sum(len(block.content) for block in blocks if isinstance(block.content, list))


def _system_content(system: str | Sequence[ContentBlock] | None) -> str | list[ContentPart]:
    if system is None or isinstance(system, str):
        return system or ""
    return [part for part in _text_parts(system, "system") if not (part.text or "").startswith(BILLING_HEADER)]


def _chat_messages(message: InputMessage, index: int) -> list[ChatMessage]:
    where = f"messages[{index}].content"
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    if message.role == "assistant":
        return [_assistant_message(message.content, where)]
    if not message.content:
        raise RequestError(f"A {message.role} message needs content.", param=where)
    if message.role == "system":
        return [ChatMessage(role="system", content=_text_parts(message.content, where))]
    return _user_messages(message.content, where)


def _user_messages(blocks: Sequence[ContentBlock], where: str) -> list[ChatMessage]:
    """Results of tools become messages of their own, among messages with the texts between them."""
    messages: list[ChatMessage] = []
    texts: list[ContentPart] = []
    for i, block in enumerate(blocks):
        if block.type != "tool_result":
            if not texts:
                messages.append(ChatMessage(role="user", content=texts))
            texts.append(_text_part(block, f"{where}[{i}]"))
            continue
        texts = []
        call_id = _given(block.tool_use_id, "tool_use_id", block, f"{where}[{i}]")
        given = block.content or ""
        content = given if isinstance(given, str) else _text_parts(given, f"{where}[{i}].content")
        messages.append(ChatMessage(role="tool", content=content, tool_call_id=call_id))
    return messages


def _assistant_message(blocks: Sequence[ContentBlock], where: str) -> ChatMessage:
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        match block.type:
            case "thinking":
                thoughts.append(_given(block.thinking, "thinking", block, at))
            case "redacted_thinking":
                pass  # only the party that encrypted it can read it
            case "tool_use":
                name = _given(block.name, "name", block, at)
                function = {"name": name, "arguments": _given(block.input, "input", block, at)}
                calls.append({"id": _given(block.id, "id", block, at), "type": "function", "function": function})
            case _:
                texts.append(_text_part(block, at))
    reasoning = "".join(thoughts) if thoughts else None
    return ChatMessage(role="assistant", content=texts, reasoning_content=reasoning, tool_calls=calls or None)


def _text_parts(blocks: Sequence[ContentBlock], where: str) -> list[ContentPart]:
    return [_text_part(block, f"{where}[{i}]") for i, block in enumerate(blocks)]


def _text_part(block: ContentBlock, where: str) -> ContentPart:
    if block.type != "text":
        raise RequestError(
            f"Content of type '{block.type[:50]}' is not supported here; only 'text' is.", param=f"{where}.type"
        )
    return ContentPart("text", _given(block.text, "text", block, where))


def _given(value: T | None, name: str, block: ContentBlock, where: str) -> T:
    if value is None:
        raise RequestError(
            f"A block of type '{block.type}' needs '{name}'.",
            param=f"{where}.{name}",
            code="missing_required_parameter",
        )
    return value


def _tool(tool: MessageTool, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"Tools of type '{tool.type[:50]}' are not supported: describe the tool by 'name' and 'input_schema'.",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    if tool.input_schema is None:
        param = f"{where}.input_schema"
        raise RequestError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    return Tool("function", ToolFunction(tool.name, tool.description, tool.input_schema, tool.strict))


def _tool_choice(choice: MessageToolChoice, *, has_tools: bool) -> str | NamedToolChoice:
    if choice.type in ("any", "tool") and not has_tools:
        raise RequestError(f"'tool_choice' is '{choice.type}', but there are no 'tools'.", param="tool_choice")
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise RequestError("A 'tool_choice' of type 'tool' needs 'name'.", param="tool_choice.name")
    return NamedToolChoice("function", FunctionName(choice.name))


def _response_format(config: OutputConfig | None) -> ResponseFormat | None:
    if config is None or config.format is None:
        return None
    return ResponseFormat("json_schema", json_schema=JsonSchemaFormat(config.format.schema))


def _template_kwargs(request: CountTokensRequest) -> dict[str, Any]:
    """Variables of the chat template; those that the client sets itself win."""
    kwargs = _thinking_switches(request.thinking)
    if request.output_config is not None and request.output_config.effort is not None:
        kwargs["reasoning_effort"] = request.output_config.effort
    return kwargs | (request.chat_template_kwargs or {})


def _thinking_switches(thinking: Thinking | None) -> dict[str, Any]:
    if thinking is None or thinking.type == "adaptive":
        return {}
    return dict.fromkeys(("enable_thinking", "thinking"), thinking.type == "enabled")  # templates know one of them
