"""`/v1/cache/*`: pin a prefix or a conversation in the KV cache for a while."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request

from tandem.frontend.http.audit import audited_if_operator
from tandem.frontend.http.authentication import visible_tenant
from tandem.frontend.http.request_options import key_of, tenant_of
from tandem.frontend.openai.answer_shapes import PinCard, PinList, Unpinned
from tandem.frontend.openai.chat import continued_part, tokenize_chat
from tandem.frontend.openai.completions import check_prompt, tokenize_prompt
from tandem.frontend.openai.schema import PinFields, PrefetchFields, UnpinFields, check_cache_salt, check_exactly_one
from tandem.frontend.openai.serving_context import ServingContext, read_body
from tandem.frontend.openai.tool_fields import requested_tools
from tandem.protocol.digest import CacheScope
from tandem.protocol.messages import Prefetch
from tandem.router.backend import PinRequest, PinState


async def pin_prefix(context: ServingContext, request: Request) -> PinCard:
    """Body of `POST /v1/cache/pin`: the pin, and where its blocks are now. Raises a `ServingError`."""
    body, fields = await read_body(request, PinFields)
    context.check_model(fields.model)
    check_cache_salt(fields.cache_salt)
    check_exactly_one(fields, "messages")
    scope = context.cache_scope(request, fields.cache_salt)
    key = key_of(request)
    pinned = PinRequest(
        token_ids=None if fields.conversation_id else await _token_ids(context, request, fields, scope, len(body)),
        conversation_id=fields.conversation_id or "",
        cache_scope=scope,
        tenant=tenant_of(request),
        ttl_s=fields.ttl_s,
        prefetch=Prefetch(fields.prefetch or Prefetch.HOST),
        key_id="" if key is None else key.id,
        max_pins_of_key=None if key is None else key.limits.pins,
    )
    with audited_if_operator(request, "pin.create", f"tenant {pinned.tenant}") as done:
        pin = await context.backend.cache.pin(pinned)
        done.target = f"{pin.pin_id} of tenant {pin.tenant}"
    return _card(pin)


async def unpin_prefix(context: ServingContext, request: Request) -> Unpinned:
    """Body of `POST /v1/cache/unpin`. Raises `PinNotFound`."""
    _, fields = await read_body(request, UnpinFields)
    with audited_if_operator(request, "pin.remove", fields.id):
        await context.backend.cache.unpin(fields.id, visible_tenant(request))
    return Unpinned(id=fields.id, object="cache.pin", deleted=True)


async def prefetch_pin(context: ServingContext, request: Request) -> PinCard:
    """Body of `POST /v1/cache/prefetch`: the pin as it is before its blocks are brought up. Raises `PinNotFound`."""
    _, fields = await read_body(request, PrefetchFields)
    to = Prefetch(fields.to or Prefetch.POOL)
    with audited_if_operator(request, "pin.prefetch", fields.id):
        return _card(await context.backend.cache.prefetch(fields.id, to, visible_tenant(request)))


async def list_pins(context: ServingContext, request: Request) -> PinList:
    """Body of `GET /v1/cache/pins`: the live pins of a tenant, or all of them for an operator.

    Without API keys only the salt distinguishes clients. So only pins with the given salt are listed, which a client
    must know to give it.
    """
    tenant, cache_salt = visible_tenant(request), request.query_params.get("cache_salt")
    is_all = context.scopes.has_keys and (tenant is None or cache_salt is None)
    scope = None if is_all else context.cache_scope(request, cache_salt)
    return PinList("list", [_card(pin) for pin in await context.backend.cache.pins(tenant, scope)])


async def _token_ids(
    context: ServingContext, request: Request, fields: PinFields, scope: CacheScope, num_bytes: int
) -> list[int]:
    """Token ids of the prefix, as a request with this prompt or these messages would have them."""
    tokenizer, tools = context.tokenizer, requested_tools(fields.tools, fields.tool_choice)
    if fields.prompt is not None:
        prompt, add_special_tokens = fields.prompt, fields.add_special_tokens is not False
        limit = context.prompt_limit("prompt")
        check_prompt(prompt, tokenizer, limit)
        return await context.work_on_text(
            request,
            lambda: tokenize_prompt(prompt, tokenizer, limit, add_special_tokens=add_special_tokens),
            num_bytes,
        )
    continued = continued_part(fields)
    if fields.add_generation_prompt is None:
        # After a system message or an answer the next message is the client's, so the answer is not opened.
        opens_answer = (fields.messages or [])[-1].role in ("user", "tool")
        fields = msgspec.structs.replace(fields, add_generation_prompt=opens_answer)
    return await tokenize_chat(context, request, fields, scope, tools=tools, continued=continued, num_bytes=num_bytes)


def _card(pin: PinState) -> PinCard:
    return PinCard(
        id=pin.pin_id,
        object="cache.pin",
        tenant=pin.tenant,
        conversation_id=pin.conversation_id or None,
        num_tokens=pin.num_tokens,
        num_blocks=pin.num_blocks,
        prefetch=pin.prefetch,
        remaining_s=round(pin.remaining_s, 3),
        expires_at=int(time.time() + pin.remaining_s),
        held=pin.held,
    )
