"""KV events of vLLM and SGLang: from the messages of their ZMQ publishers to the digests of our prefix index.

An engine identifies blocks by its own hashes. Its events contain the tokens too, so our digests are computed from them.
A map from its hashes to our digests continues the chains and resolves removals. SGLang's events are vLLM's with two
differences: the salt is a field of its own, and under speculative decoding a token is a pair of two neighbours.

    PUB     [topic, sequence number (8 bytes, big endian), msgpack [timestamp, [event, ...], data parallel rank]]
    ROUTER  asked with [b"", first sequence number]: sends the batches it still has, then sequence number -1
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from zmq.asyncio import Context, Socket
from zmq.constants import SocketType
from zmq.error import ZMQError

from tandem.protocol.decoding import safe_decoder
from tandem.protocol.digest import block_digests, root_digest

__all__ = ["BlockChange", "BlockTranslator", "KvEventFeed", "decode_batch"]

logger = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 5.0
_END = (1 << 64) - 1  # -1 as vLLM writes it
_FIELDS = {  # of events that are arrays; older versions of vLLM send arrays, newer ones send maps
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                    "extra_keys", "group_idx"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip

BlockHash = bytes | int


class BlockChange(NamedTuple):
    """The change that one batch of events makes, in our digests. `is_cleared`: all earlier blocks are gone."""

    stored: list[bytes]
    removed: list[bytes]
    is_cleared: bool = False


_batch_of = safe_decoder(Any)


def decode_batch(payload: bytes) -> list[dict[str, Any]]:
    """The events of one message, as maps with a `type`. Raises `msgspec.DecodeError` for anything else."""
    batch = _batch_of(payload)
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise msgspec.DecodeError("a batch of KV events is [timestamp, [event, ...], ...]")
    return [_as_map(event) for event in batch[1]]


@dataclass(slots=True)
class BlockTranslator:
    """Translates one engine's events. Pure: events in, changes of the prefix index out."""

    namespace: bytes
    block_size: int
    digests: dict[BlockHash, bytes] = field(default_factory=dict)
    num_skipped: int = 0  # blocks of another size, blocks that are not plain text, and blocks with an unknown parent

    def apply(self, events: Sequence[dict[str, Any]]) -> BlockChange:
        """Translate a batch.

        Events that are malformed raise `KeyError`, `TypeError`, `ValueError`, `AttributeError` or `OverflowError`, and
        leave a part of the batch applied.
        """
        # A block may be stored and removed several times within a batch: only the last event counts.
        last: dict[bytes, bool] = {}
        is_cleared = False
        for event in events:
            if event["type"] == "AllBlocksCleared":
                is_cleared = True
                self.digests.clear()
                last.clear()
            elif event.get("medium") not in (None, "GPU", "gpu") or event.get("group_idx"):
                continue  # another tier, or layers without full attention
            elif event["type"] == "BlockStored":
                last |= dict.fromkeys(self._stored(event), True)
            elif event["type"] == "BlockRemoved":
                gone = (self.digests.pop(name, None) for name in event["block_hashes"])
                last |= dict.fromkeys((digest for digest in gone if digest is not None), False)
        return BlockChange(
            [digest for digest, is_held in last.items() if is_held],
            [digest for digest, is_held in last.items() if not is_held],
            is_cleared,
        )

    def _stored(self, event: dict[str, Any]) -> list[bytes]:
        names, parent, token_ids = event["block_hashes"], event["parent_block_hash"], event["token_ids"]
        root = self._root(event) if parent is None else self.digests.get(parent)
        if root is None or event["block_size"] != self.block_size or len(token_ids) != len(names) * self.block_size:
            self.num_skipped += len(names)
            return []
        num_text = _num_text_blocks(event)
        self.num_skipped += len(names) - num_text
        if token_ids and isinstance(token_ids[0], list):
            token_ids = [first for first, _ in token_ids]
        digests = block_digests(root, token_ids[: num_text * self.block_size], self.block_size)
        self.digests.update(zip(names, digests, strict=False))
        return digests

    def _root(self, event: dict[str, Any]) -> bytes:
        """Root of a chain. As in vLLM, the adapter and the salt in the first block's extra keys make chains differ."""
        adapter = event.get("lora_name") or ""
        salt = event.get("cache_salt") or next(iter(_extra_keys(event, 0)), "")
        return root_digest(self.namespace, cache_salt=salt if isinstance(salt, str) else "", lora=adapter)


class KvEventFeed:
    """Subscribes to one engine's events, requests a replay of missed ones, and passes them on in order."""

    def __init__(
        self,
        context: Context,
        endpoint: str,
        replay_endpoint: str,
        on_batch: Callable[[list[dict[str, Any]], bool], None],
    ) -> None:
        """`on_batch` gets the events of a batch, and whether events before it are lost for good."""
        self._context = context
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._on_batch = on_batch
        self._next = 0  # sequence number of the next batch
        self._last_published = -1  # latest number from the publisher itself; its numbers only grow
        self.num_gaps = 0  # gaps that no replay filled

    async def run(self) -> None:
        """Follow the engine until cancelled."""
        socket = self._context.socket(SocketType.SUB)
        socket.rcvhwm = 0
        socket.subscribe(b"")
        try:
            socket.connect(self._endpoint)
            await self._replay(0)  # blocks that were cached before we subscribed
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3:
                    await self._on_message(int.from_bytes(frames[1], "big"), frames[2])
        finally:
            socket.close(linger=0)

    async def _on_message(self, number: int, payload: bytes) -> None:
        if number <= self._last_published:  # the numbers restarted, so the engine did
            self._next = 0
            self._on_batch([], True)
        self._last_published = number
        if number > self._next:
            await self._replay(self._next)
        if number >= self._next:  # otherwise the replay contained it
            self._take(number, payload, is_lost=number > self._next)

    def _take(self, number: int, payload: bytes, *, is_lost: bool) -> None:
        try:
            events = decode_batch(payload)
        except (msgspec.DecodeError, RecursionError) as exc:
            logger.warning("%s sent a message that is not a batch of KV events: %s", self._endpoint, exc)
            is_lost, events = True, []
        self.num_gaps += is_lost
        self._next = number + 1
        self._on_batch(events, is_lost)

    async def _replay(self, first: int) -> None:
        """Read the batches from this number on that the engine still has. Without an answer nothing changes."""
        if not self._replay_endpoint:
            return
        socket = self._context.socket(SocketType.DEALER)
        try:
            socket.connect(self._replay_endpoint)
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                await self._take_replayed(socket)
        except (TimeoutError, ZMQError) as exc:
            logger.warning("%s replayed no KV events: %s", self._replay_endpoint, exc or "no answer in time")
        finally:
            socket.close(linger=0)

    async def _take_replayed(self, socket: Socket) -> None:
        while True:
            # [b"", topic, number, payload]; older versions leave out the topic
            *_, number_bytes, payload = await socket.recv_multipart()
            number = int.from_bytes(number_bytes, "big")
            if number == _END:
                return
            if number >= self._next:
                self._take(number, payload, is_lost=number > self._next)


def _num_text_blocks(event: dict[str, Any]) -> int:
    """Number of leading blocks whose KV depends only on tokens, adapter and salt.

    The others have more extra keys: `[hash, offset]` of an image in the block, or the hash of embeddings given instead
    of tokens. Their token ids are placeholders that any text may contain, so they get no digests. Without a digest, no
    later block of their chain gets one either.
    """
    num_blocks = len(event["block_hashes"])
    has_salt = event["parent_block_hash"] is None  # vLLM puts it into the first block only
    for i in range(min(num_blocks, len(event.get("extra_keys") or ()))):
        keys = _extra_keys(event, i)
        if keys and not (has_salt and i == 0 and len(keys) == 1 and isinstance(keys[0], str)):
            return i
    return num_blocks


def _extra_keys(event: dict[str, Any], i: int) -> Sequence[Any]:
    """The extra keys of an event's block, without the adapter, which comes first."""
    keys = (event.get("extra_keys") or ())[i : i + 1]
    found = (keys[0] if keys else None) or ()
    adapter = event.get("lora_name")
    return found[1:] if adapter and found[:1] == [adapter] else found


def _as_map(event: Any) -> dict[str, Any]:
    if isinstance(event, dict) and isinstance(event.get("type"), str):
        return event
    if isinstance(event, list) and event and event[0] in _FIELDS:
        return {"type": event[0], **dict(zip(_FIELDS[event[0]], event[1:], strict=False))}
    raise msgspec.DecodeError("an event is a map with a type, or an array that begins with it")
