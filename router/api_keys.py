"""API keys of clients: who may ask, and as which tenant.

A file has one key per line, with the tenant behind it if it is to be of one. Empty lines and comments (#) are ignored.

    sk-3f...                 any tenant, by the header x-tandem-tenant
    sk-9a...   search        requests of this key are of the tenant search, whatever the header says
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

from protocol.errors import ConfigError
from router.tenants import TENANT_NAME

__all__ = ["key_digest", "load_api_keys"]


def load_api_keys(path: str) -> dict[bytes, str]:
    """Tenant ("" = any) by the SHA-256 of its key; without a path there are none. Raises `ConfigError`.

    The keys themselves are not kept, and no error shows one.
    """
    if not path:
        return {}
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"api_key_file={path} cannot be read: {exc}") from exc
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        words = list(itertools.takewhile(lambda word: not word.startswith("#"), line.split()))
        if not words:
            continue
        if len(words) > 2 or not all(map(TENANT_NAME.fullmatch, words[1:])):
            raise ConfigError(
                f"{path}: line {number} must be a key and at most a tenant of 1 to 64 letters, digits, '.', '_' or '-'"
            )
        if not words[0].isascii():
            raise ConfigError(
                f"{path}: the key of line {number} has letters that are not ASCII, which no header can send"
            )
        digest = key_digest(words[0])
        if digest in tenants:
            raise ConfigError(f"{path}: the key of line {number} is there twice; remove one of them")
        tenants[digest] = words[1] if len(words) == 2 else ""
    if not tenants:
        raise ConfigError(f"api_key_file={path} has no keys; put one into it: openssl rand -hex 32")
    return tenants


def key_digest(key: str) -> bytes:
    """What a key is looked up by."""
    # Looked up by its hash: how long that takes tells nothing of the keys.
    return hashlib.sha256(key.encode()).digest()
