"""The field `cache_hints`: what a client knows about the future of its prompt, or of its conversation, in the cache.

Hints are pins by another name: they act within the tenant's pins and quotas. One that cannot be followed is no error.
The response header `x-tandem-cache-hints` says of each, in their order, whether it was accepted, clipped or refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request

from tandem.frontend.http.ignored_fields import note_ignored
from tandem.frontend.http.request_options import key_of, tenant_of
from tandem.protocol.errors import RequestError, ServingError
from tandem.protocol.messages import Prefetch
from tandem.router.backend import GenerateRequest, HintAction, PinRequest, Pins

HINTS_HEADER = b"x-tandem-cache-hints"
MAX_HINTS = 16  # in one request; later ones are not looked at
MAX_REASON_CHARS = 120  # so that the header has at most 3 kB


class CacheHint(msgspec.Struct, frozen=True):
    """One hint that a request gives."""

    target: Literal["prefix", "session"]  # the prompt, or its conversation with later turns
    action: HintAction
    ttl_s: Annotated[float, Meta(gt=0)] | None = None  # None = the default of pins
    priority: Annotated[int, Meta(ge=0, le=100)] = 0  # the highest of a request get the quota first


Hints = Sequence[CacheHint | str]  # a text is why the hint at this place is refused


def read_hints(field: msgspec.Raw) -> Hints:
    """The hints in a request's field, which may be anything."""
    try:
        given = msgspec.json.decode(field, type=list[msgspec.Raw] | None) or []
    except (msgspec.MsgspecError, RecursionError):
        note_ignored("cache_hints", "it is not a list")
        return []
    if len(given) > MAX_HINTS:
        note_ignored("cache_hints", f"only the first {MAX_HINTS} are looked at")
    hints: list[CacheHint | str] = []
    for raw in given[:MAX_HINTS]:
        hint = _read(raw)
        known = [(one.target, one.action) for one in hints if isinstance(one, CacheHint)]
        repeats = isinstance(hint, CacheHint) and (hint.target, hint.action) in known
        hints.append("It repeats an earlier hint." if repeats else hint)
    return hints


def is_demoted(hints: Hints) -> bool:
    """Whether the blocks of the request are to be evicted first when it ends."""
    return any(isinstance(hint, CacheHint) and hint.action is HintAction.DEMOTE for hint in hints)


async def follow_hints(
    request: Request, hints: Hints, prompts: Sequence[GenerateRequest], pins: Pins
) -> list[tuple[bytes, bytes]]:
    """Do what the hints ask, once for each prompt; return the response header that says so, if there are any."""
    if not hints:
        return []
    answers: dict[int, dict[str, Any]] = {}
    for i, hint in sorted(enumerate(hints), key=lambda item: 0 if isinstance(item[1], str) else -item[1].priority):
        answers[i] = _refused(hint) if isinstance(hint, str) else await _follow(request, hint, prompts, pins)
    shown = json.dumps([answers[i] for i in range(len(hints))], separators=(",", ":"))
    return [(HINTS_HEADER, shown.encode())]


async def _follow(request: Request, hint: CacheHint, prompts: Sequence[GenerateRequest], pins: Pins) -> dict[str, Any]:
    if hint.target == "session":
        prompts = prompts[:1]  # the conversation goes on with the first
        if not prompts[0].conversation_id:
            return _refused("The request names no conversation.")
    clipped: dict[str, Any] = {}
    num_done, reason = 0, ""
    for prompt in prompts:
        try:
            got = await pins.hint(_pin_request(request, hint, prompt), hint.action)
        except ServingError as exc:
            reason = reason or str(exc)
            if isinstance(exc, RequestError):  # about this prompt alone, such as a short one
                continue
            break
        num_done += 1
        if hint.action is not HintAction.DEMOTE:
            if hint.ttl_s is not None and hint.ttl_s - got.ttl_s > 1e-3:
                clipped["ttl_s"] = round(got.ttl_s, 3)
            if got.is_cut:
                clipped["tokens"] = got.num_tokens
    if reason and not num_done:
        return _refused(reason)
    if reason:
        clipped |= {"prompts": num_done, "reason": _short(reason)}
    return {"status": "clipped"} | clipped if clipped else {"status": "accepted"}


def _pin_request(request: Request, hint: CacheHint, prompt: GenerateRequest) -> PinRequest:
    key, is_session = key_of(request), hint.target == "session"
    return PinRequest(
        token_ids=None if is_session else prompt.token_ids,
        conversation_id=prompt.conversation_id if is_session else "",
        cache_scope=prompt.cache_scope,
        tenant=tenant_of(request),
        ttl_s=hint.ttl_s,
        prefetch=Prefetch.POOL if hint.action is HintAction.PREFETCH else Prefetch.HOST,
        key_id="" if key is None else key.id,
        max_pins_of_key=None if key is None else key.limits.pins,
    )


def _read(raw: msgspec.Raw) -> CacheHint | str:
    try:
        return msgspec.json.decode(raw, type=CacheHint)
    except (msgspec.MsgspecError, RecursionError) as exc:
        return str(exc)


def _refused(reason: str) -> dict[str, Any]:
    return {"status": "refused", "reason": _short(reason)}


def _short(reason: str) -> str:
    """Without its remedies, which are for operators, and without what JSON would write as several bytes."""
    return re.sub(r"[^ -~]|[\"\\]", "?", reason.partition(";")[0][:MAX_REASON_CHARS])
