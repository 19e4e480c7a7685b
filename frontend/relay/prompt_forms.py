"""The prompts of all routes in the shape of two: a chat body (`messages`, `tools`) or a completion body (`prompt`).

Only what the prompt depends on is kept, as vLLM converts it before it renders its chat template. A form is exact if
the tokens read from it are those that the engine computes; from others only the length is read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from tandem.frontend.messages.schema import BILLING_HEADER

Json = dict[str, Any]

# Fields of a chat or a completion that change its prompt in a way that is not followed here.
_UNREAD = (
    *("chat_template", "documents", "continue_final_message", "truncate_prompt_tokens", "prompt_embeds"),
    *("mm_processor_kwargs", "prompt_is_suffix", "suffix"),
)
_SEVERAL = (
    *("input", "messages", "query", "documents", "text_1", "text_2"),
    *("queries", "items", "data_1", "data_2", "data"),
)


class PromptForm(NamedTuple):
    """A prompt as a chat or a completion body."""

    body: Json
    is_exact: bool = True


def chat_form(body: Json) -> PromptForm:
    """The form of `/v1/chat/completions` and `/v1/completions`."""
    return PromptForm(body, all(body.get(name) is None for name in _UNREAD))


def input_form(body: Json) -> PromptForm:
    """The form of embeddings and other routes with an `input`."""
    given = body.get("input")
    if isinstance(given, str) or (isinstance(given, list) and given and all(type(token) is int for token in given)):
        return PromptForm({"prompt": given}, body.get("truncate_prompt_tokens") is None)
    return pairs_form(body)


def pairs_form(body: Json) -> PromptForm:
    """The form of routes that compute several prompts (texts, or pairs of texts): everything that is not an option."""
    parts = [msgspec.json.encode(body[name]).decode() for name in _SEVERAL if body.get(name) is not None]
    return PromptForm({"prompt": "\n".join(parts)}, is_exact=False)


def no_form(_: Json) -> PromptForm:
    """The form of routes that compute nothing."""
    return PromptForm({"prompt": ""}, is_exact=False)


def responses_form(body: Json) -> PromptForm:
    """The form of `/v1/responses`: instructions, then the items of the input."""
    try:
        messages = _items_as_messages(body.get("input"))
        tools = [_function(tool, tool["parameters"]) for tool in _objects(body.get("tools")) if _is_function(tool)]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):  # of a shape that is not followed here
        return pairs_form(body)
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    reasoning = body.get("reasoning")
    form: Json = {"messages": messages, "chat_template_kwargs": body.get("chat_template_kwargs")}
    form |= {"reasoning_effort": reasoning.get("effort") if isinstance(reasoning, dict) else None}
    # The engine adds the previous response; it may truncate the input, or go on with an answer that was cut short.
    unknown = body.get("previous_response_id") or body.get("previous_input_messages") or body.get("prompt")
    is_exact = not unknown and body.get("truncation") != "auto" and not _is_partial(body.get("input"))
    return PromptForm(form | ({"tools": tools} if tools else {}), is_exact)


def messages_form(body: Json) -> PromptForm:
    """The form of `/v1/messages`: the system prompt, then the blocks of the messages."""
    try:
        system = "".join(_system_texts(body.get("system")))
        messages = [part for message in _objects(body.get("messages")) for part in _as_chat_messages(message)]
        tools = [_function(tool, tool["input_schema"]) for tool in _objects(body.get("tools"))]
    except (KeyError, TypeError, ValueError, AttributeError):  # of a shape that is not followed here
        return PromptForm({"messages": body.get("messages"), "tools": body.get("tools")}, is_exact=False)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    effort = (body.get("output_config") or {}).get("effort") if isinstance(body.get("output_config"), dict) else None
    form = {"messages": messages, "chat_template_kwargs": body.get("chat_template_kwargs"), "reasoning_effort": effort}
    thinking = body.get("thinking")
    # Whether a system message inside the conversation is moved to its front, and what turns thinking off, depends on
    # the template.
    is_exact = not (isinstance(thinking, dict) and thinking.get("type") == "disabled")
    is_exact = is_exact and all(message["role"] != "system" for message in messages[bool(system) :])
    return PromptForm(form | ({"tools": tools} if tools else {}), is_exact)


# -- /v1/responses -----------------------------------------------------------------------------------------------------


def _items_as_messages(given: Any) -> list[Json]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Json] = []
    for item in _objects(given):
        message = _item_as_message(item)
        last = messages[-1] if messages else None
        new = message.keys() - {"role"}
        # Reasoning, text and calls of one turn are separate items; they become one message.
        if last and last["role"] == message["role"] == "assistant" and (new == {"tool_calls"} or not new & last.keys()):
            # NOTE: not copied, because a client may send 100,000 calls.
            if calls := message.pop("tool_calls", None):
                last.setdefault("tool_calls", []).extend(calls)
            last |= message
        else:
            messages.append(message)
    return messages


def _item_as_message(item: Json) -> Json:
    match item.get("type", "message"):
        case "function_call":
            call = {"name": item["name"], "arguments": item["arguments"]}
            return {"role": "assistant", "tool_calls": [{"id": item["call_id"], "type": "function", "function": call}]}
        case "function_call_output":
            return {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}
        case "reasoning":
            return {"role": "assistant", "reasoning": (item.get("content") or item["summary"])[0]["text"]}
        case "message":
            content = item["content"]
            if isinstance(content, list):
                content = [_text_part(part) for part in content]
            if item["role"] == "assistant" and isinstance(content, list):
                content = content[0]["text"]
            return {"role": item["role"], "content": content}
        case other:
            raise ValueError(f"an item of type {other}")


def _text_part(part: Json) -> Json:
    is_text = part.get("type") in ("input_text", "output_text", "text")
    return {"type": "text", "text": part["text"]} if is_text else part


def _is_partial(given: Any) -> bool:
    last = given[-1] if isinstance(given, list) and given else None
    return isinstance(last, dict) and last.get("status") in ("in_progress", "incomplete")


def _is_function(tool: Json) -> bool:
    if tool["type"] != "function":
        raise ValueError(f"a tool of type {tool['type']}")
    return True


# -- /v1/messages ------------------------------------------------------------------------------------------------------


def _system_texts(system: Any) -> list[str]:
    if isinstance(system, str):
        return [system]
    texts = [block["text"] for block in _objects(system) if block["type"] == "text"]
    return [text for text in texts if not text.startswith(BILLING_HEADER)]


def _as_chat_messages(message: Json) -> list[Json]:
    """A message of blocks; results of tools become messages of their own before it."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Json] = []
    parts: list[Json] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for block in _objects(content):
        match block["type"]:
            case "text" if block["text"]:
                parts.append({"type": "text", "text": block["text"]})
            case "thinking":
                thoughts.append(block["thinking"])
            case "tool_use":
                call = {"name": block["name"], "arguments": msgspec.json.encode(block.get("input") or {}).decode()}
                calls.append({"id": block["id"], "type": "function", "function": call})
            case "tool_result" if role == "user":
                results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": _result_text(block)})
            case "text" | "redacted_thinking":
                pass
            case _:
                parts.append(block)  # an image, say: it has no tokens here
    turn: Json = {"role": role}
    turn |= {"reasoning": "".join(thoughts)} if thoughts else {}
    turn |= {"tool_calls": calls} if calls else {}
    if parts:
        turn["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    return results if role == "user" and not parts else [*results, turn]


def _result_text(block: Json) -> str:
    content = block.get("content") or ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part["type"] != "text":
            raise ValueError("a tool's result with an image")
        texts.append(part["text"])
    return "\n".join(texts)


def _function(tool: Json, parameters: Any) -> Json:
    fields = {"name": tool["name"], "description": tool.get("description"), "parameters": parameters}
    return {"type": "function", "function": fields | {"strict": tool.get("strict")}}


def _objects(value: Any) -> list[Json]:
    """A list of objects, or of none. Raises `TypeError` for anything else."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TypeError("expected a list of objects")
    return value
