"""`POST /tokenize` and `POST /detokenize`: the model's tokenizer as requests use it."""

from __future__ import annotations

from starlette.requests import Request

from tandem.frontend.openai.answer_shapes import Detokenized, Tokenized
from tandem.frontend.openai.chat import continued_part, tokenize_chat
from tandem.frontend.openai.sampling import check_token_ids
from tandem.frontend.openai.schema import DetokenizeRequest, TokenizeRequest, check_exactly_one
from tandem.frontend.openai.serving_context import ServingContext, read_body
from tandem.frontend.openai.tool_fields import requested_tools


async def tokenize(context: ServingContext, request: Request) -> Tokenized:
    """Body of `POST /tokenize`: the ids that a request with this prompt or these messages starts from."""
    body, fields = await read_body(request, TokenizeRequest)
    context.check_model(fields.model)
    scope = context.cache_scope(request, None)
    tokenizer = context.tokenizer
    check_exactly_one(fields, "prompt")
    tools = requested_tools(fields.tools, fields.tool_choice)
    if fields.prompt is not None:
        prompt = fields.prompt
        add_special_tokens = fields.add_special_tokens is not False
        limit = context.prompt_limit("prompt")
        tokenizer.check_length(prompt, limit)
        ids = await context.work_on_text(
            request, lambda: tokenizer.encode(prompt, add_special_tokens=add_special_tokens, limit=limit), len(body)
        )
    else:
        continued = continued_part(fields)
        ids = await tokenize_chat(
            context, request, fields, scope, tools=tools, continued=continued, num_bytes=len(body)
        )
    strings = None
    if fields.return_token_strs:
        strings = await context.work_on_text(request, lambda: tokenizer.token_strings(ids), len(body))
    return Tokenized(len(ids), context.backend.max_model_len, ids, strings)


async def detokenize(context: ServingContext, request: Request) -> Detokenized:
    """Body of `POST /detokenize`: the text of token ids, special tokens included."""
    body, fields = await read_body(request, DetokenizeRequest)
    context.check_model(fields.model)
    context.prompt_limit("tokens").check(len(fields.tokens))
    check_token_ids(fields.tokens, context.tokenizer.vocab_size, param="tokens")
    text = await context.work_on_text(request, lambda: context.tokenizer.decode(fields.tokens), len(body))
    return Detokenized(text)
