"""The small routes: which model is served, and its tokenizer."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from tandem.protocol.errors import ModelNotFound, RequestError
from tandem.router.openai.chat import tokenize_chat
from tandem.router.openai.edge import Edge, read_body
from tandem.router.openai.sampling import check_token_ids
from tandem.router.openai.schema import DetokenizeRequest, TokenizeRequest

__all__ = ["detokenize", "model_card", "model_list", "tokenize"]


def model_list(edge: Edge) -> dict[str, Any]:
    """Body of `GET /v1/models`."""
    return {"object": "list", "data": [model_card(edge, edge.backend.model)]}


def model_card(edge: Edge, model_id: str) -> dict[str, Any]:
    """Body of `GET /v1/models/{id}`. Raises `ModelNotFound`."""
    if model_id != edge.backend.model:
        raise ModelNotFound(f"The model '{model_id[:200]}' does not exist.", param="model")
    return {
        "id": model_id,
        "object": "model",
        "created": edge.started_at_s,
        "owned_by": "tandem",
        "root": model_id,
        "parent": None,
        "max_model_len": edge.backend.max_model_len,
    }


async def tokenize(edge: Edge, request: Request) -> dict[str, Any]:
    """Body of `POST /tokenize`: the ids that a request with this prompt or these messages starts from."""
    _, fields = await read_body(request, TokenizeRequest)
    edge.check_model(fields.model)
    tokenizer = edge.tokenizer
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("Give either 'prompt' or 'messages'.", param="prompt")
    if fields.prompt is not None:
        prompt = fields.prompt
        add_special_tokens = fields.add_special_tokens is not False
        limit = edge.prompt_limit("prompt")
        tokenizer.check_length(prompt, limit)
        ids = await edge.pool.run(lambda: tokenizer.encode(prompt, add_special_tokens=add_special_tokens, limit=limit))
    else:
        ids = await tokenize_chat(
            edge,
            fields.messages or (),
            fields.chat_template_kwargs,
            fields.add_generation_prompt,
            edge.cache_scope(request, None),
            add_special_tokens=bool(fields.add_special_tokens),
        )
    strings = await edge.pool.run(lambda: tokenizer.token_strings(ids)) if fields.return_token_strs else None
    return {
        "count": len(ids),
        "max_model_len": edge.backend.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


async def detokenize(edge: Edge, fields: DetokenizeRequest) -> dict[str, Any]:
    """Body of `POST /detokenize`: the text of token ids, special ones included."""
    edge.check_model(fields.model)
    edge.prompt_limit("tokens").check(len(fields.tokens))
    check_token_ids(fields.tokens, edge.tokenizer.vocab_size, param="tokens")
    return {"prompt": await edge.pool.run(lambda: edge.tokenizer.decode(fields.tokens))}
