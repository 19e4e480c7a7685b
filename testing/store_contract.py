"""The contract of KV stores as tests, for stores of any package. With pytest, three lines prove one:

    from tandem.testing.store_contract import StoreContract

    class TestAcme(StoreContract):
        spec = "acme://pool?gb=1"

The store is opened as a worker opens it: by its entry point, its blocks sealed, what it raises caught.
`SharedStoreContract` asks more, of stores whose blocks outlive the worker.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tandem.kv_transfer.tiers.base import Block, BlockName, BlockStore, StoreFailure, StoreSettings
from tandem.kv_transfer.tiers.key import StoreKey
from tandem.kv_transfer.tiers.kinds import check_spec, open_store
from tandem.protocol.config import parse_tier

BLOCK_BYTES = 5000
NAMESPACE = bytes(range(16))
KEY = StoreKey(bytes(range(32)))


def digest_of(number: int) -> bytes:
    """The digest of this block. The first byte differs: stores may sort by it."""
    return number.to_bytes(16, "big")[::-1]


def name_of(number: int, parent: int | None = None) -> BlockName:
    """The name of this block behind that one."""
    return BlockName(digest_of(number), None if parent is None else digest_of(parent))


def chain(*numbers: int) -> list[BlockName]:
    """Names of the blocks of a chain in this order."""
    return [name_of(number, parent) for number, parent in zip(numbers, (None, *numbers[:-1]), strict=True)]


def content(name: BlockName, size: int = BLOCK_BYTES) -> Block:
    """The bytes of a block with this digest."""
    return np.random.default_rng(list(name.digest)).integers(0, 256, size, dtype=np.uint8)


def read(store: BlockStore, name: BlockName) -> StoreFailure | bool:
    """Whether the block's bytes are right, or why it could not be read."""
    data = store.read(name, np.zeros(store.block_bytes, np.uint8))
    return data if isinstance(data, StoreFailure) else np.array_equal(data, content(name, store.block_bytes))


def write(store: BlockStore, *names: BlockName) -> None:
    """Write these blocks, which the store must take."""
    for name in names:
        failure = store.write(name, content(name, store.block_bytes))
        assert failure is None, f"a block is not written: {failure}"


class StoreContract:
    """What every store must do. Set `spec`, or open the store yourself."""

    spec = ""

    def open(self, num_blocks: int = 100, namespace: bytes = NAMESPACE) -> BlockStore:
        """An empty store for so many blocks, or, of a shared store, one with the blocks that were written before."""
        spec = parse_tier(self.spec, eviction="hit-density")
        check_spec(spec, is_local=True)
        return open_store(
            StoreSettings(spec=spec, block_bytes=BLOCK_BYTES, num_blocks=num_blocks, namespace=namespace, key=KEY)
        )

    def test_bytes_come_back_only_under_their_name(self) -> None:
        """A block that was not written is absent."""
        store, names = self.open(), chain(1, 2, 3)
        write(store, *names[:2])
        assert [read(store, name) for name in names] == [True, True, StoreFailure.ABSENT]

    def test_what_was_written_does_not_follow_the_buffer(self) -> None:
        """The caller uses its buffer again."""
        store, data = self.open(), content(name_of(1))
        assert store.write(name_of(1), data) is None
        data[:] = 0
        assert read(store, name_of(1)) is True

    def test_writing_a_block_again_changes_nothing(self) -> None:
        """Several workers may write one block."""
        store = self.open(num_blocks=1)
        write(store, *[name_of(1)] * 3)
        assert read(store, name_of(1)) is True
        assert store.scan() == [name_of(1)]

    def test_a_deleted_block_is_absent(self) -> None:
        """Deleting it again is no error."""
        store = self.open()
        write(store, *chain(1, 2))
        assert [store.delete(name_of(1)) for _ in range(2)] == [None, None]
        assert read(store, name_of(1)) is StoreFailure.ABSENT
        assert store.scan() == [name_of(2, parent=1)]

    def test_threads_at_once(self) -> None:
        """Each I/O thread calls it when it likes."""
        store = self.open()

        def work(thread: int) -> list[object]:
            results: list[object] = []
            for number in range(24):
                name = name_of(number if number % 2 else 1000 * thread + number)  # every other one is everybody's
                results += [store.write(name, content(name)), read(store, name)]
            return results

        with ThreadPoolExecutor(4) as threads:
            assert [list(results) for results in threads.map(work, range(1, 5))] == [[None, True] * 24] * 4
        found = store.scan()
        assert not isinstance(found, StoreFailure)
        assert len(found) == 12 + 4 * 12
        assert all(read(store, name) is True for name in found)

    def test_a_full_store_says_so_or_takes_more_and_keeps_what_it_has(self) -> None:
        """Its tier makes room for later blocks, and knows best which to give up."""
        store, names = self.open(num_blocks=2), chain(*range(1, 9))
        told = [store.write(name, content(name)) for name in names]
        assert set(told) <= {None, StoreFailure.FULL}
        assert told[:2] == [None, None]
        expected = [StoreFailure.ABSENT if failure else True for failure in told]
        assert [read(store, name) for name in names] == expected
        store.delete(names[0])
        write(store, name_of(99))
        assert read(store, name_of(99)) is True


class SharedStoreContract(StoreContract):
    """What stores must do besides whose blocks outlive the worker, or are found by others."""

    def test_blocks_outlive_the_store(self) -> None:
        """A restarted worker finds them."""
        store, names = self.open(), chain(1, 2, 3)
        write(store, *names)
        store.close()
        store = self.open()
        found = store.scan()
        assert not isinstance(found, StoreFailure)
        assert set(found) == set(names)
        assert [read(store, name) for name in names] == [True] * 3

    def test_namespaces_do_not_mix(self) -> None:
        """`StoreSettings.folder` tells models, keys and codecs apart."""
        store, other = self.open(), self.open(namespace=bytes(16))
        write(store, name_of(1))
        assert read(other, name_of(1)) is StoreFailure.ABSENT
        assert other.scan() == []
