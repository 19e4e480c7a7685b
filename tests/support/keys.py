"""API keys that tests choose themselves."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tandem.frontend.keys.api_key import ApiKey, key_digest
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.store import write_keys

CREATED = datetime(2026, 1, 1, tzinfo=UTC)


def stored_key(secret: str, tenant: str, **fields: Any) -> ApiKey:
    """The stored form of a key. Its id is the key itself, less what an id may not have."""
    key_id = "".join(char for char in secret if char.isalnum() or char == "-")
    known: dict[str, Any] = {"id": key_id, "sha256": key_digest(secret), "tenant": tenant, "created": CREATED}
    return ApiKey(**(known | fields))


def api_keys_of(keys: Mapping[str, str]) -> ApiKeys:
    """A server's keys, given as their tenants; with none of them the server requires no keys."""
    return ApiKeys([stored_key(secret, tenant) for secret, tenant in keys.items()], is_required=bool(keys))


def make_key_file(path: Path, keys: Mapping[str, str]) -> Path:
    """A file of these keys, given as their tenants."""
    write_keys(str(path), [stored_key(secret, tenant) for secret, tenant in keys.items()])
    return path
