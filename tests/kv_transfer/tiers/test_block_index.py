"""The index of a tier: what it takes in from a listing whose order says little."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import pytest

from tandem.kv_transfer.eviction import POLICIES
from tandem.kv_transfer.eviction.lru import LRU
from tandem.kv_transfer.tiers.base import BlockName, parents_first
from tandem.kv_transfer.tiers.block_index import BlockIndex
from tandem.testing.store_contract import chain, digest_of

CHAINS = [*chain(1, 2, 3), *chain(11, 12)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_a_listing_in_any_order_leaves_no_block_without_its_parent(policy: str, capacity: int) -> None:
    # An object store's clock counts whole seconds, and within one the order is that of the names, so any order occurs.
    for listing in itertools.permutations(CHAINS):
        index = BlockIndex(POLICIES[policy](capacity), capacity)
        deleted: list[BlockName] = []
        index.begin_scan()
        for _ in index.reconcile(parents_first(listing), deleted.extend):
            pass
        index.end_scan()
        kept = [name for name in CHAINS if name.digest in index]
        assert len(kept) == capacity
        assert sorted(deleted) == sorted(set(CHAINS) - set(kept))
        assert index.num_evictions == len(deleted)
        assert all(name.parent is None or name.parent in index for name in kept), (listing, kept)
        index.check_integrity(())


def test_a_block_whose_parent_is_nowhere_is_kept_until_its_room_is_needed() -> None:
    # Its parent may be under way: another process writes its blocks with several threads.
    index = BlockIndex(POLICIES["lru"](2), 2)
    index.begin_scan()
    list(index.reconcile(chain(1, 2)[1:], lambda _: None))
    index.end_scan()
    assert index.digests() == [digest_of(2)]


def test_parents_come_first_and_the_order_stays_otherwise() -> None:
    one, two, three, eleven, twelve = CHAINS
    assert parents_first([three, twelve, two, one, eleven]) == [one, two, three, eleven, twelve]
    assert parents_first([eleven, one, twelve]) == [eleven, one, twelve]
    assert parents_first([two, two]) == [two]
    circle = [BlockName(digest_of(1), digest_of(2)), BlockName(digest_of(2), digest_of(1))]
    assert sorted(parents_first(circle)) == sorted(circle)
    itself = BlockName(digest_of(1), digest_of(1))
    assert parents_first([itself]) == [itself]


def test_the_end_of_an_answer_is_noted_at_its_deepest_stored_block() -> None:
    noted: list[tuple[Hashable, bool]] = []

    class Noting(LRU):
        def note_end(self, key: Hashable, *, has_calls: bool) -> None:
            noted.append((key, has_calls))

    index = BlockIndex(Noting(4), 4)
    for name in chain(1, 2, 3):
        assert index.try_reserve(name) == []
    digests = [digest_of(number) for number in (2, 3, 4, 5)]  # the last two are not stored, or not yet
    index.note_end(digests, has_calls=True)
    index.note_end(digests[2:], has_calls=False)
    index.note_end([], has_calls=False)
    assert noted == [(digest_of(3), True)]
