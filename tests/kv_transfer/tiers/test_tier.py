"""Tiers: what is present, what is evicted first, and stores that are slow, full, broken or gone."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typing_extensions import override

from tandem.kv_transfer.tiers.base import Block, BlockName, StoreFailure
from tandem.kv_transfer.tiers.memory import MemoryStore
from tandem.kv_transfer.tiers.tier import MAX_PAUSE_S, Tier, TierRead
from tandem.testing.store_contract import BLOCK_BYTES, chain, content, digest_of, name_of
from tests.support.store_world import DEADLINE_S, KINDS, PERSISTENT, Clock, World, get, make_tier, put, zeros
from tests.support.waiting import poll_until

every_kind = pytest.mark.parametrize("world", KINDS, indirect=True)


class ScriptedStore(MemoryStore):
    """Memory that fails on command, can be held up, and records its calls."""

    def __init__(self) -> None:
        super().__init__(BLOCK_BYTES, 100)
        self.failures: dict[bytes, StoreFailure] = {}  # by digest
        self.go = threading.Event()
        self.go.set()
        self.calls: list[tuple[str, bytes]] = []
        self.scanned = threading.Event()
        self.can_delete = True

    @override
    def scan(self) -> Sequence[BlockName]:
        found = super().scan()
        self.scanned.set()
        return found

    @override
    def read(self, name: BlockName, scratch: Block) -> Block | StoreFailure:
        self._pass("read", name)
        return self.failures.get(name.digest) or super().read(name, scratch)

    @override
    def write(self, name: BlockName, data: Block) -> StoreFailure | None:
        self._pass("write", name)
        return self.failures.get(name.digest) or super().write(name, data)

    @override
    def delete(self, name: BlockName) -> StoreFailure | None:
        if self.can_delete:
            return super().delete(name)
        self.calls.append(("delete", name.digest))
        return StoreFailure.UNREACHABLE

    def _pass(self, call: str, name: BlockName) -> None:
        self.calls.append((call, name.digest))
        assert self.go.wait(DEADLINE_S)


def digests(*numbers: int) -> list[bytes]:
    return [digest_of(number) for number in numbers]


def hold(tier: Tier, store: ScriptedStore, number: int = 1) -> tuple[TierRead, Block]:
    """A load of one block in whose read a thread hangs until `store.go` is set."""
    store.go.clear()
    num_calls = len(store.calls)
    buffers = zeros()
    load = tier.load(digests(number), buffers)
    poll_until(tier, lambda: len(store.calls) > num_calls)
    return load, buffers[0]


@every_kind
def test_a_chain_comes_back_as_far_as_it_is_present(world: World) -> None:
    tier = make_tier(world.open())
    names = chain(1, 2, 3, 4, 5)
    put(tier, [*names[:3], names[4]])
    assert tier.count_present(digests(1, 2, 3, 4, 5)) == 3
    assert tier.count_present(digests(5)) == 0, "nobody could find it without the fourth"
    assert tier.count_present(digests(9, 1)) == 0
    assert tier.count_present([]) == 0
    assert get(tier, names) == 3
    assert get(tier, names[1:3]) == 2
    stats = tier.stats()
    assert (stats.num_hits, stats.num_misses) == (5, {"absent": 2})
    assert (stats.num_blocks, stats.num_stored, stats.num_drops) == (3, 3, {"parent not there": 1})
    assert (stats.bytes_in, stats.bytes_out) == (3 * BLOCK_BYTES, 5 * BLOCK_BYTES)
    assert stats.seconds_in > 0
    assert stats.seconds_out > 0
    tier.check_integrity(idle=True)
    tier.close()


def test_loads_that_are_given_up_behind_a_hanging_read_keep_no_memory() -> None:
    store = ScriptedStore()
    tier = make_tier(store)
    put(tier, chain(1, 2))
    hanging, _ = hold(tier, store)
    buffers = zeros()
    late = tier.load(digests(1), buffers, timeout_s=0.0)
    assert (late.is_done, late.failure) == (True, "late")
    memory = weakref.ref(buffers)
    del late, buffers
    gc.collect()
    assert memory() is None
    store.go.set()
    poll_until(tier, lambda: hanging.is_done)
    tier.close()


@every_kind
def test_leaves_go_before_the_blocks_they_hang_from(world: World) -> None:
    store = world.open(num_blocks=4)
    tier = make_tier(store, capacity=4)
    put(tier, chain(1, 2, 3, 4))
    assert tier.take_events() == (digests(1, 2, 3, 4), [])
    put(tier, chain(11, 12))
    assert tier.digests() == digests(1, 2, 11, 12)
    assert tier.take_events() == (digests(11, 12), digests(4, 3))
    assert tier.stats().num_evictions == 2
    assert get(tier, chain(1, 2)) == 2
    put(tier, chain(21))
    assert tier.digests() == digests(1, 2, 11, 21)
    poll_until(tier, lambda: not tier.is_busy)
    found = store.scan()
    assert {name.digest for name in found} == set(tier.digests())
    tier.check_integrity(idle=True)
    tier.close()


@pytest.mark.parametrize("world", PERSISTENT, indirect=True)
def test_after_a_restart_blocks_and_their_chains_are_known(world: World) -> None:
    tier = make_tier(world.open())
    put(tier, chain(1, 2, 3, 4))
    tier.close()
    tier = make_tier(world.open(), capacity=4)
    assert set(tier.take_events()[0]) == set(digests(1, 2, 3, 4))
    assert get(tier, chain(1, 2, 3, 4)) == 4
    put(tier, chain(11))
    assert set(tier.digests()) == set(digests(1, 2, 3, 11))
    tier.close()
    tier = make_tier(world.open(), capacity=2)  # a smaller one
    poll_until(tier, lambda: not tier.is_busy)
    assert tier.stats().num_blocks == 2
    assert tier.stats().num_evictions == 2
    assert digest_of(3) not in tier
    tier.check_integrity(idle=True)
    tier.close()


@every_kind
def test_random_loads_and_stores_never_bring_wrong_bytes(world: World) -> None:
    seed = 7
    print(f"seed={seed}")
    rng = random.Random(seed)
    capacity = 12
    tier = make_tier(world.open(num_blocks=capacity), capacity=capacity, num_threads=4, max_queued_stores=6)
    chains = [chain(*range(10 * number, 10 * number + 6)) for number in range(1, 6)]
    loads: list[tuple[TierRead, list[BlockName], Block]] = []
    num_asked = num_checked = 0
    for _ in range(300):
        names = rng.choice(chains)[: rng.randint(1, 6)]
        if rng.random() < 0.5:
            buffers = zeros(len(names))
            loads.append((tier.load([name.digest for name in names], buffers), names, buffers))
            num_asked += len(names)
            if rng.random() < 0.1:
                loads[-1][0].abandon()
        else:
            for name in names:
                tier.store(*name, content(name))
        tier.poll()
        if rng.random() < 0.05:
            poll_until(tier, lambda: not tier.is_busy)
        tier.check_integrity()
    poll_until(tier, lambda: not tier.is_busy)
    for load, names, buffers in loads:
        num_checked += load.num_loaded
        for name, buffer in zip(names[: load.num_loaded], buffers, strict=False):
            assert np.array_equal(buffer, content(name))
    tier.check_integrity(idle=True)
    stats = tier.stats()
    assert stats.num_hits + sum(stats.num_misses.values()) == num_asked
    assert num_checked > 20
    tier.close()


def test_a_load_is_whole_or_says_why_not() -> None:
    store = ScriptedStore()
    tier = make_tier(store)
    put(tier, chain(1, 2, 3, 4))
    tier.take_events()
    store.failures[digest_of(3)] = StoreFailure.CORRUPT
    load = tier.load(digests(1, 2, 3, 4), zeros(4))
    poll_until(tier, lambda: load.is_done)
    assert (load.num_loaded, load.failure, load.is_complete) == (2, "corrupt", False)
    assert tier.take_events() == ([], digests(3))
    assert tier.stats().num_misses == {"corrupt": 2}
    load = tier.load(digests(1, 2), zeros(2))
    poll_until(tier, lambda: load.is_done)
    assert (load.num_loaded, load.failure, load.is_complete) == (2, "", True)
    tier.check_integrity(idle=True)
    tier.close()


def test_an_abandoned_load_is_done_at_once_and_leaves_its_buffers() -> None:
    store = ScriptedStore()
    tier = make_tier(store)
    put(tier, chain(1, 2))
    load, buffer = hold(tier, store)
    load.abandon()
    tier.poll()
    assert (load.is_done, load.num_loaded, load.failure) == (True, 0, "abandoned")
    store.go.set()
    assert get(tier, chain(1, 2)) == 2  # the only thread has come back
    assert not buffer.any()
    assert tier.stats().num_misses == {"abandoned": 1}
    tier.close()


def test_a_load_is_given_up_at_its_deadline() -> None:
    store, clock = ScriptedStore(), Clock()
    tier = make_tier(store, clock=clock, load_timeout_s=5.0)
    put(tier, chain(1))
    load, buffer = hold(tier, store)
    clock.now += 4.9
    tier.poll()
    assert not load.is_done
    clock.now += 0.1
    tier.poll()
    assert (load.is_done, load.failure, tier.stats().num_misses) == (True, "late", {"late": 1})
    store.go.set()
    tier.close()
    assert not buffer.any()


def test_loads_do_not_wait_for_stores() -> None:
    tier = make_tier(MemoryStore(BLOCK_BYTES, 9))
    put(tier, chain(1, 2, 3))
    go = threading.Event()
    name = name_of(11)

    def make(scratch: Block) -> Block:
        assert go.wait(DEADLINE_S)
        scratch[:] = content(name)
        return scratch

    write = tier.store(*name, make)
    assert get(tier, chain(1, 2, 3)) == 3
    assert write is not None
    assert not write.is_done
    assert tier.stats().num_queued_stores == 1
    go.set()
    poll_until(tier, lambda: not tier.is_busy)
    assert get(tier, [name]) == 1
    tier.close()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a priority of their own on Linux")
def test_blocks_are_made_where_they_take_time_from_nobody() -> None:
    tier, niceness = make_tier(MemoryStore(BLOCK_BYTES, 9)), []

    def make(scratch: Block) -> Block:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return scratch

    tier.store(*name_of(1), make)
    poll_until(tier, lambda: not tier.is_busy)
    assert niceness == [min(os.getpriority(os.PRIO_PROCESS, 0) + 10, 19)]
    tier.close()


@every_kind
def test_a_block_that_cannot_be_made_is_dropped_with_its_reason(world: World) -> None:
    tier = make_tier(world.open(num_blocks=2), capacity=2)
    put(tier, chain(1))
    tier.store(*name_of(2, 1), lambda _: StoreFailure.UNFIT)
    tier.store(*name_of(3), lambda _: StoreFailure.EVICTED)
    poll_until(tier, lambda: not tier.is_busy)
    reasons = {"not worth it", "does not fit its codec", "evicted before its turn"}
    assert tier.stats().num_drops.keys() <= reasons
    assert sum(tier.stats().num_drops.values()) == 2
    assert tier.count_present(digests(2)) == tier.count_present(digests(3)) == 0
    put(tier, chain(4))
    assert get(tier, [name_of(4)]) == 1
    tier.check_integrity(idle=True)
    tier.close()


class Panic(BaseException):
    """As a panic of a Rust library: no `Exception`."""


class PanickingStore(MemoryStore):
    """Memory whose calls raise, until told otherwise."""

    def __init__(self) -> None:
        super().__init__(BLOCK_BYTES, 9)
        self.panics = True

    @override
    def scan(self) -> Sequence[BlockName]:
        self._panic()
        return super().scan()

    @override
    def read(self, name: BlockName, scratch: Block) -> Block | StoreFailure:
        self._panic()
        return super().read(name, scratch)

    @override
    def write(self, name: BlockName, data: Block) -> StoreFailure | None:
        self._panic()
        return super().write(name, data)

    @override
    def delete(self, name: BlockName) -> StoreFailure | None:
        self._panic()
        return super().delete(name)

    def _panic(self) -> None:
        if self.panics:
            raise Panic


def test_what_a_store_raises_ends_none_of_its_threads() -> None:
    store, clock = PanickingStore(), Clock()
    tier = make_tier(store, clock=clock)
    poll_until(tier, lambda: not tier.is_busy)
    for number in range(5):
        store.panics = True
        clock.now += 2 * MAX_PAUSE_S
        tier.store(*name_of(number), content(name_of(number)))
        poll_until(tier, lambda: not tier.is_busy)
        store.panics = False
        clock.now += 2 * MAX_PAUSE_S
        poll_until(tier, lambda: not tier.is_busy)
        put(tier, chain(number))
        store.panics = True
        load = tier.load(digests(number), zeros())
        poll_until(tier, lambda load=load: load.is_done)  # type: ignore[misc]
        assert (load.num_loaded, load.failure) == (0, "unreachable")
    store.panics = False
    clock.now += 2 * MAX_PAUSE_S
    poll_until(tier, lambda: not tier.is_busy)
    assert get(tier, chain(4)) == 1
    tier.close()
    tier.check_integrity(idle=True)


def test_stores_beyond_the_queue_are_dropped() -> None:
    store = ScriptedStore()
    tier = make_tier(store, max_queued_stores=2)
    store.go.clear()
    writes = [tier.store(*name, content(name)) for name in chain(1, 2, 3, 4)]
    assert [write is not None for write in writes] == [True, True, False, False]
    assert digest_of(1) in tier
    assert tier.count_present(digests(1)) == 0  # not before it is written
    assert tier.store(*name_of(1), content(name_of(1))) is None  # no second time, and no drop
    assert tier.stats().num_queued_stores == 2
    assert tier.stats().num_drops == {"queue full": 1, "parent not there": 1}
    store.go.set()
    poll_until(tier, lambda: not tier.is_busy)
    assert tier.digests() == digests(1, 2)
    tier.close()


def test_blocks_being_loaded_are_not_evicted() -> None:
    store = ScriptedStore()
    tier = make_tier(store, capacity=2)
    put(tier, chain(1, 2))
    load, _ = hold(tier, store, number=2)
    assert tier.store(*name_of(9), content(name_of(9))) is None
    assert tier.stats().num_drops == {"not worth it": 1}
    store.go.set()
    poll_until(tier, lambda: load.is_done)
    put(tier, chain(9))
    assert tier.digests() == digests(1, 9)
    tier.check_integrity(idle=True)
    tier.close()


def test_a_block_whose_child_is_in_use_does_not_exceed_the_capacity() -> None:
    store = ScriptedStore()
    store.write(name_of(2, parent=1), content(name_of(2)))
    tier = make_tier(store, capacity=1)
    poll_until(tier, lambda: not tier.is_scanning)
    hold(tier, store, number=2)
    assert tier.store(*name_of(1), content(name_of(1))) is None  # neither of the two is a leaf that may go
    tier.check_integrity()
    store.go.set()
    tier.close()


@every_kind
def test_pinned_blocks_and_what_they_hang_from_outlive_newer_ones(world: World) -> None:
    tier = make_tier(world.open(), capacity=4)
    tier.pin(digests(1, 2, 3))  # of which the third is never stored
    put(tier, chain(1, 2))
    for number in range(10, 16):
        put(tier, [name_of(number)])
    assert tier.count_present(digests(1, 2)) == 2
    assert get(tier, chain(1, 2)) == 2
    tier.unpin(digests(1, 2, 9))
    assert tier.pinned_digests() == set(digests(3))
    for number in range(20, 24):
        put(tier, [name_of(number)])
    assert tier.count_present(digests(1, 2)) == 0
    tier.check_integrity(idle=True)
    tier.close()


def test_a_pin_outlives_its_block() -> None:
    store = ScriptedStore()
    tier = make_tier(store, capacity=2)
    put(tier, [name_of(1)])
    tier.pin(digests(1))
    store.failures[digest_of(1)] = StoreFailure.CORRUPT
    assert get(tier, [name_of(1)]) == 0
    assert digest_of(1) not in tier
    store.failures.clear()
    put(tier, [name_of(1)])
    tier.pin(digests(1))  # again: one `unpin` ends both
    for number in (2, 3, 4):
        put(tier, [name_of(number)])
    assert digest_of(1) in tier
    tier.unpin(digests(1))
    for number in (5, 6):
        put(tier, [name_of(number)])
    assert digest_of(1) not in tier
    tier.close()


def test_a_block_evicted_during_a_scan_does_not_come_back() -> None:
    store, clock = ScriptedStore(), Clock()
    tier = make_tier(store, capacity=2, clock=clock, rescan_s=60.0)
    put(tier, chain(1, 2))
    store.scanned.clear()
    clock.now += 60.0
    tier.poll()  # begins the scan
    assert store.scanned.wait(DEADLINE_S)
    put(tier, chain(9))
    poll_until(tier, lambda: not tier.is_busy)
    assert tier.digests() == digests(1, 9)
    assert tier.stats().num_evictions == 1
    tier.close()


def test_a_full_store_makes_room_by_itself() -> None:
    store = ScriptedStore()
    tier = make_tier(store, capacity=10)
    put(tier, chain(1, 2, 3))
    store.failures[digest_of(9)] = StoreFailure.FULL
    put(tier, chain(9))
    assert tier.digests() == digests(1, 2)
    stats = tier.stats()
    assert (stats.num_drops, stats.num_evictions) == ({"full": 1}, 1)
    poll_until(tier, lambda: len(store.scan()) == 2)
    tier.check_integrity(idle=True)
    tier.close()


def test_an_unreachable_store_is_left_alone_for_a_while() -> None:
    store, clock = ScriptedStore(), Clock()
    tier = make_tier(store, clock=clock, pause_s=3.0)
    put(tier, chain(1, 2, 3))
    store.failures[digest_of(2)] = StoreFailure.UNREACHABLE
    assert get(tier, chain(1, 2, 3)) == 1
    assert tier.count_present(digests(1)) == 0
    assert get(tier, chain(1)) == 0
    assert tier.store(*name_of(9), content(name_of(9))) is None
    assert tier.stats().num_misses == {"unreachable": 3}
    assert tier.stats().num_drops == {"unreachable": 1}
    clock.now += 3.0
    store.failures.clear()
    assert get(tier, chain(1, 2, 3)) == 3  # nothing was forgotten
    tier.close()


def test_a_store_that_lists_but_cannot_read_is_left_alone_ever_longer() -> None:
    clock, store = Clock(), ScriptedStore()
    tier = make_tier(store, clock=clock, pause_s=1.0)
    put(tier, chain(1, 2))
    store.failures[digest_of(1)] = StoreFailure.UNREACHABLE

    def pause_s() -> float:
        """How long it is left alone after one more read."""
        assert get(tier, chain(1, 2)) == 0
        begun_s = clock.now
        while tier.is_paused:
            clock.now += 0.5
        poll_until(tier, lambda: not tier.is_scanning and tier.count_present(digests(1, 2)) == 2)
        return clock.now - begun_s

    assert [pause_s() for _ in range(8)] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_PAUSE_S, MAX_PAUSE_S]
    del store.failures[digest_of(1)]
    assert get(tier, chain(1, 2)) == 2
    store.failures[digest_of(1)] = StoreFailure.UNREACHABLE
    assert pause_s() == 1.0
    tier.close()


def test_deletes_that_are_not_answered_do_not_keep_the_threads() -> None:
    store = ScriptedStore()
    for name in chain(*range(1, 51)):
        store.write(name, content(name))
    store.can_delete = False
    tier = make_tier(store, capacity=10)  # the scan finds 40 blocks too many
    put(tier, [])
    poll_until(tier, lambda: "delete" in [call for call, _ in store.calls])
    assert get(tier, chain(1)) == 1  # a thread is free
    assert [call for call, _ in store.calls].count("delete") == 1
    tier.close()


@pytest.mark.parametrize("world", PERSISTENT, indirect=True)
def test_what_another_worker_adds_or_removes_is_noticed(world: World) -> None:
    store, other, clock = world.open(), world.open(), Clock()
    tier = make_tier(store, clock=clock, rescan_s=60.0)
    put(tier, chain(1, 2, 3, 4))
    tier.take_events()
    other.delete(name_of(2, parent=1))
    assert get(tier, chain(1, 2, 3, 4)) == 1
    assert tier.take_events() == ([], digests(2))  # found out by asking for it
    assert tier.stats().num_misses == {"absent": 3}
    other.delete(name_of(3, parent=2))
    other.write(name_of(5, parent=4), content(name_of(5)))
    clock.now += 60.0
    poll_until(tier, lambda: digest_of(5) in tier and not tier.is_busy)
    assert tier.take_events() == (digests(5), digests(3))
    tier.check_integrity(idle=True)
    tier.close()


def test_close_writes_what_is_queued(tmp_path: Path) -> None:
    world = World("disk", tmp_path)
    tier = make_tier(world.open())
    for name in chain(*range(1, 40)):
        tier.store(*name, content(name))
    tier.close()
    found = world.open().scan()
    assert len(found) == 39
    assert tier.stats().num_stored == 39


def test_close_does_not_wait_for_a_thread_that_hangs() -> None:
    store = ScriptedStore()
    tier = make_tier(store)
    put(tier, chain(1))
    load, _ = hold(tier, store)
    tier.close(timeout_s=0.1)
    tier.close()
    assert (load.is_done, load.failure) == (True, "closed")
    assert tier.count_present(digests(1)) == 0
    assert tier.store(*name_of(2), content(name_of(2))) is None
    assert tier.load(digests(1), zeros()).is_done
    store.go.set()


@pytest.mark.parametrize("buffer", [np.zeros(BLOCK_BYTES - 1, np.uint8), np.zeros(BLOCK_BYTES, np.int8)])
def test_a_buffer_that_is_not_a_block_is_the_callers_mistake(buffer: Block) -> None:
    tier = make_tier(ScriptedStore())
    with pytest.raises(AssertionError, match="is not a block"):
        tier.store(*name_of(1), buffer)
    with pytest.raises(AssertionError, match="is not a block"):
        tier.load(digests(1), [buffer])
    tier.close()
