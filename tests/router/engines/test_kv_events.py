from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zmq.asyncio import Context

from tandem.protocol.digest import block_digests, root_digest
from tandem.protocol.messages import DISK_TIER, HOST_TIER, POOL_PLACE
from tandem.router.engines import kv_events
from tandem.router.engines.kv_events import (
    MAX_EVENT_TOKENS,
    MAX_EVENTS,
    MAX_FIELD_BYTES,
    MAX_FIELDS,
    PIECE_BLOCKS,
    BlockTranslator,
    KvEventFeed,
    PlaceChange,
    decode_batch,
    decode_event,
    pieces_of,
)
from tests.support.event_loop import Turns
from tests.support.kv_event_publisher import IDS, Publisher, evicted, name, offloaded, pack, removed, stored
from tests.support.waiting import eventually

NAMESPACE = b"n" * 16
ROOT = root_digest(NAMESPACE)
CLEARED = {"type": "AllBlocksCleared"}


def decoded(payload: bytes) -> list[dict[str, Any]]:
    return [decode_event(event) for event in decode_batch(payload)]


class PoolTranslator(BlockTranslator):
    """A translator of which only the changes of the pool are looked at."""

    def pool(self, events: list[dict[str, Any]]) -> PlaceChange:
        return self.apply(events).places.get(POOL_PLACE, PlaceChange([], []))


def make_translator() -> PoolTranslator:
    return PoolTranslator(NAMESPACE, 16)


def test_digests_are_those_of_the_prompt_however_it_is_cut() -> None:
    expected = block_digests(ROOT, IDS, 16)
    assert make_translator().pool([stored(0, 4)]).stored == expected
    pieces = make_translator()
    assert [*pieces.pool([stored(0, 1)]).stored, *pieces.pool([stored(1, 2), stored(3, 1)]).stored] == expected


def test_removed_and_cleared_blocks() -> None:
    translator = make_translator()
    digests = translator.pool([stored(0, 4)]).stored
    assert translator.pool([removed(3, 2, 77)]) == ([], [digests[3], digests[2]])
    assert translator.pool([removed(3)]) == ([], [])
    assert translator.pool([CLEARED, stored(0, 1)]) == (digests[:1], digests[1:2])
    assert len(translator.digests) == 1


def test_only_the_last_event_of_a_block_in_a_batch_counts() -> None:
    translator = make_translator()
    first = translator.pool([stored(0, 1), removed(0), stored(0, 1)])
    assert (first.stored, first.removed) == (block_digests(ROOT, IDS[:16], 16), [])
    gone = translator.pool([removed(0), stored(0, 1), removed(0)])
    assert (gone.stored, gone.removed) == ([], first.stored)


def test_salt_and_adapter_keep_chains_apart() -> None:
    salted = make_translator().pool([stored(0, 1, extra_keys=[["tenant"]])]).stored
    assert salted == block_digests(root_digest(NAMESPACE, cache_salt="tenant"), IDS[:16], 16)
    adapted = make_translator().pool([stored(0, 1, lora_name="sql", extra_keys=[["sql", "tenant"]])]).stored
    assert adapted == block_digests(root_digest(NAMESPACE, cache_salt="tenant", lora="sql"), IDS[:16], 16)


def test_sglangs_events_name_the_salt_and_may_pair_neighbouring_tokens() -> None:
    salted = make_translator().pool([stored(0, 1, cache_salt="tenant", session_id=None)]).stored
    assert salted == block_digests(root_digest(NAMESPACE, cache_salt="tenant"), IDS[:16], 16)
    pairs = [[token, IDS[i + 1]] for i, token in enumerate(IDS[:32])]
    assert make_translator().pool([stored(0, 2, token_ids=pairs)]).stored == block_digests(ROOT, IDS[:32], 16)
    assert make_translator().pool([stored(0, 1, medium="CPU_PINNED")]).stored == []


IMAGE = ["7f00cafe", 3]  # hash of an image, and its offset in the block


@pytest.mark.parametrize(
    ("extra_keys", "num_text"),
    [
        ([None, None, None, None], 4),
        ([None, None, [IMAGE], [IMAGE]], 2),
        ([None, ["7f00cafe"], None, None], 1),  # as older versions name an image
        ([[IMAGE], None, None, None], 0),
        ([[IMAGE, "salt"], None, None, None], 0),
        ([["7f00cafe", "salt"], None, None, None], 0),
        ([[b"digest of embeddings"], None, None, None], 0),
        ([None, [IMAGE], None, None], 1),  # the blocks after the image depend on it too
        ([[5], [5], [5], [5]], 0),  # an adapter that the event does not name
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_blocks_of_more_than_text_get_no_digest(extra_keys: list[Any], num_text: int, is_whole: bool) -> None:
    translator = make_translator()
    if is_whole:
        events = [stored(0, 4, extra_keys=extra_keys)]
    else:
        events = [stored(i, 1, extra_keys=[extra_keys[i]]) for i in range(4)]
    assert translator.pool(events).stored == block_digests(ROOT, IDS[: num_text * 16], 16)
    assert translator.pool([removed(3, 2, 1, 0)]).removed == block_digests(ROOT, IDS[: num_text * 16], 16)[::-1]


@pytest.mark.parametrize("salt", ["tenant", "sql"])
def test_each_block_of_an_adapter_has_its_name(salt: str) -> None:
    extra_keys = [["sql", salt], ["sql"], ["sql", IMAGE], ["sql"]]
    digests = make_translator().pool([stored(0, 4, lora_name="sql", extra_keys=extra_keys)]).stored
    assert digests == block_digests(root_digest(NAMESPACE, cache_salt=salt, lora="sql"), IDS[:32], 16)


@pytest.mark.parametrize(
    "event",
    [stored(1, 2), stored(0, 1, medium="CPU"), stored(0, 1, group_idx=1), stored(0, 1, block_size=32)],
    ids=["parent unknown", "other tier", "other group", "other size"],
)
def test_blocks_that_cannot_be_prefixes_here_are_skipped(event: dict[str, Any]) -> None:
    assert make_translator().pool([event]) == ([], [])


def test_events_of_older_versions_are_arrays() -> None:
    arrays = [["BlockStored", [name(0)], None, IDS[:16], 16, None, "GPU"], ["BlockRemoved", [name(0)]]]
    maps = decoded(pack(*arrays, ["AllBlocksCleared"]))
    assert [event["type"] for event in maps] == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    assert make_translator().pool(maps[:1]).stored == block_digests(ROOT, IDS[:16], 16)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", msgspec.msgpack.encode({}), pack("text"), pack(["Unknown"])],
    ids=["nothing", "no msgpack", "a map", "a text", "an unknown event"],
)
def test_other_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decoded(payload)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 3)), max_size=30))
def test_the_changes_add_up_to_what_the_engine_holds(steps: list[tuple[bool, int, int]]) -> None:
    """An engine that extends chains and evicts any blocks: the changes add up to what it holds."""
    translator, engine, ours = make_translator(), set[int](), set[bytes]()
    digests = block_digests(ROOT, IDS, 16)
    for is_store, first, count in steps:
        if is_store:
            if first and first - 1 not in engine:
                continue
            numbers = range(first, min(first + count, 4))
            event = stored(first, len(numbers))
            engine |= set(numbers)
        else:
            engine.discard(first)
            event = removed(first)
        change = translator.pool([event])
        ours = (ours | set(change.stored)) - set(change.removed)
        assert ours == {digests[number] for number in engine}


# -- tiers of vLLM's offloading connector

DIGESTS = block_digests(ROOT, IDS, 16)
PLACES = (POOL_PLACE, HOST_TIER, DISK_TIER)


class Mirror:
    """What an index that follows a translator has, by place."""

    def __init__(self) -> None:
        self.translator = make_translator()
        self.places: dict[str, set[bytes]] = {place: set() for place in PLACES}

    def apply(self, *events: dict[str, Any]) -> tuple[int, ...]:
        """Returns how many blocks it has in pool, host memory and disk."""
        for place, change in self.translator.apply(events).places.items():
            assert not set(change.stored) & set(change.removed)
            self.places[place] = (self.places[place] | set(change.stored)) - set(change.removed)
        return tuple(len(self.places[place]) for place in PLACES)


def test_a_hash_is_known_until_its_last_place_gives_it_up() -> None:
    mirror = Mirror()
    assert mirror.apply(stored(0, 4), *[offloaded(i) for i in range(4)]) == (4, 4, 0)
    assert mirror.apply(*[offloaded(i, medium="STORAGE") for i in range(4)]) == (4, 4, 4)
    assert mirror.apply(removed(3, 2, 1, 0)) == (0, 4, 4)
    assert mirror.places[HOST_TIER] == mirror.places[DISK_TIER] == set(DIGESTS)
    assert mirror.apply(evicted(3, 2)) == (0, 2, 4)
    assert mirror.apply(offloaded(2)) == (0, 3, 4)  # promoted from the disk
    assert mirror.apply(evicted(2, 1, 0), evicted(0, 1, 2, 3, medium="STORAGE")) == (0, 0, 0)
    assert mirror.translator.digests == {}
    assert mirror.apply(offloaded(1, is_described=False)) == (0, 0, 0)  # nobody knows its content any more


def test_nothing_is_computed_from_an_event_without_a_salt() -> None:
    """The tokens are there, but another tenant's blocks of the same tokens are others."""
    mirror = Mirror()
    assert mirror.apply(*[offloaded(i) for i in range(4)]) == (0, 0, 0)
    assert mirror.apply(stored(0, 2, extra_keys=[["tenant"], None])) == (2, 2, 0)
    assert mirror.places[HOST_TIER] == set(block_digests(root_digest(NAMESPACE, cache_salt="tenant"), IDS[:32], 16))


@pytest.mark.parametrize("is_described", [True, False])
def test_a_block_that_is_promoted_from_an_earlier_life_counts_once_it_is_in_the_pool(is_described: bool) -> None:
    mirror = Mirror()
    assert mirror.apply(*[offloaded(i, is_described=is_described) for i in range(2)]) == (0, 0, 0)
    assert mirror.apply(stored(0, 3)) == (3, 2, 0)
    assert mirror.apply(removed(0, 1, 2)) == (0, 2, 0)


def test_blocks_of_images_in_a_tier_stay_unknown() -> None:
    mirror = Mirror()
    assert mirror.apply(stored(0, 4, extra_keys=[None, [IMAGE], None, None]), offloaded(0), offloaded(1)) == (1, 1, 0)


def test_a_chunk_of_several_blocks_promises_nothing() -> None:
    """vLLM loads whole chunks, so a prompt that has a part of one gets none of it."""
    mirror = Mirror()
    assert mirror.apply(stored(0, 4), offloaded(0, 2), offloaded(2, 2)) == (4, 0, 0)
    assert mirror.translator.num_skipped == 4
    assert mirror.apply(evicted(0, 1, 2, 3), removed(0, 1, 2, 3)) == (0, 0, 0)
    assert mirror.translator.digests == {}


def test_a_long_chunk_is_not_cut_into_pieces_of_which_one_would_count() -> None:
    translator = make_translator()
    event = long_event(PIECE_BLOCKS + 1)
    for piece in pieces_of(event):
        translator.apply([piece])
    for piece in pieces_of(event | {"medium": "CPU"}):
        assert translator.apply([piece]).places == {}
    assert (len(translator.held[POOL_PLACE]), len(translator.held[HOST_TIER])) == (PIECE_BLOCKS + 1, 0)
    gone = [translator.apply([piece]) for piece in pieces_of(evicted(*range(PIECE_BLOCKS + 1)))]
    assert [change.places for change in gone] == [{}, {}]


def test_pages_in_sglangs_host_memory_count_one_by_one_and_say_all_that_they_are() -> None:
    """Recorded from `KVCacheEventRecorder` of 0.5.23: neighbours are one event, and the salt is a field."""
    mirror = Mirror()
    host, salted = {"medium": "CPU_PINNED"}, {"cache_salt": "tenant"}
    assert mirror.apply(stored(0, 4), stored(0, 4, **host)) == (4, 4, 0)
    assert mirror.apply(removed(3, 2, 1, 0)) == (0, 4, 0)
    assert mirror.apply(stored(0, 2)) == (2, 4, 0)  # loaded back
    assert mirror.apply(removed(1, 0), removed(3, 2, 1, 0) | host) == (0, 0, 0)
    assert mirror.translator.digests == {}

    # A router that begins later hears of host memory alone.
    assert mirror.apply(stored(0, 2, **host, **salted), stored(2, 2, **host, **salted)) == (0, 4, 0)
    assert mirror.places[HOST_TIER] == set(block_digests(root_digest(NAMESPACE, cache_salt="tenant"), IDS, 16))
    assert mirror.apply(stored(9, 1, **host), stored(0, 2, medium="EXTERNAL")) == (0, 4, 0)


def test_many_pages_of_sglangs_host_memory_in_one_event_are_taken_in_pieces() -> None:
    translator = make_translator()
    for piece in pieces_of(long_event(PIECE_BLOCKS + 1) | {"medium": "CPU_PINNED"}):
        translator.apply([piece])
    assert len(translator.held[HOST_TIER]) == PIECE_BLOCKS + 1


def test_two_hashes_of_a_digest_count_until_both_are_gone() -> None:
    """With pairs, a page's hash contains the token behind it, which our digest does not."""
    mirror = Mirror()
    pairs = [list(pair) for pair in itertools.pairwise(IDS[:17])]
    first = stored(0, 1, token_ids=pairs)
    second = stored(0, 1, block_hashes=[b"other"], token_ids=[*pairs[:-1], [IDS[15], 7]])
    other = removed(0) | {"block_hashes": [b"other"]}
    assert mirror.apply(first, second) == (1, 0, 0)
    assert mirror.apply(removed(0)) == (1, 0, 0)
    assert mirror.apply(first, other) == (1, 0, 0)
    assert mirror.apply(second, stored(0, 1, token_ids=[[5, 5]] * 16)) == (
        2,
        0,
        0,
    )  # renamed
    assert mirror.apply(removed(0), other) == (0, 0, 0)
    assert mirror.translator.twins == {}


def test_a_cleared_cache_leaves_nothing_in_any_place() -> None:
    mirror = Mirror()
    assert mirror.apply(stored(0, 4), offloaded(0), offloaded(1, medium="STORAGE")) == (4, 1, 1)
    assert mirror.apply(offloaded(2), CLEARED, stored(0, 1)) == (1, 0, 0)
    assert mirror.apply(evicted(0, 1, 2)) == (1, 0, 0)


def test_a_malformed_event_of_a_tier_leaves_nothing_in_any_place() -> None:
    for wrong in ({"block_hashes": None}, {"block_hashes": [[1]]}, {"medium": ["CPU"]}):
        mirror = Mirror()
        assert mirror.apply(stored(0, 4), offloaded(0), offloaded(1, medium="STORAGE")) == (4, 1, 1)
        assert mirror.apply(offloaded(2) | wrong, offloaded(3)) == (0, 0, 0)


def test_a_name_that_gets_other_tokens_changes_in_every_place() -> None:
    mirror = Mirror()
    mirror.apply(stored(0, 1), offloaded(0))
    assert mirror.apply(stored(0, 1, token_ids=IDS[16:32])) == (1, 1, 0)
    assert mirror.places[POOL_PLACE] == mirror.places[HOST_TIER] == set(block_digests(ROOT, IDS[16:32], 16))


def test_a_tier_without_end_takes_no_room_from_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_BLOCKS", 2)
    mirror = Mirror()
    strangers = [stored(0, 0, block_hashes=[b"%d" % i], medium="STORAGE") for i in range(5)]
    assert mirror.apply(*strangers, stored(0, 2), offloaded(0)) == (2, 1, 0)
    assert [len(mirror.translator.held[place]) for place in PLACES] == [2, 1, 2]
    assert mirror.translator.num_skipped == 3


_NAMES = st.integers(0, 3)
_STEPS = st.one_of(
    st.tuples(st.just("compute"), _NAMES),
    st.tuples(st.just("evict"), _NAMES),
    st.tuples(st.sampled_from(["CPU", "STORAGE"]), _NAMES),
    st.tuples(st.sampled_from(["-CPU", "-STORAGE"]), _NAMES),
    st.tuples(st.just("clear"), st.just(0)),
)


@given(st.lists(st.lists(_STEPS, max_size=4), max_size=20), st.booleans())
def test_each_place_has_what_the_engine_says_of_hashes_that_are_known(
    batches: list[list[tuple[str, int]]], is_described: bool
) -> None:
    """A naive model: sets of numbers, of which those are known that the pool had since they were last nowhere."""
    mirror, known = Mirror(), set[int]()
    places: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
    for batch in batches:
        events: list[dict[str, Any]] = []
        for action, number in batch:
            medium = action.lstrip("-")
            if action == "compute":
                events.append(stored(number, 1))
                if number == 0 or number - 1 in known:
                    known.add(number)
                    places["GPU"].add(number)
            elif action == "clear":
                events.append(CLEARED)
                known.clear()
                for held in places.values():
                    held.clear()
            elif action == "evict" or action.startswith("-"):
                medium = "GPU" if action == "evict" else medium
                events.append(evicted(number, medium=medium))
                places[medium].discard(number)
            else:
                events.append(offloaded(number, medium=medium, is_described=is_described))
                places[medium].add(number)
            known &= set.union(*places.values())
        mirror.apply(*events)
        expected = [{DIGESTS[i] for i in held & known} for held in places.values()]
        assert [mirror.places[place] for place in PLACES] == expected


class Heard(list[tuple[list[Any], bool]]):
    """Collects the batches of a feed."""

    def take(self, events: list[dict[str, Any]], is_lost: bool) -> None:
        self.append(([event["type"] for event in events], is_lost))

    @property
    def num_blocks(self) -> int:
        return sum(types.count("BlockStored") for types, _ in self)


@asynccontextmanager
async def feeding(*, has_replay: bool = True, **options: Any) -> AsyncIterator[tuple[Publisher, KvEventFeed, Heard]]:
    context = Context()
    publisher, heard = Publisher(context, **options), Heard()
    replay = f"tcp://127.0.0.1:{publisher.replay_port}" if has_replay else ""
    feed = KvEventFeed(context, f"tcp://127.0.0.1:{publisher.port}", replay, heard.take)
    task = asyncio.create_task(feed.run())
    try:
        async with asyncio.timeout(30):
            yield publisher, feed, heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await publisher.close()
        context.term()


async def test_the_feed_requests_earlier_and_lost_batches() -> None:
    async with feeding() as (publisher, feed, heard):
        await publisher.publish(stored(0, 1), is_lost=True)
        await publisher.publish_until(lambda: heard)
        await publisher.publish(stored(1, 1))
        await eventually(lambda: heard.num_blocks == 2)
        lost_from = publisher.number
        await publisher.publish(stored(2, 1), is_lost=True)
        await publisher.publish(stored(3, 1))
        await eventually(lambda: heard.num_blocks == 4)
        assert publisher.replayed[-1] == lost_from
        assert not any(is_lost for _, is_lost in heard)
        assert feed.num_gaps == 0


async def test_older_versions_replay_without_a_topic() -> None:
    async with feeding(has_topic=False) as (publisher, _, heard):
        await publisher.publish(stored(0, 2), is_lost=True)
        await publisher.publish_until(lambda: heard)
        await eventually(lambda: heard.num_blocks == 1)


@pytest.mark.parametrize("options", [{"has_replay": False}, {"keeps": 1}], ids=["no replay", "forgotten"])
async def test_a_gap_that_no_replay_fills_is_reported(options: dict[str, Any]) -> None:
    async with feeding(**options) as (publisher, feed, heard):
        await publisher.publish_until(lambda: heard)
        gaps = feed.num_gaps
        await publisher.publish(stored(0, 1), is_lost=True)
        await publisher.publish(stored(1, 1))
        await eventually(lambda: heard[-1] == (["BlockStored"], True))
        assert feed.num_gaps == gaps + 1
        await publisher.publish(stored(2, 1))
        await eventually(lambda: heard[-1] == (["BlockStored"], False))


async def test_a_restarted_engine_has_an_empty_cache() -> None:
    async with feeding() as (publisher, _, heard):
        await publisher.publish_until(lambda: heard)
        await publisher.publish(stored(0, 1))
        await eventually(lambda: heard.num_blocks == 1)
        publisher.number = 0
        await publisher.publish(stored(1, 1))
        await eventually(lambda: heard.num_blocks == 2)
        assert heard[-2:] == [([], True), (["BlockStored"], False)]


async def test_a_malformed_message_is_a_gap_and_the_feed_continues() -> None:
    async with feeding() as (publisher, _, heard):
        await publisher.publish_until(lambda: heard)
        await eventually(lambda: len(heard) >= publisher.number)
        await publisher.send_raw(publisher.number, b"\xc1")
        publisher.number += 1
        await eventually(lambda: heard[-1] == ([], True))
        await publisher.publish(stored(0, 1))
        await eventually(lambda: heard[-1] == (["BlockStored"], False))


# -- engines that send too much


def long_event(num_blocks: int, **fields: Any) -> dict[str, Any]:
    names = [name(i) for i in range(num_blocks)]
    return stored(0, 0, block_hashes=names, token_ids=list(range(num_blocks * 16)), **fields)


@pytest.mark.parametrize("num_blocks", [PIECE_BLOCKS, PIECE_BLOCKS + 1, 3 * PIECE_BLOCKS - 1])
@pytest.mark.parametrize("extra_keys", [None, "salt"])
def test_a_long_event_in_pieces_is_the_same_event(num_blocks: int, extra_keys: str | None) -> None:
    keys = None if extra_keys is None else [[extra_keys], *[None] * (num_blocks - 3), [IMAGE], [IMAGE]]
    event = long_event(num_blocks, extra_keys=keys)
    whole = make_translator().pool([event])
    translator, found = make_translator(), list[bytes]()
    for piece in pieces_of(event):
        assert len(piece["block_hashes"]) <= PIECE_BLOCKS
        found += translator.pool([piece]).stored
    assert found == whole.stored
    assert len(found) == num_blocks - (2 if keys else 0)
    gone = [translator.pool([piece]) for piece in pieces_of(removed(*range(num_blocks)))]
    assert [digest for change in gone for digest in change.removed] == whole.stored


@pytest.mark.parametrize(
    "wrong", [{"token_ids": 5}, {"token_ids": [1]}, {"block_size": "x"}, {"extra_keys": 5}, {"block_size": True}]
)
def test_a_long_event_that_cannot_be_cut_is_judged_as_it_is(wrong: dict[str, Any]) -> None:
    event = long_event(PIECE_BLOCKS + 1) | wrong
    assert list(pieces_of(event)) == [event]
    assert make_translator().pool([event]).stored == []


def bomb(count: int) -> msgspec.Raw:
    return msgspec.Raw(b"\xdd" + count.to_bytes(4, "big") + b"\x80" * count)


def test_what_would_unpack_to_much_is_not_unpacked() -> None:
    """A byte that stands for an empty map takes 64 in memory, and a tenth of a microsecond."""
    with pytest.raises(msgspec.DecodeError):
        decode_batch(msgspec.msgpack.encode([0.0, bomb(MAX_EVENTS + 1)]))
    with pytest.raises(msgspec.DecodeError):
        decode_event(msgspec.Raw(msgspec.msgpack.encode({str(i): 0 for i in range(MAX_FIELDS)} | {"type": "x"})))
    with pytest.raises(msgspec.DecodeError):
        decode_event(bomb(MAX_FIELDS + 1))
    with pytest.raises(msgspec.DecodeError):
        decode_event(msgspec.Raw(msgspec.msgpack.encode({"type": bomb(1000)})))
    event = {"type": "BlockStored", "token_ids": bomb(4), "block_hashes": bomb(4), "extra_keys": bomb(MAX_FIELD_BYTES)}
    expected = {"type": "BlockStored", "token_ids": None, "block_hashes": None, "extra_keys": None}
    assert decode_event(msgspec.Raw(msgspec.msgpack.encode(event))) == expected
    many = {"type": "BlockStored", "token_ids": [1] * (MAX_EVENT_TOKENS + 1)}
    assert decode_event(msgspec.Raw(msgspec.msgpack.encode(many)))["token_ids"] is None


def test_pairs_of_tokens_and_both_kinds_of_names_are_read() -> None:
    event = {
        "type": "BlockStored",
        "token_ids": [[1, 2], [2, 3]],
        "block_hashes": [b"a", 2**63 + 1, -1],
        "medium": None,
    }
    found = decode_event(msgspec.Raw(msgspec.msgpack.encode(event)))
    assert found == event | {"token_ids": [(1, 2), (2, 3)]}


def test_a_malformed_event_leaves_nothing_known() -> None:
    translator = make_translator()
    digests = translator.pool([stored(0, 2)]).stored
    change = translator.apply([stored(2, 1), {"type": "BlockRemoved", "block_hashes": None}, stored(3, 1)])
    assert "NoneType" in change.flaw
    assert set(change.places[POOL_PLACE].removed) >= set(digests)
    assert (change.places[POOL_PLACE].stored, translator.digests) == ([], {})


def test_a_name_that_gets_other_tokens_gives_up_its_former_block() -> None:
    translator = make_translator()
    (first,) = translator.pool([stored(0, 1)]).stored
    change = translator.pool([stored(0, 1, token_ids=IDS[16:32])])
    assert (change.removed, len(change.stored)) == ([first], 1)


def test_no_more_blocks_are_followed_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_BLOCKS", 3)
    translator = make_translator()
    assert len(translator.pool([stored(0, 2), stored(2, 2)]).stored) == 2
    assert (len(translator.digests), translator.num_skipped) == (2, 2)
    translator.pool([removed(1)])
    assert len(translator.pool([stored(1, 2)]).stored) == 2


async def test_a_flood_of_events_takes_a_few_blocks_of_each_turn() -> None:
    async with feeding() as (publisher, feed, heard):
        await publisher.publish_until(lambda: heard)
        turns = Turns()
        feed._on_batch = lambda events, is_lost: turns.add(sum(len(one.get("block_hashes") or ()) for one in events))
        await publisher.publish(long_event(5 * PIECE_BLOCKS), *[removed(1)] * 3 * PIECE_BLOCKS)
        for _ in range(50):
            await publisher.publish(removed(1))
        await eventually(lambda: turns.amounts.total() == 8 * PIECE_BLOCKS + 50)
        turns.close()
        assert max(turns.amounts.values()) <= PIECE_BLOCKS


async def test_a_replay_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "REPLAY_TIMEOUT_S", 0.3)
    async with feeding(is_endless=True) as (publisher, _, heard):
        await publisher.publish_until(lambda: heard)
        await publisher.publish(stored(0, 1))
        await eventually(lambda: heard.num_blocks == 1)


@pytest.mark.parametrize(
    "frames", [[b"kv", b"", b"x"], [b"kv", b"\xff" * 8, b"x"], [b"kv", b"1" * 100_000, b"x"], [b"kv"], [b""] * 1000]
)
async def test_frames_that_are_not_messages_do_not_end_the_feed(frames: list[bytes]) -> None:
    async with feeding() as (publisher, feed, heard):
        await publisher.publish_until(lambda: feed._last_published >= 0)
        await publisher._pub.send_multipart(frames)
        publisher.number = 0  # it has restarted
        await publisher.publish(stored(0, 1))
        await eventually(lambda: heard.num_blocks == 1)
