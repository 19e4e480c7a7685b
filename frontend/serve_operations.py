"""What each route of `tandem serve` takes and answers, for `/openapi.json`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.frontend.http.answer_shapes import Deleted
from tandem.frontend.http.openapi import CONVERSATION_HEADERS, GENERATION_HEADERS, Operation, Operations, Parameter
from tandem.frontend.http.shared_operations import SHARED_OPERATIONS
from tandem.frontend.messages.answer_shapes import CountedTokens, Message, MessageEvent
from tandem.frontend.messages.schema import CountTokensRequest, MessagesRequest
from tandem.frontend.openai import answer_shapes as shapes
from tandem.frontend.openai.other_fields import UNSERVED
from tandem.frontend.openai.schema import (
    EXACTLY_ONE,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PinFields,
    PrefetchFields,
    TokenizeRequest,
    UnpinFields,
)
from tandem.frontend.responses.answer_shapes import InputItems, InputTokens, ResponseEvent, ResponseObject
from tandem.frontend.responses.items import MAX_PAGE_ITEMS
from tandem.frontend.responses.schema import ResponsesRequest

SERVE_DESCRIPTION = """\
The HTTP API of `tandem serve`: OpenAI's API, Anthropic's Messages API, and what operators need.

Every optional field may be null. Fields that are unknown, or that only hint at something, are ignored, because \
clients send new ones all the time; the response header `x-tandem-ignored` names them. Refused are fields that would \
change the answer and are not served. Streams are server-sent events; after the first token an error is the last \
event."""

_HEADERS = (*GENERATION_HEADERS, *CONVERSATION_HEADERS)
_TENANT = GENERATION_HEADERS[:1]
_SALT = Parameter("cache_salt", "query", {"type": "string"}, "Only pins with this salt.")
_PAGE = (
    Parameter("order", "query", {"enum": ["asc", "desc"]}, "By default `desc`: the newest first."),
    Parameter("after", "query", {"type": "string"}, "The id of the item that the list goes on from."),
    Parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_ITEMS}, "By default 20."),
)
_FAILURES = (404, 429, 502, 504)
_DONE = "[DONE]"
_QUESTION = {"anyOf": [{"$ref": f"#/components/schemas/{one.__name__}"} for one in (ChatRequest, CompletionRequest)]}
_INPUT = {"input": "What is the capital of France?"}
_HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


def _generation(body: Any, example: dict[str, Any], answer: Any, event: Any, **options: Any) -> Operation:
    return Operation(
        tag="generation",
        body=body,
        example=example,
        answer=answer,
        event=event,
        errors=_FAILURES,
        parameters=_HEADERS,
        **options,
    )


def _read(tag: str, answer: Any, *, parameters: tuple[Parameter, ...] = _TENANT, **options: Any) -> Operation:
    return Operation(tag=tag, answer=answer, errors=(404,), parameters=parameters, **options)


SERVE_OPERATIONS: Operations = SHARED_OPERATIONS | {
    ("POST", "/v1/chat/completions"): _generation(
        ChatRequest,
        _HELLO | {"max_tokens": 64, "stream": False},
        shapes.ChatCompletion,
        shapes.ChatChunk,
        done=_DONE,
        refused=UNSERVED,
    ),
    ("POST", "/v1/completions"): _generation(
        CompletionRequest,
        {"prompt": "The capital of France is", "max_tokens": 16},
        shapes.Completion,
        shapes.CompletionChunk,
        done=_DONE,
        refused=UNSERVED,
    ),
    ("POST", "/v1/responses"): _generation(
        ResponsesRequest, _INPUT | {"max_output_tokens": 64}, ResponseObject, ResponseEvent
    ),
    ("POST", "/v1/messages"): _generation(MessagesRequest, _HELLO | {"max_tokens": 64}, Message, MessageEvent),
    ("POST", "/v1/responses/input_tokens"): _read("generation", InputTokens, body=ResponsesRequest, example=_INPUT),
    ("POST", "/v1/messages/count_tokens"): _read("generation", CountedTokens, body=CountTokensRequest, example=_HELLO),
    ("GET", "/v1/responses/{response_id}"): _read("generation", ResponseObject),
    ("GET", "/v1/responses/{response_id}/input_items"): _read("generation", InputItems, parameters=(*_TENANT, *_PAGE)),
    ("DELETE", "/v1/responses/{response_id}"): _read("generation", Deleted),
    ("POST", "/v1/embeddings"): Operation(tag="generation", status=None, errors=(429, 501)),
    ("POST", "/tokenize"): _read(
        "tokens", shapes.Tokenized, body=TokenizeRequest, exactly_one=EXACTLY_ONE, example={"prompt": "Hello world"}
    ),
    ("POST", "/detokenize"): Operation(
        tag="tokens", body=DetokenizeRequest, example={"tokens": [0, 1]}, answer=shapes.Detokenized, errors=(404,)
    ),
    ("POST", "/v1/cache/pin"): Operation(
        tag="cache",
        body=PinFields,
        exactly_one=EXACTLY_ONE,
        refused=UNSERVED,
        example={"prompt": "A long text", "ttl_s": 60},
        answer=shapes.PinCard,
        errors=(404, 502),
        parameters=_TENANT,
    ),
    ("POST", "/v1/cache/unpin"): Operation(tag="cache", body=UnpinFields, answer=shapes.Unpinned, errors=(404,)),
    ("POST", "/v1/cache/prefetch"): Operation(
        tag="cache", body=PrefetchFields, answer=shapes.PinCard, errors=(404, 502)
    ),
    ("GET", "/v1/cache/pins"): Operation(tag="cache", answer=shapes.PinList, parameters=(*_TENANT, _SALT)),
    ("POST", "/v1/route/explain"): replace(
        SHARED_OPERATIONS["POST", "/v1/route/explain"], body=_QUESTION, example=_HELLO
    ),
    ("POST", "/v1/pools/check"): Operation(tag="operations", answer=shapes.PoolCheck, errors=(429, 502)),
}
