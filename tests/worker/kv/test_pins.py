"""What pins keep: the right blocks, never more than the bound, and nothing once they are over."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tandem.engine.block_pool import BlockPool
from tandem.worker.kv.pins import KeptBlocks, WorkerPinTable

BOUND = 4


def digests(*names: int) -> list[bytes]:
    return [bytes([name]) * 16 for name in names]


def names(chosen: set[bytes]) -> list[int]:
    return sorted(digest[0] for digest in chosen)


class Cache:
    """A pool whose cached blocks pins keep, and their table."""

    def __init__(self, num_blocks: int = 12, bound: int = BOUND) -> None:
        self.pool = BlockPool(num_blocks)
        self.table = WorkerPinTable({"pool": KeptBlocks(self.pool, bound)})

    @property
    def kept(self) -> list[int]:
        return names(self.pool.pinned_digests())

    def store(self, *new: int, now: float = 0.0) -> None:
        """Cache these blocks as one chain, evicting others if need be."""
        blocks = self.pool.try_allocate(len(new))
        assert blocks is not None
        for block, digest in zip(blocks, digests(*new), strict=True):
            self.pool.publish(block, digest)
        self.pool.release(blocks)
        self.table.changed("pool", *self.pool.take_events(), now)

    def pin(self, pin_id: str, *chain: int, ttl_s: float = 10.0, now: float = 0.0) -> None:
        self.table.pin(pin_id, digests(*chain), ttl_s, now)


def test_a_shallower_block_that_comes_late_takes_the_place_of_a_deeper_one() -> None:
    cache = Cache(bound=2)
    cache.store(2, 3)
    cache.pin("a", 1, 2, 3)
    assert cache.kept == [2]  # nothing beyond the bound could be kept of this chain anyway
    cache.pin("a", 1, 2)
    cache.pin("b", 3)
    assert cache.kept == [2, 3]
    cache.store(1, now=1.0)
    cache.table.pump(1.5)
    assert cache.kept == [2, 3]
    cache.table.pump(2.0)
    assert cache.kept == [1, 2]


def test_without_room_for_pins_nothing_is_pinned() -> None:
    cache = Cache(bound=0)
    cache.store(1)
    cache.pin("a", 1)
    assert (cache.kept, len(cache.table)) == ([], 0)


def test_a_time_that_is_over_ends_the_pin() -> None:
    cache = Cache()
    cache.store(1)
    cache.pin("a", 1)
    cache.pin("a", 1, ttl_s=0.0)
    assert (cache.kept, len(cache.table)) == ([], 0)


class PinMachine(RuleBasedStateMachine):
    """Any order of pinning, unpinning, waiting, storing and evicting, against what should be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.cache = Cache(num_blocks=8)
        self.pins: dict[str, tuple[tuple[int, ...], float]] = {}

    @rule(pin_id=st.sampled_from("abc"), start=st.integers(0, 3), length=st.integers(0, 6), ttl_s=st.integers(1, 6))
    def pin(self, pin_id: str, start: int, length: int, ttl_s: int) -> None:
        # Chains that share a beginning: block 0, then blocks of their own.
        chain = ([0] + [10 * start + depth for depth in range(1, 6)])[:length]
        self.cache.pin(pin_id, *chain, ttl_s=ttl_s, now=self.now)
        self.pins[pin_id] = (tuple(chain[:BOUND]), self.now + ttl_s)

    @rule(pin_id=st.sampled_from("abc"))
    def unpin(self, pin_id: str) -> None:
        self.cache.table.unpin(pin_id)
        self.pins.pop(pin_id, None)

    @rule(start=st.integers(0, 3), length=st.integers(1, 6))
    def store(self, start: int, length: int) -> None:
        self.cache.store(*([0] + [10 * start + depth for depth in range(1, 6)])[:length], now=self.now)

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        blocks = self.cache.pool.try_allocate(count)
        assert blocks is not None, "pins kept a request from its room"
        self.cache.pool.release(blocks)
        self.cache.table.changed("pool", *self.cache.pool.take_events(), self.now)

    @rule(seconds=st.integers(1, 3))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.cache.table.pump(self.now)
        self.pins = {pin_id: pin for pin_id, pin in self.pins.items() if pin[1] > self.now}
        expected: list[int] = []
        for chain, _ in self.pins.values():
            present = [name for name in chain if digests(name)[0] in self.cache.pool and name not in expected]
            expected += present[: BOUND - len(expected)]
        assert self.cache.kept == sorted(expected)

    @invariant()
    def keeps_only_what_it_may(self) -> None:
        self.cache.table.check_integrity()
        self.cache.pool.check_integrity(idle=True)
        kept = self.cache.kept
        assert len(kept) <= BOUND
        assert set(kept) <= {name for chain, _ in self.pins.values() for name in chain}

    def teardown(self) -> None:
        for pin_id in "abc":
            self.cache.table.unpin(pin_id)
        assert self.cache.kept == []


TestPinMachine = PinMachine.TestCase
