"""From a request of the Messages API to the same question as a request of chat. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.frontend.http.ignored_fields import note_ignored
from tandem.frontend.messages.blocks import chat_messages, num_blocks, system_content
from tandem.frontend.messages.schema import (
    UNSERVED_FIELDS,
    CountTokensRequest,
    MessagesRequest,
    OutputFormat,
    Thinking,
    Thread,
)
from tandem.frontend.messages.tools import chat_tools, tool_choice
from tandem.frontend.openai.other_fields import unsupported
from tandem.frontend.openai.request_limits import check_num_parts
from tandem.frontend.openai.schema import ChatMessage, ChatRequest, JsonSchemaFormat, ResponseFormat, check_cache_salt
from tandem.protocol.errors import RequestError

# Names of fields in checks of the chat request -> names here.
FIELD_NAMES = {
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "stop": "stop_sequences",
}


def chat_request(request: MessagesRequest) -> ChatRequest:
    """The request as one of chat. Raises `RequestError` that names the wrong field."""
    return msgspec.structs.replace(
        chat_prompt(request),
        max_tokens=request.max_tokens,
        stream=request.stream,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        cache_hints=request.cache_hints,
        conversation_id=request.conversation_id,
        priority=request.priority,
    )


class ThreadNotFound(RequestError):
    """A thread is to be continued. The client's SDK then sends the whole conversation."""

    status = 404
    code = "thread_not_found"


def chat_prompt(request: CountTokensRequest) -> ChatRequest:
    """A request of chat with the same prompt. Raises `RequestError` that names the wrong field."""
    for name in UNSERVED_FIELDS:
        if getattr(request, name):
            raise unsupported(name, msgspec.json.encode(getattr(request, name)))
    _check_thread(request.thread)
    check_cache_salt(request.cache_salt)
    check_num_parts(len(request.messages), num_blocks(request.system, request.messages), "messages")
    messages = [part for i, message in enumerate(request.messages) for part in chat_messages(message, i)]
    if system := system_content(request.system):
        messages.insert(0, ChatMessage(role="system", content=system))
    tools, choice = chat_tools(request.tools), request.tool_choice
    return ChatRequest(
        model=request.model,
        messages=messages,
        continue_final_message=_is_continued(request) or None,
        tools=tools,
        tool_choice=tool_choice(choice, request.tools, tools),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        response_format=_response_format(request),
        chat_template_kwargs=_template_kwargs(request) or None,
        cache_salt=request.cache_salt,
    )


def _is_continued(request: CountTokensRequest) -> bool:
    """Whether the answer continues the last message. Raises `RequestError` if it would have to match a form."""
    is_continued = request.messages[-1].role == "assistant"
    if is_continued and _output_format(request) is not None:
        raise RequestError(
            "The last message is the assistant's, which the answer continues, so the answer cannot match a schema of "
            "its own: leave out one of them.",
            param="output_config.format",
        )
    return is_continued


def _output_format(request: CountTokensRequest) -> OutputFormat | None:
    config = request.output_config
    return request.output_format if config is None or config.format is None else config.format


def _response_format(request: CountTokensRequest) -> ResponseFormat | None:
    wanted = _output_format(request)
    return None if wanted is None else ResponseFormat("json_schema", json_schema=JsonSchemaFormat(wanted.schema))


def _template_kwargs(request: CountTokensRequest) -> dict[str, Any]:
    """Variables of the chat template; those that the client sets itself win."""
    kwargs = _thinking_switches(request.thinking)
    if request.output_config is not None and request.output_config.effort is not None:
        kwargs["reasoning_effort"] = request.output_config.effort
    return kwargs | (request.chat_template_kwargs or {})


def _thinking_switches(thinking: Thinking | None) -> dict[str, Any]:
    if thinking is None:
        return {}
    if thinking.budget_tokens is not None:
        note_ignored("thinking.budget_tokens")
    if thinking.type not in ("enabled", "disabled"):
        return {}
    return dict.fromkeys(("enable_thinking", "thinking"), thinking.type == "enabled")  # templates know one of them


def _check_thread(thread: Thread | None) -> None:
    """A request that creates a thread has the whole conversation; one that continues a thread has not."""
    if thread is None:
        return
    if thread.type != "create":
        raise ThreadNotFound("No threads are kept here: send the whole conversation.", param="thread")
    note_ignored("thread", "nothing is kept between requests")
