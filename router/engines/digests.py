"""Names of blocks on engines: which prompts share a prefix, as far as the router knows."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.protocol.digest import CacheScope, packed_digests, root_digest
from tandem.protocol.messages import WorkerCard


def digest_root(model: str, block_size: int, *, is_exact: bool = True) -> bytes:
    """Namespace of the digests by which engines of one model are compared.

    Estimated tokens have a namespace of their own: no KV event can name their blocks.
    """
    return root_digest(b"engines" if is_exact else b"estimates", cache_salt=model, lora=str(block_size))


class EngineDigests:
    """Digests of a prompt's blocks for each model and block size, computed when they are first asked for."""

    def __init__(self, prompt: bytes, scope: CacheScope, adapter: str = "", *, is_exact: bool = True) -> None:
        """`prompt` are token ids, as `token_bytes` packs them. A LoRA adapter makes all KV different."""
        self._is_exact = is_exact
        self._prompt = prompt
        self._scope = scope
        self._adapter = adapter
        self._digests: dict[tuple[str, int], list[bytes]] = {}

    def of(self, card: WorkerCard) -> Sequence[bytes]:
        """The digests under which an engine with this card caches the prompt."""
        key = (card.model, card.block_size)
        found = self._digests.get(key)
        if found is None:
            root = root_digest(digest_root(*key, is_exact=self._is_exact), cache_salt=self._scope, lora=self._adapter)
            found = self._digests[key] = packed_digests(root, self._prompt, card.block_size)
        return found
