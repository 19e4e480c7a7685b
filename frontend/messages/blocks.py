"""Content blocks of the Messages API as messages of chat. Pure.

A block that carries text is text, whatever its type. Images and other media are refused, because the answer would be to
another question. All other blocks are left out and named in `x-tandem-ignored`: what tools on Anthropic's side did and
found, thoughts that only Anthropic can read, and types that are not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from tandem.frontend.http.ignored_fields import note_ignored
from tandem.frontend.messages.schema import BILLING_HEADER, ContentBlock, InputMessage
from tandem.frontend.openai.schema import ChatMessage, ContentPart
from tandem.protocol.errors import RequestError

T = TypeVar("T")

_MISPLACED = {"thinking", "tool_use", "tool_result"}  # each of them is for one role
_MEDIA = {"image", "document"}


def num_blocks(system: str | Sequence[ContentBlock] | None, messages: Sequence[InputMessage]) -> int:
    """The blocks of a conversation, those within results of tools included."""
    blocks = [
        block
        for content in (system, *(message.content for message in messages))
        if content is not None and not isinstance(content, str)
        for block in content
    ]
    return len(blocks) + sum(len(block.content) for block in blocks if isinstance(block.content, list))


def system_content(system: str | Sequence[ContentBlock] | None) -> str | list[ContentPart]:
    """The system prompt; empty if there is none."""
    if system is None or isinstance(system, str):
        return system or ""
    return [part for part in _parts(system, "system") if not (part.text or "").startswith(BILLING_HEADER)]


def chat_messages(message: InputMessage, index: int) -> list[ChatMessage]:
    """One message as messages of chat. Raises `RequestError` that names the wrong block."""
    where, content = f"messages[{index}].content", message.content
    if isinstance(content, str):
        return [ChatMessage(role=message.role, content=content)]
    if message.role == "assistant":
        return [_assistant_message(content or (), where)]
    if message.role == "system":
        parts = _parts(content or (), where)
        return [ChatMessage(role="system", content=parts)] if parts else []
    if not content:
        raise RequestError("A user message needs content.", param=where)
    return _user_messages(content, where)


def _user_messages(blocks: Sequence[ContentBlock], where: str) -> list[ChatMessage]:
    """Results of tools become messages of their own, among messages with the texts between them."""
    messages: list[ChatMessage] = []
    texts: list[ContentPart] = []
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        if block.type == "tool_result":
            texts = []
            messages.append(_tool_message(block, at))
        elif parts := _block_parts(block, at):
            if not texts:
                messages.append(ChatMessage(role="user", content=texts))
            texts += parts
    return messages or [ChatMessage(role="user", content="")]


def _tool_message(block: ContentBlock, where: str) -> ChatMessage:
    call_id = _given(block.tool_use_id, "tool_use_id", block, where)
    given = block.content or ""
    content = given if isinstance(given, str) else _parts(_list(given, block, where), f"{where}.content")
    return ChatMessage(role="tool", content=content, tool_call_id=call_id)


def _assistant_message(blocks: Sequence[ContentBlock], where: str) -> ChatMessage:
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        at = f"{where}[{i}]"
        match block.type:
            case "thinking":
                thoughts.append(_given(block.thinking, "thinking", block, at))
            case "tool_use":
                name = _given(block.name, "name", block, at)
                function = {"name": name, "arguments": _given(block.input, "input", block, at)}
                calls.append({"id": _given(block.id, "id", block, at), "type": "function", "function": function})
            case _:
                texts += _block_parts(block, at)
    reasoning = "".join(thoughts) if thoughts else None
    return ChatMessage(role="assistant", content=texts, reasoning_content=reasoning, tool_calls=calls or None)


# -- texts


def _parts(blocks: Sequence[ContentBlock], where: str) -> list[ContentPart]:
    return [part for i, block in enumerate(blocks) for part in _block_parts(block, f"{where}[{i}]")]


def _block_parts(block: ContentBlock, where: str) -> list[ContentPart]:
    """The texts of a block, none of them empty. Raises `RequestError` for a block that cannot be left out."""
    return [ContentPart("text", text) for text in _texts(block, where) if text]


def _texts(block: ContentBlock, where: str) -> list[str]:
    match block.type:
        case "text":
            return [_given(block.text, "text", block, where)]
        case "compaction":  # a summary of the messages before it
            return [block.content] if isinstance(block.content, str) else []
        case "tool_reference":
            return [f"The tool {_given(block.tool_name, 'tool_name', block, where)} is available."]
        case "search_result":
            found = _parts(_list(block.content or [], block, where), f"{where}.content")
            return [block.title or "", str(block.source or ""), *(part.text or "" for part in found)]
        case "document" if (text := _document_text(block.source)) is not None:
            return [block.title or "", text]
    if block.type in _MISPLACED or block.type in _MEDIA or block.source is not None:
        raise RequestError(
            f"Content of type '{block.type[:50]}' is not supported here; only 'text' is.", param=f"{where}.type"
        )
    note_ignored(f"content.{block.type}")
    return []


def _document_text(source: Any) -> str | None:
    """The text of a document; None if it is not text."""
    if not isinstance(source, dict):
        return None
    text = {"text": source.get("data"), "content": source.get("content")}.get(str(source.get("type")))
    return text if isinstance(text, str) else None


def _list(content: str | list[ContentBlock] | dict[str, Any], block: ContentBlock, where: str) -> list[ContentBlock]:
    if isinstance(content, list):
        return content
    raise RequestError(f"The 'content' of a '{block.type}' must be a list of blocks.", param=f"{where}.content")


def _given(value: T | None, name: str, block: ContentBlock, where: str) -> T:
    if value is None:
        raise RequestError(
            f"A block of type '{block.type}' needs '{name}'.",
            param=f"{where}.{name}",
            code="missing_required_parameter",
        )
    return value
