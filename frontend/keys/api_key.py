"""One API key as it is stored: everything except the key itself, of which only the SHA-256 is kept.

A plain hash is enough because a key is 256 random bits, which nobody can guess. Passwords, which people choose, would
need a slow hash with a salt.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.protocol.errors import RequestError
from tandem.scheduling.admission.key_limits import NO_LIMITS, KeyLimits
from tandem.scheduling.admission.tenants import TENANT_NAME

OPERATOR = "*"  # stands for a tenant in an operator's key, which may name any tenant and sees all of them
MAX_NAME_CHARS = 100

KeyState = Literal["active", "expired", "revoked"]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Time = Annotated[datetime, Meta(tz=True)]


class InvalidApiKey(RequestError):
    """The request has no API key, or one that is unknown, expired or revoked."""

    status = 401
    code = "invalid_api_key"


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stored key. `id` is shown in lists and logs; the key cannot be derived from it."""

    id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,32}\Z")]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # the result of `key_digest`
    tenant: Annotated[str, Meta(pattern=rf"^(\*|{TENANT_NAME.pattern})\Z")]  # or `OPERATOR`
    created: Time
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] = ""  # a label that people read
    priority: Priority = 0  # the priority of requests that name none
    limits: KeyLimits = NO_LIMITS
    expires: Time | None = None
    revoked: Time | None = None

    def state(self, now_s: float) -> KeyState:
        """Whether the key may be used at this Unix time."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and now_s >= self.expires.timestamp() else "active"


def new_secret() -> str:
    """A fresh key: 256 random bits."""
    return f"sk-{secrets.token_hex(32)}"


def key_digest(key: str) -> str:
    """SHA-256 of a key, in hex. Look-ups compare digests, so their time reveals nothing about the keys."""
    return hashlib.sha256(key.encode()).hexdigest()
