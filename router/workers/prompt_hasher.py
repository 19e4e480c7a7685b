"""Digests of prompts and answers, block by block, as the workers cache them."""

from __future__ import annotations

import asyncio

from tandem.protocol.digest import LONG_PROMPT_TOKENS, CacheScope, block_digests, root_digest
from tandem.router.backend import GenerateRequest
from tandem.scheduling.workers.registry import Registry

MAX_ROOTS = 4096  # cached digest roots, one per cache scope and adapter


class PromptHasher:
    """Hashes for the workers of a registry, which all have one namespace and one block size."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._roots: dict[tuple[bytes, CacheScope, str], bytes] = {}

    async def digests(self, token_ids: list[int], scope: CacheScope, adapter: str = "") -> list[bytes]:
        """Digests of the full blocks of a prompt; none while there is no worker."""
        worker = next(iter(self._registry), None)
        if worker is None:
            return []  # placement will say that there is no worker
        root = self._root(worker.card.namespace, scope, adapter)
        block_size = worker.card.block_size
        if len(token_ids) <= LONG_PROMPT_TOKENS:
            return block_digests(root, token_ids, block_size)
        return await asyncio.to_thread(block_digests, root, token_ids, block_size)

    def answer_digests(
        self, request: GenerateRequest, digests: list[bytes], output: list[int], namespace: bytes, block_size: int
    ) -> list[bytes]:
        """Digests of the full blocks that an answer adds to the prompt's, which are `digests`."""
        parent = digests[-1] if digests else self._root(namespace, request.cache_scope, request.adapter)
        # NOTE: the last token's KV is never computed.
        rest = request.token_ids[len(digests) * block_size :] + output[:-1]
        return block_digests(parent, rest, block_size)

    def _root(self, namespace: bytes, scope: CacheScope, adapter: str) -> bytes:
        key = (namespace, scope, adapter)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            root = self._roots[key] = root_digest(namespace, cache_salt=scope, lora=adapter)
        return root
