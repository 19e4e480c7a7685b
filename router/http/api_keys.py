"""The file of API keys: one key per line, optionally followed by its tenant. Empty lines and comments (#) are ignored.

sk-9a...   search        requests with this key belong to the tenant search, whatever the header x-tandem-tenant says
sk-3f...                 the same for the tenant default
sk-71...   *             an operator's key: the header names the tenant, and it may see what all tenants do
"""

from __future__ import annotations

import hashlib
import itertools

from tandem.protocol.errors import ConfigError
from tandem.protocol.user_file import read_text
from tandem.scheduling.admission.tenants import DEFAULT_TENANT, TENANT_NAME

__all__ = ["ANY_TENANT", "key_digest", "load_api_keys"]

ANY_TENANT = "*"  # in place of a tenant: an operator's key


def load_api_keys(path: str) -> dict[bytes, str]:
    """Tenant (or `ANY_TENANT`) by `key_digest`; empty if there is no path. Raises `ConfigError`.

    The keys themselves are not kept, and no error shows one.
    """
    if not path:
        return {}
    lines = read_text("api_key_file", path).split("\n")
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        words = list(itertools.takewhile(lambda word: not word.startswith("#"), line.split()))
        if not words:
            continue
        tenant = words[1] if len(words) > 1 else DEFAULT_TENANT
        if len(words) > 2 or not (tenant == ANY_TENANT or TENANT_NAME.fullmatch(tenant)):
            raise ConfigError(
                f"{path}: line {number} must be a key and at most a tenant of 1 to 64 letters, digits, '.', '_' or '-' "
                f"({ANY_TENANT} for an operator's key)"
            )
        if words[0].lower() == "bearer":  # it would be the key, which anybody can guess, and the real key a tenant
            raise ConfigError(f"{path}: line {number} begins with {words[0]!r}, which is no key; write the key alone")
        if not (words[0].isascii() and words[0].isprintable()):
            raise ConfigError(
                f"{path}: the key in line {number} has characters that are not visible ASCII, which no header can carry"
            )
        digest = key_digest(words[0])
        if digest in tenants:
            raise ConfigError(f"{path}: the key in line {number} is listed twice; remove one of them")
        tenants[digest] = tenant
    if not tenants:
        raise ConfigError(f"api_key_file={path} has no keys; add one: openssl rand -hex 32")
    return tenants


def key_digest(key: str) -> bytes:
    """SHA-256 of a key. Keys are looked up by it, so that the time of a look-up tells nothing about them."""
    return hashlib.sha256(key.encode()).digest()
