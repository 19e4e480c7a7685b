"""Block digests: the names of cached blocks, the same in every process, on every host and in every tier.

Digest of block i = 128-bit BLAKE2b of (digest of block i-1, token ids of block i). The chain starts at a root that
hashes a typed namespace, so two things that must not share KV cannot collide by equal spelling. The root also contains
the cache scope: requests of two tenants have no digest in common, so they cannot find each other's blocks anywhere, and
no other place needs to check for it.

Hashing a prompt's blocks is half of the cost of a routing decision, so it is done in C (`_digest.c`) if that was built.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, NewType

DIGEST_BYTES = 16
TOKEN_BYTES = 4
LONG_PROMPT_TOKENS = 8192  # hashing more than this (0.1 ms, or 0.2 in Python) goes to a thread
_NAMESPACE_KEY = b"tandem.namespace.v1"
_SCOPE_KEY = b"tandem.scope.v1"
_ROOT_KEY = b"tandem.root.v1"
# BLAKE2b's personal string separates it from other hashes. A key would do so too, but is one more block to compress.
_BLOCK_HASH = hashlib.blake2b(person=b"tandem.block.v2", digest_size=DIGEST_BYTES)


def _tagged_hash(key: bytes, fields: dict[str, str]) -> bytes:
    """Hash name/value pairs with explicit lengths, so no value can imitate a neighbouring field."""
    state = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES)
    for name in sorted(fields):
        for part in (name.encode(), fields[name].encode()):
            state.update(struct.pack("<I", len(part)))
            state.update(part)
    return state.digest()


def namespace_digest(
    *, model_revision: str, kv_dtype: str, codec: str, block_size: int, attention: str, kernels: str
) -> bytes:
    """Digest of everything about a worker that its KV bytes depend on. 16 bytes.

    `kernels` names what computes: another kind rounds elsewhere, and an answer must not depend on whose KV it found.
    """
    return _tagged_hash(
        _NAMESPACE_KEY,
        {
            "kv_layout": "heads first",
            "model_revision": model_revision,
            "kv_dtype": kv_dtype,
            "codec": codec,
            "block_size": str(block_size),
            "attention": attention,
            "kernels": kernels,
        },
    )


# Names a group of requests that may use each other's cached blocks. Only `cache_scope` creates one: the type checker
# does not accept a client's `cache_salt`.
CacheScope = NewType("CacheScope", str)
EVERYONE: Final = CacheScope("")  # the scope of requests without tenant and salt


@lru_cache(maxsize=4096)
def cache_scope(cache_salt: str, tenant: str | None = None) -> CacheScope:
    """Scope of a tenant's requests with this salt; without a tenant, of all requests. 32 hex digits, or `EVERYONE`.

    A salt only subdivides a tenant's scope: no salt leads into another tenant's scope.
    """
    if tenant is None and not cache_salt:
        return EVERYONE
    fields = {"cache_salt": cache_salt} if tenant is None else {"cache_salt": cache_salt, "tenant": tenant}
    return CacheScope(_tagged_hash(_SCOPE_KEY, fields).hex())


def root_digest(namespace: bytes, *, cache_salt: str = "", lora: str = "") -> bytes:
    """Root of the chains one cache scope (and one adapter) may share within a namespace. 16 bytes."""
    return _tagged_hash(_ROOT_KEY, {"namespace": namespace.hex(), "cache_salt": cache_salt, "lora": lora})


def python_token_bytes(token_ids: Sequence[int], /) -> bytes:
    """The ids as they are hashed: 4 bytes each, little-endian. Raises `OverflowError` if one does not fit."""
    words = array("I", token_ids)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def python_chain_digests(parent: bytes, data: bytes, block_bytes: int, /) -> list[bytes]:
    """Digests of the blocks after `parent`. `data` are their `token_bytes`, `block_bytes` for each block.

    Raises `ValueError` if `data` is not whole blocks.
    """
    if block_bytes <= 0 or len(data) % block_bytes:
        raise ValueError(f"{len(data)} bytes are not blocks of {block_bytes}")
    digests = []
    # Most of the time is Python's. Copying a state takes less time than creating one.
    for (block,) in struct.iter_unpack(f"{block_bytes}s", data):
        state = _BLOCK_HASH.copy()
        state.update(parent + block)
        parent = state.digest()
        digests.append(parent)
    return digests


try:
    from tandem.protocol._digest import chain_digests
    from tandem.protocol._digest import token_bytes as token_bytes

    IS_COMPILED = True
except ImportError:  # not built, because there was no compiler: the same result in 2.5 times the time
    token_bytes, chain_digests = python_token_bytes, python_chain_digests
    IS_COMPILED = False


def join_digests(digests: Iterable[bytes]) -> bytes:
    """Digests as one run of bytes: tens of thousands in a message cost no more than copying them."""
    return b"".join(digests)


def split_digests(run: bytes) -> list[bytes]:
    """The digests that `join_digests` joined. Raises `ValueError` if the run is cut within one."""
    check_digest_run(run)
    return [digest for (digest,) in struct.iter_unpack(f"{DIGEST_BYTES}s", run)]


def check_digest_run(run: bytes) -> None:
    """Raise `ValueError` unless these are whole digests."""
    if len(run) % DIGEST_BYTES:
        raise ValueError(f"{len(run)} bytes are not digests of {DIGEST_BYTES} bytes: the run is cut or damaged")


def extend_digests(
    digests: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int, *, num_blocks: int | None = None
) -> None:
    """Append the digests of the full blocks of `token_ids`, or of the first `num_blocks`, that it does not name yet."""
    end = len(token_ids) // block_size if num_blocks is None else num_blocks
    parent = digests[-1] if digests else root
    data = token_bytes(token_ids[len(digests) * block_size : end * block_size])
    digests += chain_digests(parent, data, block_size * TOKEN_BYTES)


def block_digests(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Digests of all full blocks of `token_ids`, first block first; a partial tail has none."""
    return packed_digests(root, token_bytes(token_ids), block_size)


def packed_digests(root: bytes, data: bytes, block_size: int) -> list[bytes]:
    """`block_digests` of token ids that `token_bytes` packed."""
    block_bytes = block_size * TOKEN_BYTES
    return chain_digests(root, data[: len(data) // block_bytes * block_bytes], block_bytes)
