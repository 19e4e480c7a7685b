from __future__ import annotations

import pytest

from tandem.kv_transfer.leases import Lease, LeaseFenced, LeaseReceived, LeaseReleased, LeaseTable
from tandem.protocol.messages import WorkerEpoch

P = WorkerEpoch("p", 1)


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable()


def grant(
    table: LeaseTable,
    request_id: str = "r",
    block_ids: tuple[int, ...] = (7, 8, 9),
    *,
    first_block: int = 2,
    now: float = 0.0,
) -> Lease:
    return table.grant(request_id, block_ids, first_block=first_block, sender=P, now=now, ttl_s=10.0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_are_received_once_all_arrived_and_the_sender_is_done(table: LeaseTable, order: tuple[int, ...]) -> None:
    lease = grant(table)
    with pytest.raises(AssertionError):
        grant(table)  # a second live lease of a request
    chunks = [(2, 2, [b"a", b"b"]), (4, 1, [])]
    for idx in order:
        table.chunk_arrived("r", lease.generation, *chunks[idx], now=1)
    assert table.handoff_done("r", lease.generation, 42, now=3) == LeaseReceived(lease, 42, [b"a", b"b", b""])
    assert table.held_block_ids == []
    table.check_integrity()


def test_an_expired_lease_keeps_its_blocks_until_the_sender_confirms(table: LeaseTable) -> None:
    lease = grant(table)
    assert table.expire(9.9) == []
    assert table.expire(10.0) == [LeaseFenced(lease, "the lease expired")]
    assert table.expire(99.0) == []
    assert table.fenced == [lease]
    assert table.held_block_ids == [7, 8, 9]
    assert table.num_quarantined_blocks == 3
    released = table.lease_closed("r", lease.generation, P)
    assert released == LeaseReleased(lease, reason="closed by the sender")
    assert table.held_block_ids == []


def test_nothing_is_received_after_the_deadline_even_before_expire_ran(table: LeaseTable) -> None:
    lease = grant(table)
    table.chunk_arrived("r", lease.generation, 2, 3, [], now=9)
    table.chunk_arrived("r", lease.generation, 2, 3, [], now=10.0)
    assert table.handoff_done("r", lease.generation, 42, now=10.0) is None
    assert table.ignored == {"chunk too late": 1, "done too late": 1}
    table.extend(P, [("r", lease.generation)], now=10)
    assert len(table.expire(10.0)) == 1, "a heartbeat does not revive it"


@pytest.mark.parametrize(("sender", "extends"), [(P, True), (WorkerEpoch("p", 2), False), (WorkerEpoch("q", 1), False)])
def test_only_its_senders_heartbeat_extends_a_lease(table: LeaseTable, sender: WorkerEpoch, extends: bool) -> None:
    lease = grant(table)
    table.extend(sender, [("r", lease.generation), ("other", 99)], now=9)
    assert (table.expire(18.9) == []) is extends
    assert len(table.expire(19.0)) == (1 if extends else 0)


def test_repeated_foreign_and_misplaced_messages_are_ignored_and_counted(table: LeaseTable) -> None:
    lease = grant(table)
    generation = lease.generation
    assert list(table.chunk_arrived("r", generation, 2, 2, [], now=1)) == [7, 8]
    for num_blocks in (2, 3):  # repeated, and in part
        assert not table.chunk_arrived("r", generation, 2, num_blocks, [], now=1)
    table.chunk_arrived("r", generation + 1, 4, 1, [], now=1)  # another generation
    table.chunk_arrived("s", generation, 4, 1, [], now=1)  # another request
    table.chunk_arrived("r", generation, 1, 1, [], now=1)  # before the lease
    table.chunk_arrived("r", generation, 4, 2, [], now=1)  # beyond it
    table.chunk_arrived("r", generation, 4, 1, [b"a", b"b"], now=1)  # checksums of other blocks
    table.lease_closed("r", generation, WorkerEpoch("p", 2))
    table.lease_closed("r", generation + 1, P)
    assert table.ignored == {
        "chunk repeated": 2,
        "chunk of no lease": 2,
        "chunk out of range": 3,
        "closed by another sender": 1,
        "closed of no lease": 1,
    }
    assert table.held_block_ids == [7, 8, 9]
    assert table.handoff_done("r", generation, 42, now=1) == LeaseReceived(lease, 42, [b"", b""])


@pytest.mark.parametrize("is_given_up", [False, True])
def test_leases_are_fenced_when_their_sender_is_given_up_end_when_it_dies(table: LeaseTable, is_given_up: bool) -> None:
    live, fenced = grant(table, "a", (1,)), grant(table, "b", (2,))
    table.grant("c", [3], first_block=0, sender=WorkerEpoch("p", 2), now=0, ttl_s=10)
    table.cancel("b")
    if is_given_up:
        assert table.give_up_sender(P) == [LeaseFenced(live, "p was given up")]
        assert table.give_up_sender(P) == []
        assert (table.fenced, table.num_live, table.num_quarantined_blocks) == ([live, fenced], 1, 2)
        table.chunk_arrived("a", live.generation, 2, 1, [], now=1)
    assert table.sender_lost(P) == [LeaseReleased(live, "p died"), LeaseReleased(fenced, "p died")]
    assert table.held_block_ids == [3]


def test_the_first_deadline_gives_the_sender_time_to_read_the_grant(table: LeaseTable) -> None:
    lease = table.grant("r", (7,), first_block=0, sender=P, now=0.0, ttl_s=1.0, first_ttl_s=30.0)
    assert table.expire(29.9) == []
    table.extend(P, [("r", lease.generation)], now=29.9)
    assert table.expire(30.8) == [], "a heartbeat that names it gives it ttl_s"
    assert table.expire(30.9) == [LeaseFenced(lease, "the lease expired")]


def test_from_the_first_chunk_on_heartbeats_vouch_for_a_lease(table: LeaseTable) -> None:
    lease = table.grant("r", (7,), first_block=0, sender=P, now=0.0, ttl_s=1.0, first_ttl_s=30.0)
    table.chunk_arrived("r", lease.generation, 0, 1, [], now=2.0)
    assert len(table.expire(3.0)) == 1


def test_only_its_own_sender_speaks_of_a_lease(table: LeaseTable) -> None:
    lease = grant(table)
    assert not table.is_foreign(lease.generation, P)
    assert table.is_foreign(lease.generation, WorkerEpoch("p", 2))
    assert table.is_foreign(lease.generation, WorkerEpoch("q", 1))
    assert not table.is_foreign(lease.generation + 1, WorkerEpoch("q", 1)), "without a lease: counted as such"
    assert table.ignored == {"written by another sender": 2}
