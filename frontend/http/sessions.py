"""The conversation that a request belongs to: named by its body or a header, or by what clients call their session."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tandem.frontend.http.ignored_fields import note_ignored
from tandem.protocol.errors import RequestError

CONVERSATION_HEADER = "x-tandem-conversation"
# opencode and gateways; Codex, now and before; Claude Code. The first one that a request has counts.
SESSION_HEADERS = ("x-session-affinity", "x-session-id", "session-id", "session_id", "x-claude-code-session-id")
MAX_CONVERSATION_ID_CHARS = 256

_NAME = re.compile(f"[ -~]{{1,{MAX_CONVERSATION_ID_CHARS}}}")


def conversation_named(headers: Mapping[str, str], conversation_id: str | None, prompt_cache_key: Any = None) -> str:
    """The conversation's name; "" = none. The body's `conversation_id` wins, then our own header.

    Raises `RequestError` if that header is too long. Names that clients give their sessions never refuse a request.
    """
    named = headers.get(CONVERSATION_HEADER, "")
    if len(named) > MAX_CONVERSATION_ID_CHARS:
        raise RequestError(
            f"The header {CONVERSATION_HEADER} has {len(named)} characters, over the limit of "
            f"{MAX_CONVERSATION_ID_CHARS}."
        )
    return conversation_id or named or _session(headers, prompt_cache_key)


def routing_session(conversation_id: str, user: Any) -> str:
    """What the routing strategy `session` keeps on one worker; "" = nothing. The conversation, else the body's user."""
    return conversation_id or (user[:MAX_CONVERSATION_ID_CHARS] if isinstance(user, str) else "")


def _session(headers: Mapping[str, str], prompt_cache_key: Any) -> str:
    given = [(name, headers[name]) for name in SESSION_HEADERS if name in headers]
    for name, value in (*given, ("prompt_cache_key", prompt_cache_key)):
        if value is None or value == "":
            continue
        if isinstance(value, str) and _NAME.fullmatch(value):
            return value
        note_ignored(name, f"it is not a text of at most {MAX_CONVERSATION_ID_CHARS} printable ASCII characters")
    return ""
