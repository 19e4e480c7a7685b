"""What each route of `tandem route` takes and answers, for `/openapi.json`.

Bodies and answers are the engines': the document describes what the router itself reads, refuses and answers.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from tandem.frontend.http.openapi import CONVERSATION_HEADERS, GENERATION_HEADERS, Operation, Operations, Parameter
from tandem.frontend.http.shared_operations import SHARED_OPERATIONS
from tandem.frontend.openai.schema import CacheSalt, Doc
from tandem.frontend.relay.apis import APIS, Api

ROUTE_DESCRIPTION = """\
The HTTP API of `tandem route`, which forwards requests to engines.

Bodies are passed on with all their fields, and answers as the engine wrote them: what an engine takes and answers is \
in its own documentation. Schemas here have what the router reads. Some fields are for the router to set and are \
refused (`kv_transfer_params` and others), and request ids are replaced."""

_ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}
_STREAM = Parameter("stream", "query", {"type": "boolean"}, "Events of a response that runs in the background.")


_HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
_TEXTS = {"input": ["one text", "another"]}
_PAIRS = {"text_1": "a question", "text_2": ["an answer", "another"]}
_EXAMPLES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _HELLO | {"max_tokens": 64},
    "/v1/completions": {"prompt": "The capital of France is", "max_tokens": 16},
    "/v1/responses": {"input": "What is the capital of France?", "max_output_tokens": 64},
    "/v1/messages": _HELLO | {"max_tokens": 64},
    "/v1/messages/count_tokens": _HELLO,
    "/v1/embeddings": _TEXTS,
    "/v1/rerank": {"query": "a question", "documents": ["an answer", "another"]},
    "/v1/score": _PAIRS,
    "/pooling": _TEXTS,
    "/classify": _TEXTS,
    "/tokenize": {"prompt": "Hello world"},
    "/detokenize": {"tokens": [0, 1]},
}


class ForwardedBody(msgspec.Struct):
    """What the router reads of every request; the engine checks the rest."""

    model: Annotated[str | None, Doc("A model or adapter of `/v1/models`; may be left out if there is one model.")] = (
        None
    )
    cache_salt: CacheSalt = None
    priority: Annotated[Any, Doc("Order within the tenant's queue; lower is more urgent. The engine checks it.")] = None


class ForwardedGeneration(ForwardedBody):
    """What the router reads of a request that generates; the engine checks the rest."""

    stream: Annotated[Any, Doc("Whether the answer is a stream.")] = None


def _forwarded(api: Api) -> Operation:
    answer = _ANY_OBJECT | {"required": [api.answer_field], "description": "As the engine wrote it."}
    event = _ANY_OBJECT | {"description": "As the engine wrote it."}
    return Operation(
        tag="generation" if api.generates else "other routes of engines",
        body=ForwardedGeneration if api.generates else ForwardedBody,
        example=_EXAMPLES[api.path],
        answer=answer,
        event=event if api.generates else None,
        done="[DONE]" if api.has_stream_options else "",
        errors=(404, 429, 502, 504),
        passes_errors=True,
        parameters=(*GENERATION_HEADERS, *CONVERSATION_HEADERS),
    )


def _stored(*parameters: Parameter) -> Operation:
    return Operation(
        tag="generation",
        answer=_ANY_OBJECT | {"description": "As the engine wrote it."},
        errors=(404, 429, 502, 504),
        passes_errors=True,
        parameters=(*GENERATION_HEADERS[:1], *parameters),
    )


ROUTE_OPERATIONS: Operations = (
    SHARED_OPERATIONS
    | {("POST", api.path): _forwarded(api) for api in APIS}
    | {
        ("GET", "/v1/responses/{response_id}"): _stored(_STREAM),
        ("DELETE", "/v1/responses/{response_id}"): _stored(),
        ("GET", "/v1/responses/{response_id}/input_items"): _stored(),
        ("POST", "/v1/responses/{response_id}/cancel"): _stored(),
        ("GET", "/v1/engines"): Operation(tag="engines", answer=_ANY_OBJECT, access="admin"),
        ("POST", "/v1/engines"): Operation(
            tag="engines",
            body=_ANY_OBJECT | {"description": "The keys of an engine in the engines file."},
            example={"name": "a", "url": "http://127.0.0.1:8001", "kind": "vllm"},
            answer=_ANY_OBJECT,
            status=201,
            access="admin",
        ),
        ("DELETE", "/v1/engines/{name}"): Operation(
            tag="engines", answer=_ANY_OBJECT, status=202, errors=(404,), access="admin"
        ),
    }
)
