"""KV events of vLLM and SGLang: from the messages of their ZMQ publishers to the digests of our prefix index.

An engine identifies blocks by its own hashes. Its events contain the tokens too, so our digests are computed from them.
A map from its hashes to our digests continues the chains and resolves removals. SGLang's events are vLLM's with two
differences: the salt is a field of its own, and under speculative decoding a token is a pair of two neighbours.

Events of vLLM's offloading connector name another medium than the GPU. They never have the salt, and may have no tokens
(`kv_connector/v1/offloading/events.py` of 0.32), so nothing is computed from them: they say where a hash is, and events
of the GPU say what it stands for. Those of SGLang's host memory are like those of its GPU (`mem_cache/events.py` of
0.5.23), several pages in one; it announces nothing of its disk.

    PUB     [topic, sequence number (8 bytes, big endian), msgpack [timestamp, [event, ...], data parallel rank]]
    ROUTER  asked with [b"", first sequence number]: sends the batches it still has, then sequence number -1
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from zmq.asyncio import Context, Socket
from zmq.constants import SocketType
from zmq.error import ZMQError

from tandem.protocol.decoding import safe_decoder
from tandem.protocol.digest import block_digests, root_digest
from tandem.protocol.messages import DISK_TIER, HOST_TIER, POOL_PLACE

logger = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 5.0
MAX_MESSAGE_BYTES = 4 * 1024 * 1024  # ZMQ drops the connection of one who sends more
LONG_MESSAGE_BYTES = 64 * 1024  # one such message takes milliseconds
MAX_BYTES_PER_S = 32 * 1024 * 1024  # of long messages: a third of what could be read if there were nothing else
MAX_QUEUED = 64  # messages that wait in our socket; more wait with the engine
MAX_EVENTS = 1 << 18  # of a message
MAX_FIELDS = 32  # of an event
MAX_EVENT_TOKENS = 1 << 19
MAX_FIELD_BYTES = 256 * 1024  # of another field than tokens and blocks
MAX_BLOCKS = 1 << 21  # in a place of an engine; more are not followed
PIECE_BLOCKS = 256  # blocks that are indexed before other work gets its turn
MAX_TYPE_BYTES = 64
MAX_FLAW_CHARS = 200
_NUMBER_BYTES = 8
_END = (1 << 64) - 1  # -1 as vLLM writes it
_ARRAYS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))  # first bytes of arrays in MessagePack
_FIELDS = {  # of events that are arrays; older versions of vLLM send arrays, newer ones send maps
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                    "extra_keys", "group_idx"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip

_POOL_MEDIA = (None, "GPU", "gpu")
_SGLANG_HOST = "CPU_PINNED"
_COMPLETE_MEDIA = (*_POOL_MEDIA, _SGLANG_HOST)  # whose events say all that a block's KV depends on
_PLACES = dict.fromkeys(_POOL_MEDIA, POOL_PLACE) | {"CPU": HOST_TIER, _SGLANG_HOST: HOST_TIER, "STORAGE": DISK_TIER}

BlockHash = bytes | int
Last = dict[str, dict[bytes, bool]]  # by place: the digests that events changed, and whether they are held now


class PlaceChange(NamedTuple):
    """The change that events make to the blocks of one place, in our digests."""

    stored: list[bytes]
    removed: list[bytes]


class BlockChange(NamedTuple):
    """The change that events make, by place. `flaw`: why events are malformed; then all blocks are gone."""

    places: dict[str, PlaceChange]  # those that changed
    flaw: str = ""


class _Batch(msgspec.Struct, array_like=True):
    """What is left of a message is not read."""

    timestamp: msgspec.Raw
    events: Annotated[list[msgspec.Raw], Meta(max_length=MAX_EVENTS)]


# A byte of a message may stand for an empty map of 64 bytes. So only lists of numbers and names may be long.
_batch_of = safe_decoder(_Batch)
_fields_of = safe_decoder(Annotated[dict[str, msgspec.Raw], Meta(max_length=MAX_FIELDS)])
_values_of = safe_decoder(Annotated[list[msgspec.Raw], Meta(max_length=MAX_FIELDS)])
_long_fields = {
    "token_ids": safe_decoder(Annotated[list[int | tuple[int, int]], Meta(max_length=MAX_EVENT_TOKENS)]),
    "block_hashes": safe_decoder(Annotated[list[bytes | int], Meta(max_length=MAX_EVENT_TOKENS)]),
}
_any_of = safe_decoder(Any)
_NIL = msgspec.Raw(b"\xc0")


def decode_batch(payload: bytes) -> list[msgspec.Raw]:
    """The events of one message, each for `decode_event`. Raises `msgspec.DecodeError` for anything else."""
    batch: _Batch = _batch_of(payload)
    return batch.events


def decode_event(event: msgspec.Raw) -> dict[str, Any]:
    """An event as a map with a `type`; fields that no event has are None. Raises `msgspec.DecodeError`."""
    is_array = memoryview(event)[0] in _ARRAYS
    fields = _named_values(event) if is_array else _map_of(event)
    return {name: _field(name, value) for name, value in fields.items()}


def pieces_of(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same event as several ones of at most `PIECE_BLOCKS` blocks, so that none takes long."""
    names, is_stored = event.get("block_hashes") or (), event["type"] == "BlockStored"
    if len(names) <= PIECE_BLOCKS or (is_stored and not _is_consistent(event)):
        yield event  # if it cannot be cut, it is skipped or malformed
        return
    for first in range(0, len(names), PIECE_BLOCKS):
        end = first + PIECE_BLOCKS
        piece = event | {"block_hashes": names[first:end]}
        if is_stored:
            size = event["block_size"]
            piece["token_ids"] = event["token_ids"][first * size : end * size]
            piece["extra_keys"] = (event.get("extra_keys") or ())[first:end]
            piece["parent_block_hash"] = names[first - 1] if first else event["parent_block_hash"]
        yield piece


def _is_consistent(event: dict[str, Any]) -> bool:
    """Whether a long event has what it takes to be cut. A chunk in a tier is one thing, whatever its length."""
    size, token_ids = event.get("block_size"), event.get("token_ids")
    return (
        event.get("medium") in _COMPLETE_MEDIA
        and isinstance(token_ids, list)
        and type(size) is int
        and len(token_ids) == len(event["block_hashes"]) * size
        and isinstance(event.get("extra_keys"), list | None)
        and "parent_block_hash" in event
    )


@dataclass(slots=True)
class BlockTranslator:
    """Translates one engine's events. Pure: events in, changes of the prefix index out.

    At any time the index has, of each place, the digests of the hashes that are `held` there and known.
    """

    namespace: bytes
    block_size: int
    digests: dict[BlockHash, bytes] = field(default_factory=dict)  # of the hashes that some place holds
    held: dict[str, set[BlockHash]] = field(default_factory=lambda: {place: set() for place in _PLACES.values()})
    twins: dict[bytes, set[BlockHash]] = field(default_factory=dict)  # hashes of SGLang's pairs by their digest
    num_skipped: int = 0  # blocks of another size, that are not plain text, with an unknown parent, or in a chunk

    def apply(self, events: Sequence[dict[str, Any]]) -> BlockChange:
        """Translate events. If one of them is malformed, nothing is known about any block."""
        # A block may be stored and removed several times: only the last event counts.
        last: Last = {place: {} for place in self.held}
        flaw = ""
        try:
            for event in events:
                self._apply(event, last)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
            flaw = repr(exc)[:MAX_FLAW_CHARS]
            self._clear(last)
        return BlockChange({place: _change(changed) for place, changed in last.items() if changed}, flaw)

    def _apply(self, event: dict[str, Any], last: Last) -> None:
        if event["type"] == "AllBlocksCleared":
            self._clear(last)
            return
        place = _PLACES.get(event.get("medium"))
        if place is None or event.get("group_idx"):
            return  # a medium that we do not know, or layers without full attention
        if event["type"] == "BlockRemoved":
            self._remove(place, event["block_hashes"], last)
        elif event["type"] == "BlockStored":
            store = self._store if event.get("medium") in _COMPLETE_MEDIA else self._offload
            store(event, place, last)

    def _clear(self, last: Last) -> None:
        """NOTE: vLLM's event of this kind names no medium, and none other says that its host memory was cleared."""
        for place, names in self.held.items():
            gone = (self.digests[name] for name in names if name in self.digests)
            last[place] |= dict.fromkeys(last[place], False) | dict.fromkeys(gone, False)
            names.clear()
        self.digests.clear()
        self.twins.clear()

    def _remove(self, place: str, names: Sequence[BlockHash], last: Last) -> None:
        """A digest is known as long as any place holds its hash."""
        for name in names:
            if name not in self.held[place]:
                continue
            self.held[place].remove(name)
            digest = self.digests.get(name)
            if digest is not None and not self._has_twin(digest, place):
                last[place][digest] = False
            if not any(name in held for held in self.held.values()):
                self._forget(name)

    def _offload(self, event: dict[str, Any], place: str, last: Last) -> None:
        """A tier got a block. Its hash may become known later: KV that is loaded from a disk of an earlier life."""
        names, held = event["block_hashes"], self.held[place]
        # Only whole chunks are loaded: a prompt that has a part of one gets nothing (vllm#57159).
        is_chunk = len(names) > 1
        if is_chunk or len(held) + len(names) > MAX_BLOCKS:
            self.num_skipped += len(names)
            return
        held |= set(names)
        last[place] |= dict.fromkeys((self.digests[name] for name in names if name in self.digests), True)

    def _store(self, event: dict[str, Any], place: str, last: Last) -> None:
        names, parent, token_ids = event["block_hashes"], event["parent_block_hash"], event["token_ids"]
        root = self._root(event) if parent is None else self.digests.get(parent)
        is_known = root is not None and event["block_size"] == self.block_size
        has_room = len(self.held[place]) + len(names) <= MAX_BLOCKS
        if not (is_known and has_room) or root is None or len(token_ids) != len(names) * self.block_size:
            self.num_skipped += len(names)
            return
        num_text = _num_text_blocks(event)
        self.num_skipped += len(names) - num_text
        has_pairs = bool(token_ids) and not isinstance(token_ids[0], int)
        if has_pairs:
            token_ids = [first for first, _ in token_ids]
        digests = block_digests(root, token_ids[: num_text * self.block_size], self.block_size)
        self.held[place] |= set(names[:num_text])
        for name, digest in zip(names, digests, strict=False):
            self._learn(name, digest, last)
            if has_pairs:  # the token behind a block is in its hash, and not in our digest
                self.twins.setdefault(digest, set()).add(name)

    def _learn(self, name: BlockHash, digest: bytes, last: Last) -> None:
        """Note what a hash stands for, wherever it is held."""
        former = self.digests.get(name, digest)
        if former != digest:
            self._forget(name)
        self.digests[name] = digest
        for place, held in self.held.items():
            if name in held:
                if former != digest and not self._has_twin(former, place):
                    last[place][former] = False
                last[place][digest] = True

    def _forget(self, name: BlockHash) -> None:
        """Its twin, if it has one, stays."""
        digest = self.digests.pop(name, b"")
        if names := self.twins.get(digest):
            names.discard(name)
            if not names:
                del self.twins[digest]

    def _has_twin(self, digest: bytes, place: str) -> bool:
        """Whether a place holds a block of this digest under another hash than the one that it has just given up."""
        return any(name in self.held[place] for name in self.twins.get(digest, ()))

    def _root(self, event: dict[str, Any]) -> bytes:
        """Root of a chain. As in vLLM, the adapter and the salt in the first block's extra keys make chains differ."""
        adapter = event.get("lora_name") or ""
        salt = event.get("cache_salt") or next(iter(_extra_keys(event, 0)), "")
        return root_digest(self.namespace, cache_salt=salt if isinstance(salt, str) else "", lora=adapter)


def _change(changed: dict[bytes, bool]) -> PlaceChange:
    stored = [digest for digest, is_held in changed.items() if is_held]
    return PlaceChange(stored, [digest for digest, is_held in changed.items() if not is_held])


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
        self._has_warned = False
        self.num_gaps = 0  # gaps that no replay filled

    async def run(self) -> None:
        """Follow the engine until cancelled."""
        socket = self._socket(SocketType.SUB)
        socket.subscribe(b"")
        try:
            socket.connect(self._endpoint)
            await self._replay(0)  # blocks that were cached before we subscribed
            while True:
                frames = await socket.recv_multipart()
                if len(frames) == 3 and len(frames[1]) == _NUMBER_BYTES:
                    await self._on_message(int.from_bytes(frames[1], "big"), frames[2])
                await _turn(len(frames[-1]))
        finally:
            socket.close(linger=0)

    def _socket(self, kind: SocketType) -> Socket:
        socket = self._context.socket(kind)
        socket.rcvhwm = MAX_QUEUED
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        return socket

    async def _on_message(self, number: int, payload: bytes) -> None:
        if number <= self._last_published:  # the numbers restarted, so the engine did
            self._next = 0
            self._on_batch([], True)
        self._last_published = number
        if number > self._next:
            await self._replay(self._next)
        if number >= self._next:  # otherwise the replay contained it
            await self._take(number, payload, is_lost=number > self._next)

    async def _take(self, number: int, payload: bytes, *, is_lost: bool) -> None:
        """Pass a batch on, a few blocks in each iteration of the event loop."""
        self._next = min(number + 1, _END)
        try:
            groups = _groups(decode_batch(payload))
            first = next(groups, [])
            self.num_gaps += is_lost
            self._on_batch(first, is_lost)
            for group in groups:
                await asyncio.sleep(0)
                self._on_batch(group, False)
        except msgspec.DecodeError as exc:
            log = logger.debug if self._has_warned else logger.warning
            log("%s sent a message that is not a batch of KV events: %s", self._endpoint, exc)
            self._has_warned = True
            self.num_gaps += 1
            self._on_batch([], True)

    async def _replay(self, first: int) -> None:
        """Read the batches from this number on that the engine still has. Without an answer nothing changes."""
        if not self._replay_endpoint:
            return
        socket = self._socket(SocketType.DEALER)
        try:
            socket.connect(self._replay_endpoint)
            async with asyncio.timeout(REPLAY_TIMEOUT_S):
                await socket.send_multipart([b"", first.to_bytes(_NUMBER_BYTES, "big")])
                await self._take_replayed(socket)
        except (TimeoutError, ZMQError) as exc:
            logger.warning("%s replayed no KV events: %s", self._replay_endpoint, exc or "no answer in time")
        finally:
            socket.close(linger=0)

    async def _take_replayed(self, socket: Socket) -> None:
        while True:
            # [b"", topic, number, payload]; older versions leave out the topic
            *_, number_bytes, payload = [b"", *await socket.recv_multipart()]
            number = int.from_bytes(number_bytes[:_NUMBER_BYTES], "big")
            if number == _END:
                return
            if number >= self._next:
                await self._take(number, payload, is_lost=number > self._next)
            await _turn(len(payload))


async def _turn(num_bytes: int) -> None:
    """Let others run. NOTE: receiving does not wait while there are messages, and a long one takes long to read."""
    await asyncio.sleep(num_bytes / MAX_BYTES_PER_S if num_bytes > LONG_MESSAGE_BYTES else 0)


def _groups(events: Sequence[msgspec.Raw]) -> Iterator[list[dict[str, Any]]]:
    """The events in groups of `PIECE_BLOCKS` blocks or a little more."""
    group: list[dict[str, Any]] = []
    num_blocks = 0
    for raw in events:
        for event in pieces_of(decode_event(raw)):
            group.append(event)
            num_blocks += 1 + len(event.get("block_hashes") or ())
            if num_blocks >= PIECE_BLOCKS:
                yield group
                group, num_blocks = [], 0
    if group:
        yield group


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


def _map_of(event: msgspec.Raw) -> dict[str, msgspec.Raw]:
    fields: dict[str, msgspec.Raw] = _fields_of(event)
    if not _type_of(fields.get("type", _NIL)):
        raise msgspec.DecodeError("an event is a map with a type, or an array that begins with it")
    return fields


def _named_values(event: msgspec.Raw) -> dict[str, msgspec.Raw]:
    kind, *values = _values_of(event) or [_NIL]
    names = _FIELDS.get(_type_of(kind))
    if names is None:
        raise msgspec.DecodeError("an event is a map with a type, or an array that begins with it")
    return {"type": kind, **dict(zip(names, values, strict=False))}


def _type_of(value: msgspec.Raw) -> str:
    found = _any_of(value) if len(value) <= MAX_TYPE_BYTES else None
    return found if isinstance(found, str) else ""


def _field(name: str, value: msgspec.Raw) -> Any:
    try:
        if name in _long_fields:
            return _long_fields[name](value)
        return _any_of(value) if len(value) <= MAX_FIELD_BYTES else None
    except msgspec.DecodeError:
        return None  # which no event has: it counts as malformed
