"""The pools of a prefill and of a decode worker that have been full for a while, and the handoffs between them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tandem.engine.block_pool import BlockPool
from tests.support.plain_pool import PlainPool

_BLOCK_SIZE = 16

Pool = BlockPool | PlainPool


@dataclass(slots=True)
class _Chat:
    """A sequence of the decode worker. `digests` are those of its full blocks, as they come to be computed."""

    name: int
    num_tokens: int
    blocks: list[int] = field(default_factory=list)
    num_left: int = 0  # tokens to decode

    def digests(self, num_blocks: int) -> list[bytes]:
        return [self.name.to_bytes(8, "big") + idx.to_bytes(8, "big") for idx in range(num_blocks)]


class UsedPools:
    """Chats and their next turns, `num_seqs` of them decoding at a time. `prompt_tokens` are the lengths."""

    def __init__(
        self,
        make_pool: Callable[[int], Pool],
        *,
        num_blocks: int = 1024,
        num_seqs: int = 4,
        prompt_tokens: range = range(500, 3000),
        answer_tokens: int = 60,
        seed: int = 0,
    ) -> None:
        self.sender, self.receiver = make_pool(num_blocks), make_pool(num_blocks)
        self._rng = random.Random(seed)
        self._num_seqs, self._answer_tokens, self._prompt_tokens = num_seqs, answer_tokens, prompt_tokens
        self._decoding: list[_Chat] = []
        self._ended: list[_Chat] = []
        self._names = itertools.count()

    def handoffs(self) -> Iterator[tuple[list[int], list[int]]]:
        """(the sender's blocks, the receiver's blocks) of one prompt after another, without those that both cache."""
        while True:
            while len(self._decoding) >= self._num_seqs:
                self._decode()
            chat = self._next_turn() or _Chat(next(self._names), self._rng.choice(self._prompt_tokens))
            yield self._hand_over(chat)

    def _next_turn(self) -> _Chat | None:
        if not self._ended or self._rng.random() > 0.3:
            return None
        chat = self._ended.pop(self._rng.randrange(len(self._ended)))
        chat.num_tokens += self._rng.randint(20, 400)
        return chat if chat.num_tokens in self._prompt_tokens else None

    def _hand_over(self, chat: _Chat) -> tuple[list[int], list[int]]:
        local, _ = self._take(self.sender, chat)
        self.sender.release(local)
        chat.blocks, num_cached = self._take(self.receiver, chat)
        chat.num_left = self._rng.randint(1, 2 * self._answer_tokens)
        self._decoding.append(chat)
        return local[num_cached:], chat.blocks[num_cached:]

    def _take(self, pool: Pool, chat: _Chat) -> tuple[list[int], int]:
        """The prompt's blocks, published, and how many of them were cached."""
        num_full, rest = divmod(chat.num_tokens, _BLOCK_SIZE)
        digests = chat.digests(num_full)
        cached = pool.acquire_cached(digests)
        while (fresh := pool.try_allocate(num_full + bool(rest) - len(cached))) is None:
            assert self._decoding, "the pool is too small for one prompt"
            self._decode()
        pool.publish_chain([*cached, *fresh][:num_full], digests, 0)
        return [*cached, *fresh], len(cached)

    def _decode(self) -> None:
        """A token for each sequence."""
        for chat in list(self._decoding):
            chat.num_tokens += 1
            chat.num_left -= 1
            if chat.num_tokens > len(chat.blocks) * _BLOCK_SIZE:
                chat.blocks += self.receiver.try_allocate(1) or []
            if not chat.num_left:
                num_full = chat.num_tokens // _BLOCK_SIZE
                self.receiver.publish_chain(chat.blocks[:num_full], chat.digests(num_full), 0)
                self.receiver.release(chat.blocks)
                self._decoding.remove(chat)
                self._ended.append(chat)
