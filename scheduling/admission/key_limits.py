"""How much one API key may use."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["MAX_LIMIT", "NO_LIMITS", "KeyLimits"]

MAX_LIMIT = 10**12
Limit = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of one API key; None = no limit."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None  # of prompts and answers together
    concurrent_requests: Limit | None = None
    pins: Annotated[int, Meta(ge=0, le=MAX_LIMIT)] | None = None  # live at one time; 0 = it may pin nothing


NO_LIMITS = KeyLimits()
