"""Stores of other packages that hang, raise, lie, or return other bytes or too few: only misses, nothing wrong served.

Time is virtual, and the I/O threads take their steps when the schedule says so.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from tandem.kv_transfer.eviction import POLICIES
from tandem.kv_transfer.tiers.base import Block, BlockName, BlockStore, StoreFailure, StoreSettings
from tandem.kv_transfer.tiers.foreign import ForeignStore
from tandem.kv_transfer.tiers.io_threads import IoThreads
from tandem.kv_transfer.tiers.key import StoreKey
from tandem.kv_transfer.tiers.seal import FOOTER_BYTES
from tandem.kv_transfer.tiers.tier import Tier, TierRead
from tandem.protocol.config import parse_tier
from tandem.protocol.errors import ConfigError
from tandem.testing.store_contract import KEY, NAMESPACE, StoreContract, chain, content, name_of, read
from tests.support.store_world import Clock

THOROUGH = [pytest.mark.slow, pytest.mark.timeout(900)]
SIZE = 64
CHAINS = [chain(1, 2, 3, 4), chain(1, 2, 5, 6, 7), chain(8, 9, 10, 11, 12)]
SEALED_BYTES = SIZE + FOOTER_BYTES
CONTENT = {name: content(name, SIZE) for names in CHAINS for name in names}


class PlainStore(BlockStore):
    """The simplest store: a dictionary."""

    def __init__(self, block_bytes: int) -> None:
        super().__init__(block_bytes)
        self.blocks: dict[BlockName, Block] = {}

    def read(self, name: BlockName, scratch: Block) -> Any:
        return self.blocks.get(name, StoreFailure.ABSENT)

    def write(self, name: BlockName, data: Block) -> Any:
        self.blocks.setdefault(name, data.copy())

    def delete(self, name: BlockName) -> Any:
        self.blocks.pop(name, None)

    def scan(self) -> Any:
        return list(self.blocks)


class HostileStore(PlainStore):
    """A store whose calls misbehave at a rate."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        super().__init__(SEALED_BYTES)
        self._rng, self._rate = rng, rate

    @override
    def read(self, name: BlockName, scratch: Block) -> Any:
        true = super().read(name, scratch)
        other = self._rng.choice([*self.blocks.values(), np.zeros(SEALED_BYTES, np.uint8)])
        flipped = other.copy()
        flipped[self._rng.randrange(SEALED_BYTES)] ^= 1
        shapes = (other[:-1], other[:0], np.append(other, other), other.astype(np.int64), other.reshape(1, -1))
        return self._misbehave(true, *[other, flipped] * 6, *shapes, other.tobytes(), None, 7, *StoreFailure)

    @override
    def write(self, name: BlockName, data: Block) -> Any:
        damaged = data.copy()
        damaged[self._rng.randrange(SEALED_BYTES)] ^= 1
        kept = self._misbehave(data, damaged, data[:-3], None, *StoreFailure)
        if not isinstance(kept, np.ndarray):
            return kept
        return self._misbehave(super().write(name, kept), True, "stored", kept)

    @override
    def delete(self, name: BlockName) -> Any:
        if self._misbehave(True, False):
            super().delete(name)
        return self._misbehave(None, 1, *StoreFailure)

    @override
    def scan(self) -> Any:
        true = super().scan()
        lies = [name_of(2, 1), name_of(9), name_of(1, 2), name_of(3, 3), name_of(4, 77), name_of(99)]
        garbage = [None, 1, "name", b"x", (b"", None), (b"1" * 16, b"2"), (b"1" * 16,), ("1" * 16, None)]
        endless: Iterator[Any] = itertools.cycle([*true, *lies, *garbage])
        some = self._rng.sample(garbage, 1)
        others = ([*lies, *true], [*true, *garbage], [*some, *true], [], endless, None, 5, {"a": 1})
        return self._misbehave(true, *others, *StoreFailure)

    @override
    def close(self) -> None:
        self._misbehave(None)

    def _misbehave(self, true: Any, *others: Any) -> Any:
        if self._rng.random() >= self._rate:
            return true
        if self._rng.random() < 0.2 or not others:
            raise self._rng.choice([OSError("dead"), ValueError("no"), KeyError(3), MemoryError(), AssertionError()])
        return self._rng.choice(others)


class SteppedIo(IoThreads):
    """I/O threads that do a task when they are told to, or hang in it."""

    @override
    def _start(self) -> None:
        self._num_threads, self._threads = len(self._threads), []
        self._hung: list[Callable[[], Any]] = []

    def step(self, rng: random.Random, hang_rate: float) -> None:
        """One thread does what it was hung in, or what comes next for a thread of its kind."""
        if self._hung and rng.random() >= hang_rate:
            self._do(self._hung.pop(rng.randrange(len(self._hung))))
        next_one = rng.choice([self._next_read, self._next_task])
        if len(self._hung) >= self._num_threads or (task := next_one()) is None:
            return
        work = partial(task, np.empty(self._store.block_bytes, np.uint8))
        if rng.random() < hang_rate:
            self._hung.append(work)
        else:
            self._do(work)

    def _do(self, task: Callable[[], Any]) -> None:
        if (result := task()) is not None:
            self.results.append(result)


class Schedule:
    """A tier over a hostile store, and what must hold of it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = Clock()
        self.rate, self.hang_rate = rng.choice([0.0, 0.03, 0.3, 1.0]), rng.choice([0.0, 0.0, 0.2, 0.9])
        settings = settings_of(num_blocks=rng.choice([3, 8, 100]))
        self.tier = Tier(
            "acme",
            ForeignStore(HostileStore(rng, self.rate), settings),
            POLICIES[rng.choice(list(POLICIES))](settings.num_blocks),
            capacity_blocks=settings.num_blocks,
            num_threads=rng.choice([1, 3]),
            max_queued_stores=8,
            rescan_s=60.0,
            clock=self.clock,
        )
        self.io: Any = self.tier._io
        self.loads: list[tuple[TierRead, list[BlockName], Block]] = []
        self.ended: list[tuple[Block, Block]] = []  # buffers of loads that are done, and what they held then
        self.writes: list[tuple[Any, Block]] = []
        self.listed: set[bytes] = set()
        self.num_asked = 0

    def run(self, num_actions: int = 50) -> None:
        actions = [*[self.store] * 2, *[self.load] * 2, *[self.step] * 4, self.wait, self.pin, self.abandon]
        for _ in range(num_actions):
            self.rng.choice(actions)()
            self.tier.poll()
            self.check()
        self.clock.now += 1000.0
        self.tier.poll()
        self.check()
        assert not self.loads, "a load does not end although its time is up"
        self.tier.close(0.0)
        self.check()
        for buffers, then in self.ended:
            assert np.array_equal(buffers, then), "a buffer changed after its load was done"
        stats = self.tier.stats()
        assert stats.num_hits + sum(stats.num_misses.values()) == self.num_asked

    def store(self) -> None:
        names = self.rng.choice(CHAINS)
        for name in names[: self.rng.randint(1, len(names))]:
            data = CONTENT[name].copy()
            made = self.rng.choice([data, lambda _, data=data: data, lambda _: StoreFailure.EVICTED])
            self.writes.append((self.tier.store(*name, made), data))

    def load(self) -> None:
        names = self.rng.choice(CHAINS)
        names = names[: self.rng.randint(1, len(names))]
        buffers = np.full((len(names), SIZE), 0xAA, np.uint8)
        load = self.tier.load([name.digest for name in names], buffers, timeout_s=self.rng.choice([0.0, 0.5, 100.0]))
        self.loads.append((load, names, buffers))
        self.num_asked += len(names)

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 20)):
            self.io.step(self.rng, self.hang_rate)

    def wait(self) -> None:
        self.clock.now += self.rng.choice([0.01, 0.1, 1.0, 61.0])

    def pin(self) -> None:
        digests = [name.digest for name in self.rng.choice(CHAINS)]
        self.rng.choice([self.tier.pin, self.tier.unpin])(digests)

    def abandon(self) -> None:
        if self.loads:
            self.rng.choice(self.loads)[0].abandon()

    def check(self) -> None:
        for _, data in [one for one in self.writes if one[0] is None or one[0].is_done]:
            data[:] = 0  # its owner uses the buffer for something else
        self.writes = [one for one in self.writes if one[0] is not None and not one[0].is_done]
        for load, names, buffers in [one for one in self.loads if one[0].is_done]:
            for name, buffer in zip(names[: load.num_loaded], buffers, strict=False):
                assert np.array_equal(buffer, CONTENT[name]), f"{name.digest.hex()} has other bytes"
            self.ended.append((buffers, buffers.copy()))
        self.loads = [one for one in self.loads if not one[0].is_done]
        stored, removed = self.tier.take_events()
        self.listed = (self.listed | set(stored)) - set(removed)
        assert self.listed == set(self.tier.digests()), "events do not tell what the tier has"
        assert all(type(digest) is bytes and len(digest) == 16 for digest in self.listed), "they cannot be sent"
        self.tier.check_integrity()


def settings_of(num_blocks: int = 100) -> StoreSettings:
    spec = parse_tier("acme://pool?gb=1", eviction="lru")
    return StoreSettings(spec=spec, block_bytes=SIZE, num_blocks=num_blocks, namespace=NAMESPACE, key=KEY)


@pytest.mark.parametrize("seeds", [range(500), pytest.param(range(500, 10_000), marks=THOROUGH)], ids=str)
def test_any_schedule_of_a_hostile_store_gives_misses_only(
    seeds: range, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.kv_transfer.tiers.tier.IoThreads", SteppedIo)
    monkeypatch.setattr(StoreSettings, "max_listed", 100)  # of endless scans
    caplog.set_level(logging.ERROR)
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        schedule = Schedule(seed)
        clock = SimpleNamespace(monotonic=schedule.clock)
        monkeypatch.setattr("tandem.kv_transfer.tiers.io_threads.time", clock)
        try:
            schedule.run()
        except BaseException as exc:
            exc.add_note(f"seed {seed}: misbehaves in {schedule.rate:.0%} of calls, hangs in {schedule.hang_rate:.0%}")
            raise
        stats = schedule.tier.stats()
        outcomes.update(stats.num_misses)
        outcomes["hit"] += stats.num_hits
    assert outcomes.keys() >= {"hit", "absent", "corrupt", "unreachable", "late", "abandoned"}, outcomes
    assert outcomes["hit"] > len(seeds), outcomes


class TestPlainStore(StoreContract):
    """The simplest store of another package keeps the contract."""

    key = KEY

    @override
    def open(self, num_blocks: int = 100, namespace: bytes = NAMESPACE) -> BlockStore:
        settings = replace(settings_of(num_blocks), block_bytes=5000, namespace=namespace, key=self.key)
        return ForeignStore(PlainStore(5000 + FOOTER_BYTES), settings)


class TestEncryptedPlainStore(TestPlainStore):
    key = StoreKey(KEY.secret, encrypts=True)

    def test_the_other_package_sees_neither_blocks_nor_names(self) -> None:
        store: Any = self.open()
        store.write(name_of(1), content(name_of(1)))
        ((seen, data),) = store._store.blocks.items()
        assert seen.digest != name_of(1).digest
        assert content(name_of(1)).tobytes()[:16] not in data.tobytes()


def test_bytes_that_change_after_they_were_checked_are_not_served() -> None:
    inner = PlainStore(SEALED_BYTES)
    store = ForeignStore(inner, settings_of())
    name = name_of(1)
    store.write(name, content(name, SIZE))
    found = store.read(name, np.empty(SIZE, np.uint8))
    inner.blocks[name][:] = 0
    assert np.array_equal(found, content(name, SIZE))
    assert read(store, name) is StoreFailure.CORRUPT
    assert read(store, name) is StoreFailure.ABSENT


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"block_bytes": 5}, "block_bytes=5 is not the size it got"),
        ({"num_threads": 0}, "num_threads=0 must be from 1 to 64"),
        ({"num_threads": 2.0}, "num_threads=2.0 must be from 1 to 64"),
        ({"prior": (0.0, 1e9)}, r"prior=\(0.0, 1000000000.0\) must be above 0"),
        ({"rescan_s": 0.0}, "rescan_s=0.0 must be 1 or more"),
        ({"shared_by": "friends"}, "shared_by='friends' must be worker, host or all"),
    ],
)
def test_what_a_kind_cannot_say_of_itself(said: dict[str, Any], message: str) -> None:
    store = PlainStore(SEALED_BYTES)
    vars(store).update(said)
    with pytest.raises(ConfigError, match=rf"tier='acme://pool\?gb=1': {message}"):
        ForeignStore(store, settings_of())


def test_who_shares_a_store_knows_it_by_one_name() -> None:
    def name_told(shared_by: str) -> str:
        store = PlainStore(SEALED_BYTES)
        store.shared_by = shared_by  # type: ignore[assignment]
        return ForeignStore(store, settings_of()).identity

    assert name_told("worker") == ""
    assert name_told("all") == f"acme://pool#raw/{KEY.folder_name(NAMESPACE)}"
    assert name_told("host").endswith(name_told("all"))
    assert name_told("host") != name_told("all")
