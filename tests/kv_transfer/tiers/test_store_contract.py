"""The contract of stores: the same tests for each of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tandem.kv_transfer.tiers.base import BlockName, StoreFailure
from tandem.kv_transfer.tiers.key import StoreKey
from tandem.kv_transfer.tiers.memory import MemoryStore
from tandem.kv_transfer.tiers.seal import FOOTER_BYTES, make_seal
from tandem.protocol.errors import ConfigError
from tandem.testing.store_contract import (
    BLOCK_BYTES,
    KEY,
    SharedStoreContract,
    StoreContract,
    chain,
    content,
    name_of,
    read,
)
from tests.support.store_world import IN_MEMORY, PERSISTENT, World

every_persistent_kind = pytest.mark.parametrize("world", PERSISTENT, indirect=True)


@pytest.mark.parametrize("world", IN_MEMORY, indirect=True)
class TestStoresInMemory(StoreContract):
    @pytest.fixture(autouse=True)
    def _choose(self, world: World) -> None:
        self.open = world.open  # type: ignore[method-assign]


@every_persistent_kind
class TestSharedStores(SharedStoreContract):
    @pytest.fixture(autouse=True)
    def _choose(self, world: World) -> None:
        self.open = world.open  # type: ignore[method-assign]


@every_persistent_kind
@pytest.mark.parametrize("differs", ["key", "encryption"])
def test_a_store_of_another_key_or_encryption_is_another_store(world: World, differs: str) -> None:
    """A worker deletes only blocks of its own key: two hosts with different keys would empty each other's store."""
    secret, encrypts = (bytes(32), world.key.encrypts) if differs == "key" else (KEY.secret, not world.key.encrypts)
    store, other = world.open(), world.open(key=StoreKey(secret, encrypts))
    store.write(name_of(1), content(name_of(1)))
    assert read(other, name_of(1)) is StoreFailure.ABSENT
    assert other.scan() == []
    assert read(store, name_of(1)) is True


@every_persistent_kind
def test_a_block_of_somebody_without_the_key_is_a_miss(world: World) -> None:
    """An attacker may write to the store but has another key: the bytes fit that key, and the place is ours."""
    store, forger = world.open(), make_seal(StoreKey(bytes(32), world.key.encrypts))
    name = name_of(1)
    store.write(name, content(name))
    poison = content(name_of(666))
    world.change(name, lambda _: b"".join(map(bytes, forger.seal(name, poison))))
    assert read(store, name) is StoreFailure.CORRUPT
    assert read(store, name) is StoreFailure.ABSENT


@every_persistent_kind
def test_an_encrypted_store_shows_neither_blocks_nor_names(world: World) -> None:
    store, names = world.open(), chain(1, 2)
    for name in names:
        store.write(name, content(name))
    stored = world.stored()
    seen = [content(name).tobytes()[start : start + 16] in stored for name in names for start in (0, 2000, 4900)]
    seen += [name.digest.hex().encode() in stored for name in names]
    assert seen == [not world.key.encrypts] * len(seen)


@pytest.mark.parametrize("world", ["disk", "object-file"], indirect=True)
def test_a_huge_file_under_a_blocks_name_is_not_brought_into_memory(world: World) -> None:
    store = world.open()
    store.write(name_of(1), content(name_of(1)))
    with world.path(name_of(1)).open("r+b") as file:
        file.write(b"x")
        file.truncate(10**12)
    assert read(store, name_of(1)) is StoreFailure.CORRUPT
    assert read(store, name_of(1)) is StoreFailure.ABSENT


def flip(position: int) -> Callable[[bytes], bytes]:
    def change(stored: bytes) -> bytes:
        changed = bytearray(stored)
        changed[position] ^= 1
        return bytes(changed)

    return change


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "first byte flipped": flip(0),
    "a middle byte flipped": flip(BLOCK_BYTES // 2),
    "last byte flipped": flip(BLOCK_BYTES - 1),
    "footer's magic flipped": flip(BLOCK_BYTES),
    "footer's nonce flipped": flip(BLOCK_BYTES + 12),
    "footer's name flipped": flip(BLOCK_BYTES + 30),
    "footer's tag flipped": flip(BLOCK_BYTES + FOOTER_BYTES - 1),
    "one byte short": lambda stored: stored[:-1],
    "without its footer": lambda stored: stored[:BLOCK_BYTES],
    "cut in the middle": lambda stored: stored[: BLOCK_BYTES // 2],
    "empty": lambda stored: b"",
    "zeros": lambda stored: bytes(len(stored)),
}


@every_persistent_kind
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_bytes_are_a_miss_and_the_block_is_gone(world: World, damage: str) -> None:
    store = world.open()
    for name in chain(1, 2):
        store.write(name, content(name))
    world.change(name_of(1), DAMAGES[damage])
    assert read(store, name_of(1)) is StoreFailure.CORRUPT
    assert read(store, name_of(1)) is StoreFailure.ABSENT
    assert store.scan() == [name_of(2, parent=1)]
    assert store.write(name_of(1), content(name_of(1))) is None
    assert read(store, name_of(1)) is True


@every_persistent_kind
@pytest.mark.parametrize("other", [name_of(2), name_of(1, parent=9)], ids=["digest", "parent"])
def test_a_block_under_another_name_is_a_miss(world: World, other: BlockName) -> None:
    store = world.open()
    taken = bytearray()
    for name in (name_of(1), other):
        store.write(name, content(name))
    world.change(name_of(1), lambda stored: (taken.extend(stored), stored)[1])
    world.change(other, lambda _: bytes(taken))
    assert read(store, other) is StoreFailure.CORRUPT


def test_a_full_slab_takes_a_block_again_after_one_was_deleted() -> None:
    store = World("memory", None).open(num_blocks=2)
    assert [store.write(name, content(name)) for name in chain(1, 2, 3)] == [None, None, StoreFailure.FULL]
    store.delete(name_of(1))
    assert store.write(name_of(4), content(name_of(4))) is None
    assert [read(store, name) for name in (name_of(2, parent=1), name_of(4))] == [True, True]
    assert isinstance(store.read(name_of(4), np.zeros(BLOCK_BYTES, np.uint8)), np.ndarray)


def test_host_memory_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host memory: 1000000\.0 GB do not fit: .* of memory are free"):
        MemoryStore(10**6, 10**9)


def test_host_memory_is_not_locked_for_a_gpu_that_never_touches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("torch would take the next power of two"))
    store = MemoryStore(BLOCK_BYTES, 3)
    assert store.write(name_of(1), content(name_of(1))) is None
    assert read(store, name_of(1)) is True
