"""`POST /v1/chat/completions`: renders messages through the chat template and answers with a message."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import msgspec
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from tandem.frontend.http.ignored_fields import note_ignored
from tandem.frontend.http.json_body import check_brackets
from tandem.frontend.http.request_options import request_options
from tandem.frontend.openai.answer import answer_request
from tandem.frontend.openai.answer_formats import ContinuedPart
from tandem.frontend.openai.formats import ChatFormat
from tandem.frontend.openai.legacy_functions import function_field_names, with_tool_calls, with_tools
from tandem.frontend.openai.planned_answer import AnswerFormat, PlannedAnswer
from tandem.frontend.openai.planning import PreparedRequest, Prompt, conversation_of, plan_answer
from tandem.frontend.openai.prompt_roles import MAX_MESSAGES, RoleSpan, role_spans
from tandem.frontend.openai.request_limits import check_fields, check_grammar, check_messages
from tandem.frontend.openai.sampling import UNKNOWN_CONTEXT_TOKENS
from tandem.frontend.openai.schema import (
    ROLES,
    ChatMessage,
    ChatRequest,
    PinFields,
    Prediction,
    TokenizeRequest,
    check_cache_salt,
)
from tandem.frontend.openai.serving_context import ServingContext, read_body, renamed_fields
from tandem.frontend.openai.tool_fields import RequestedTools, requested_tools
from tandem.protocol.digest import CacheScope
from tandem.protocol.errors import RequestError
from tandem.text.structured_output.constraint import Constraint

_MAX_TOKEN_CHARS = 16  # of a prediction's tokens on average; what is behind them is not looked at
_TEXT_PARTS = {"text", "input_text", "output_text", "refusal"}
ConversationFields = ChatRequest | TokenizeRequest | PinFields  # requests with messages
RESERVED_OPTIONS = {"chat_template", "continue_final_message", "conversation", "messages", "tokenize", "tools"}


async def create_chat_completion(context: ServingContext, request: Request) -> Response:
    """Answer a conversation. Raises a `ServingError`."""
    answer = await plan_chat(context, request, time.perf_counter())
    return await answer_request(request, answer, context.backend, context.tokenizer, context.metrics)


async def plan_chat(context: ServingContext, request: Request, arrived_s: float) -> PlannedAnswer:
    """The answer to generate for a conversation. Raises a `ServingError`."""
    body, fields = await read_body(request, ChatRequest)
    check_cache_salt(fields.cache_salt)
    answer_format = ChatFormat(_num_logprobs(fields), has_functions=bool(fields.functions))
    names = function_field_names(fields)
    with renamed_fields(names) if names else nullcontext():
        return await plan_conversation(
            context, request, with_tools(fields), answer_format, num_bytes=len(body), arrived_s=arrived_s
        )


async def plan_conversation(
    context: ServingContext,
    request: Request,
    fields: ChatRequest,
    answer_format: AnswerFormat,
    *,
    num_bytes: int,
    arrived_s: float,
    fits_context: bool = False,
) -> PlannedAnswer:
    """The answer to a conversation, whichever API it came by. Raises a `ServingError`.

    `num_bytes` is the size of the request's body; `arrived_s` is when it came, by `time.perf_counter`. With
    `fits_context` a limit of tokens beyond what the context leaves means all that it leaves.
    """
    context.check_model(fields.model)
    continued = continued_part(fields)
    tools = requested_tools(fields.tools, fields.tool_choice, parallel=fields.parallel_tool_calls is not False)
    context.formats.check_tools(tools)
    num_logprobs = _num_logprobs(fields)
    check_fields(fields, 1, num_logprobs)
    options = request_options(request, fields.priority)
    grammar = await context.grammar_of(fields, request)
    scope = context.scopes.of(options.service_class.tenant, fields.cache_salt or "")
    token_ids = await tokenize_chat(
        context, request, fields, scope, tools=tools, continued=continued, num_bytes=num_bytes
    )
    if not token_ids:
        raise RequestError("The messages make an empty prompt.", param="messages")
    prompt_end = context.formats.prompt_end(context.tokenizer, token_ids, continued)
    hides_special = fields.skip_special_tokens is not False
    limit = fields.max_tokens if fits_context else _max_tokens(fields)
    prepared = PreparedRequest(
        fields=fields,
        prompts=[Prompt(token_ids)],
        format=answer_format,
        requested_tokens=None if fits_context else limit,
        default_tokens=max(1, limit) if fits_context and limit is not None else None,
        num_logprobs=num_logprobs,
        arrived_s=arrived_s,
        conversation_id=conversation_of(options, fields),
        options=options,
        cache_scope=scope,
        parsing=context.formats.parsing(context.tokenizer, prompt_end, tools, hides_special=hides_special),
        grammar=await _grammar(context, fields, request, tools, prompt_end, grammar),
        prediction=await _prediction(context, fields, request),
        call_ids=frozenset() if tools is None else context.formats.call_ids,
        roles=await _roles(context, request, fields, tools, continued, num_bytes),
    )
    return plan_answer(context, prepared)


async def _prediction(context: ServingContext, fields: ChatRequest, request: Request) -> tuple[int, ...]:
    """Tokens of the request's prediction, at most as many as an answer may have."""
    text = "" if fields.prediction is None else _predicted_text(fields.prediction)
    if not text:
        return ()
    most = context.backend.max_model_len or UNKNOWN_CONTEXT_TOKENS
    text = text[: _MAX_TOKEN_CHARS * most]
    ids = await context.work_on_text(
        request, lambda: context.tokenizer.encode(text, add_special_tokens=False), len(text)
    )
    return tuple(ids[:most])


def _predicted_text(prediction: Prediction) -> str:
    """The text of a prediction. One that cannot be used is ignored: it would only have made the answer faster."""
    content = prediction.content
    texts = [content] if content is None or isinstance(content, str) else [part.text for part in content]
    known = [text for text in texts if text is not None]
    if len(known) == len(texts) and prediction.type in (None, "content"):
        return "\n".join(known)
    note_ignored("prediction", "it is not of type content")
    return ""


async def count_prompt_tokens(context: ServingContext, request: Request, fields: ChatRequest, num_bytes: int) -> int:
    """Tokens of a conversation's prompt, without answering it. Raises a `ServingError`."""
    context.check_model(fields.model)
    tools = requested_tools(fields.tools, fields.tool_choice)
    context.formats.check_tools(tools)
    scope = context.cache_scope(request, fields.cache_salt)
    continued = continued_part(fields)
    return len(
        await tokenize_chat(context, request, fields, scope, tools=tools, continued=continued, num_bytes=num_bytes)
    )


async def tokenize_chat(
    context: ServingContext,
    request: Request,
    fields: ConversationFields,
    scope: CacheScope,
    *,
    tools: RequestedTools | None,
    continued: ContinuedPart | None,
    num_bytes: int,
) -> list[int]:
    """Token ids of a conversation with these tools; `num_bytes` is the size of its body. Raises `RequestError`."""
    check_messages(fields.messages or (), _template_kwargs(fields))

    def encode() -> list[int]:
        return context.tokenizer.encode_chat(
            *_for_template(context, fields, tools, continued),
            scope,
            add_special_tokens=bool(fields.add_special_tokens),
            limit=context.prompt_limit("messages"),
        )

    return await context.work_on_text(request, encode, num_bytes)


async def _roles(
    context: ServingContext,
    request: Request,
    fields: ChatRequest,
    tools: RequestedTools | None,
    continued: ContinuedPart | None,
    num_bytes: int,
) -> list[RoleSpan]:
    """The spans of a conversation's roles, if its usage is to tell them."""
    if not fields.usage_by_role:
        return []
    if len(fields.messages) > MAX_MESSAGES:
        note_ignored("usage_by_role", f"there are more than {MAX_MESSAGES} messages")
        return []

    def spans() -> list[RoleSpan]:
        messages, options = _for_template(context, fields, tools, continued)
        roles = [str(message["role"]) for message in messages]
        if len(messages) == len(fields.messages):  # some templates know fewer roles than the API
            roles = [message.role for message in fields.messages]
        adds = bool(fields.add_special_tokens)
        return role_spans(context.tokenizer, messages, roles, options, add_special_tokens=adds)

    # It may render the whole once for each message, which is faster than encoding it as often.
    return await context.work_on_text(request, spans, num_bytes * len(fields.messages), is_encoding=False)


def _for_template(
    context: ServingContext,
    fields: ConversationFields,
    tools: RequestedTools | None,
    continued: ContinuedPart | None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages as the chat template takes them, and its variables. Raises `RequestError`."""
    options = template_options(_template_kwargs(fields), fields.add_generation_prompt)
    if continued is not None:
        options |= {"add_generation_prompt": False, "continue_final_message": continued.field}
    takes_texts = context.formats.traits.takes_argument_texts
    try:
        shown = template_messages(fields.messages or (), argument_texts=takes_texts)
        rendered, tool_options = context.formats.rendered(shown, tools)
    except RecursionError as exc:
        raise RequestError("The messages are nested too deeply.", param="messages") from exc
    return rendered, options | tool_options


def _template_kwargs(fields: ConversationFields) -> dict[str, Any]:
    """Variables of the chat template that a request's fields set; those that the client sets itself win."""
    effort = fields.reasoning_effort
    set_by_effort: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        set_by_effort |= {"enable_thinking": False, "thinking": False}  # templates know one of them
    return set_by_effort | (fields.chat_template_kwargs or {})


def continued_part(fields: ConversationFields) -> ContinuedPart | None:
    """The part of the last message that the answer continues, if it does so. Raises `RequestError`."""
    if not fields.continue_final_message:
        return None
    param = "continue_final_message"
    if fields.add_generation_prompt:
        raise RequestError(f"'{param}' and 'add_generation_prompt' exclude each other: send only one.", param=param)
    last = fields.messages[-1] if fields.messages else None
    if last is None or last.role != "assistant":
        raise RequestError(f"'{param}' needs a last message of the role 'assistant'.", param=param)
    if last.tool_calls or last.function_call:
        raise RequestError(f"'{param}' cannot continue a message with calls: their results come next.", param=param)
    content = _content_text(last, f"messages[{len(fields.messages or ()) - 1}].content")
    reasoning = last.reasoning_content if last.reasoning is None else last.reasoning
    if reasoning and not content:
        return ContinuedPart("reasoning_content", reasoning)
    return ContinuedPart("content", content)


def template_messages(messages: Sequence[ChatMessage], *, argument_texts: bool = False) -> list[dict[str, Any]]:
    """Messages as chat templates expect them. Raises `RequestError` that names the wrong one.

    With `argument_texts` the arguments of calls are JSON text, and otherwise objects.
    """
    shown = with_tool_calls(messages)
    return [_template_message(message, f"messages[{i}]", argument_texts) for i, message in enumerate(shown)]


def template_options(kwargs: dict[str, Any] | None, add_generation_prompt: bool | None) -> dict[str, Any]:
    """Variables of the chat template. By default the prompt ends with the answer's opening."""
    options = dict(kwargs or {})
    if reserved := sorted(RESERVED_OPTIONS & options.keys()):
        raise RequestError(f"'{reserved[0]}' cannot be set here.", param="chat_template_kwargs")
    return {"add_generation_prompt": add_generation_prompt is not False, **options}


def _template_message(message: ChatMessage, where: str, argument_texts: bool) -> dict[str, Any]:
    if message.role not in ROLES:
        raise RequestError(
            f"Unknown role '{message.role[:50]}'; expected one of {', '.join(ROLES)}.", param=f"{where}.role"
        )
    if message.content is None and message.role != "assistant":
        raise RequestError(f"A {message.role} message needs content.", param=f"{where}.content")
    result: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content_text(message, f"{where}.content"),
    }
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:
        result["reasoning_content"] = result["reasoning"] = reasoning  # templates know one name or the other
    if message.tool_calls:
        shown = _with_argument_text if argument_texts else _with_decoded_arguments
        result["tool_calls"] = [shown(call) for call in message.tool_calls]
    return result


def _content_text(message: ChatMessage, where: str) -> str:
    """Content as one string: one line per part; empty for null, as beside tool calls."""
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    texts: list[str] = []
    for i, part in enumerate(message.content):
        if part.type not in _TEXT_PARTS:
            raise RequestError(
                f"Content of type '{part.type[:50]}' is not supported; only 'text' is.", param=f"{where}[{i}].type"
            )
        name = "refusal" if part.type == "refusal" else "text"
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise RequestError(f"A {name} part needs '{name}'.", param=f"{where}[{i}].{name}")
        texts.append(text)
    return "\n".join(texts)


def _with_argument_text(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as JSON text; the model's own text, if the client sends that back."""
    function = call.get("function")
    if not isinstance(function, dict) or (isinstance(function.get("arguments"), str) and function["arguments"]):
        return call
    return {
        **call,
        "function": {**function, "arguments": msgspec.json.encode(function.get("arguments") or {}).decode()},
    }


def _with_decoded_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object: OpenAI sends them as JSON text, but most templates show objects."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": _decoded(function.get("arguments"))}}


def _decoded(arguments: Any) -> dict[str, Any]:
    """Arguments as an object. From broken or cut ones it takes what can be read.

    Templates refuse anything else, and a conversation with it could never go on.
    """
    if isinstance(arguments, str):
        check_brackets(arguments, "messages")
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            arguments = _decoded_beginning(arguments)
    return arguments if isinstance(arguments, dict) else {}


def _decoded_beginning(text: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False, allow_partial=True)
    except ValueError:
        return None


async def _grammar(
    context: ServingContext,
    fields: ChatRequest,
    request: Request,
    tools: RequestedTools | None,
    prompt_end: str,
    content: str,
) -> str:
    """The grammar of the answers, given the grammar `content` of their content. Raises `RequestError`."""
    grammar = context.formats.grammar(context.tokenizer, prompt_end, tools, content)
    if grammar == content:
        return content
    param = "response_format" if tools is None else "tools"
    grammar = await context.checked_grammar(request, Constraint("llguidance", grammar, param))
    check_grammar(grammar, fields.n or 1, param)
    return grammar


def _max_tokens(fields: ChatRequest) -> int | None:
    """The most tokens that the request asks for. Front ends send -1 and 0 for as many as there is room for."""
    asked = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    return None if asked is None or asked < 1 else asked


def _num_logprobs(fields: ChatRequest) -> int | None:
    if fields.top_logprobs and not fields.logprobs:
        raise RequestError(
            f"'top_logprobs' is {fields.top_logprobs}, which is only allowed with 'logprobs': true.",
            param="top_logprobs",
        )
    return (fields.top_logprobs or 0) if fields.logprobs else None
