from __future__ import annotations

import pytest

from tandem.kv_transfer.outbox import HandoffEnded, LeaseEnded, Outbox
from tandem.kv_transfer.outgoing_handoff import BlockWrite
from tandem.kv_transfer.transport.base import TransferState
from tandem.protocol.errors import TransferError
from tandem.protocol.messages import FINISHED_EARLY, ChunkArrived, HandoffDone, WorkerEpoch

D = WorkerEpoch("d", 1)
REVOKED = "revoked by the receiver: the KV did not arrive in time, or the request has ended"
DONE, FAILED, LOST = TransferState.DONE, TransferState.FAILED, TransferState.LOST


def open_handoff(outbox: Outbox, request_id: str = "r", num_blocks: int = 4) -> int:
    return outbox.open(request_id, D, num_blocks=num_blocks, grant_deadline=30)


def grant(
    outbox: Outbox,
    block_ids: tuple[int, ...] = (70, 80, 90),
    *,
    request_id: str = "r",
    generation: int = 5,
    first_block: int = 1,
) -> None:
    outbox.granted(request_id, D, generation=generation, first_block=first_block, block_ids=block_ids, ttl_s=10, now=0)


def writing_outbox() -> tuple[Outbox, BlockWrite]:
    """An outbox with a handoff of four blocks, three of them granted, and one write in flight."""
    outbox = Outbox()
    open_handoff(outbox)
    grant(outbox)
    outbox.blocks_computed("r", [10, 11], 2)
    (write,) = outbox.next_writes()
    return outbox, write


def summary(write: BlockWrite) -> tuple[list[int], list[int], int]:
    assert isinstance(write.notification, ChunkArrived)
    return write.local_block_ids, write.remote_block_ids, write.notification.first_block


def test_a_write_has_a_bound() -> None:
    outbox = Outbox(max_write_blocks=2)
    open_handoff(outbox, num_blocks=6)
    grant(outbox, (70, 80, 90, 95, 97))
    outbox.blocks_computed("r", [10, 11, 12, 13, 14, 15], 6)
    outbox.first_tokens("r", (42,))
    *chunks, done = outbox.next_writes()
    assert [summary(write) for write in chunks] == [([11, 12], [70, 80], 1), ([13, 14], [90, 95], 3), ([15], [97], 5)]
    for write in (*chunks, done):
        outbox.write_settled(write, DONE)
    [ended] = outbox.take_ended()
    assert isinstance(ended, HandoffEnded)
    assert ended.is_delivered


@pytest.mark.parametrize("is_grant_early", [True, False])
def test_blocks_go_out_as_they_are_computed_and_done_goes_last(is_grant_early: bool) -> None:
    outbox = Outbox()
    if is_grant_early:
        grant(outbox)
    handoff_id = open_handoff(outbox)
    assert outbox.next_writes() == []
    if not is_grant_early:
        grant(outbox)
    outbox.blocks_computed("r", [10], 1)
    assert outbox.next_writes() == []  # the receiver has it cached
    outbox.blocks_computed("r", [10, 11, 12], 3)
    (first,) = outbox.next_writes()
    assert summary(first) == ([11, 12], [70, 80], 1)
    assert outbox.next_writes() == []
    outbox.blocks_computed("r", [10, 11, 12, 13], 4)
    outbox.first_tokens("r", (42,))
    second, done = outbox.next_writes()
    assert summary(second) == ([13], [90], 3)
    assert done.notification == HandoffDone(request_id="r", generation=5, first_token_ids=(42,))
    assert done.remote_block_ids == []
    for write in (first, second):
        outbox.write_settled(write, DONE)
    assert outbox.take_ended() == []
    assert outbox.heartbeat_handoffs == [("r", 5)]
    outbox.write_settled(done, DONE)
    assert outbox.take_ended() == [HandoffEnded(handoff_id, "r", True, "")]
    assert outbox.num_open == 0


def test_a_receiver_that_missed_the_last_message_gets_it_when_it_asks() -> None:
    outbox, write = writing_outbox()
    outbox.blocks_computed("r", [10, 11, 12, 13], 4)
    outbox.first_tokens("r", (42,))
    for late in (write, *outbox.next_writes()):
        outbox.write_settled(late, DONE)
    (ended,) = outbox.take_ended()
    assert isinstance(ended, HandoffEnded)
    assert ended.is_delivered
    for _ in range(2):
        outbox.revoked("r", D, 5)
        assert outbox.take_ended() == [LeaseEnded(D, "r", 5, REVOKED, (42,))]


@pytest.mark.parametrize("state", [TransferState.DONE, TransferState.FAILED])
def test_only_what_was_written_whole_comes_with_its_first_token(state: TransferState) -> None:
    outbox, write = writing_outbox()
    outbox.blocks_computed("r", [10, 11, 12, 13], 4)
    outbox.first_tokens("r", (42,))
    writes = outbox.next_writes()
    outbox.write_settled(write, state)
    outbox.revoked("r", D, 5)
    for late in writes:
        outbox.write_settled(late, DONE)
    tokens = [ended.first_token_ids for ended in outbox.take_ended() if isinstance(ended, LeaseEnded)]
    assert tokens == [(42,) if state is DONE else ()]


def test_a_grant_later_than_the_end_of_its_handoff_is_given_back_at_once() -> None:
    outbox = Outbox()
    open_handoff(outbox)
    outbox.refused("r", D, "no room")
    assert outbox.take_ended() == [HandoffEnded(1, "r", False, "no room")]
    open_handoff(outbox)
    outbox.cancel("r", FINISHED_EARLY)
    assert outbox.take_ended() == [HandoffEnded(2, "r", False, FINISHED_EARLY)]
    grant(outbox)
    assert outbox.take_ended() == [LeaseEnded(D, "r", 5, FINISHED_EARLY)]
    grant(outbox)
    assert outbox.take_ended() == []


@pytest.mark.parametrize("is_revoked", [True, False])
def test_an_early_grant_is_given_back(is_revoked: bool) -> None:
    outbox = Outbox()
    grant(outbox)
    outbox.expire(9.9)
    assert outbox.take_ended() == []
    outbox.revoked("r", D, 5) if is_revoked else outbox.expire(10.0)
    reason = REVOKED if is_revoked else "the request did not come in time"
    assert outbox.take_ended() == [LeaseEnded(D, "r", 5, reason)]
    open_handoff(outbox)
    assert outbox.heartbeat_handoffs == [("r", 0)]


@pytest.mark.parametrize("count", [2, 4])
def test_a_grant_of_the_wrong_size_is_given_back(count: int) -> None:
    outbox = Outbox()
    open_handoff(outbox)
    grant(outbox, tuple(range(count)))
    lease_ended, handoff_ended = outbox.take_ended()
    assert isinstance(lease_ended, LeaseEnded)
    assert handoff_ended == HandoffEnded(1, "r", False, f"granted {count} blocks from 1 on for 4 blocks")


def test_a_failed_write_fails_the_handoff_even_if_done_went_through() -> None:
    outbox, write = writing_outbox()
    outbox.blocks_computed("r", [10, 11, 12, 13], 4)
    outbox.first_tokens("r", (42,))
    chunk, done = outbox.next_writes()
    outbox.write_settled(done, DONE)
    outbox.write_settled(chunk, DONE)
    outbox.write_settled(write, FAILED)
    assert outbox.take_ended() == [
        LeaseEnded(D, "r", 5, "a write to d is failed"),
        HandoffEnded(1, "r", False, "a write to d is failed"),
    ]


def test_a_lost_receiver_ends_its_handoffs_silently() -> None:
    outbox, write = writing_outbox()
    open_handoff(outbox, "waiting")
    grant(outbox, request_id="early", generation=6)
    outbox.receiver_lost(WorkerEpoch("d", 2))
    assert outbox.take_ended() == []
    outbox.receiver_lost(D)
    outbox.write_settled(write, LOST)
    outbox.expire(1000)
    ended = [HandoffEnded(2, "waiting", False, "d is gone"), HandoffEnded(1, "r", False, "d is gone")]
    assert outbox.take_ended() == ended
    outbox.check_integrity()


def test_a_lost_notification_alone_keeps_no_block_in_quarantine() -> None:
    outbox, chunk = writing_outbox()
    outbox.blocks_computed("r", [10, 11, 12, 13], 4)
    outbox.first_tokens("r", (42,))
    rest, done = outbox.next_writes()
    for write, state in ((chunk, DONE), (rest, DONE), (done, LOST)):
        outbox.write_settled(write, state)
    assert isinstance(outbox.take_ended()[0], LeaseEnded)  # the last word carried no block that could land


def test_a_request_can_be_opened_again_while_its_old_writes_drain() -> None:
    outbox, write = writing_outbox()
    with pytest.raises(TransferError):
        open_handoff(outbox)
    outbox.cancel("r")
    assert open_handoff(outbox) == 2
    grant(outbox, generation=6)
    outbox.blocks_computed("r", [20, 21], 2)
    (new_write,) = outbox.next_writes()
    outbox.write_settled(write, DONE)
    assert outbox.take_ended() == [LeaseEnded(D, "r", 5, "cancelled"), HandoffEnded(1, "r", False, "cancelled")]
    assert outbox.heartbeat_handoffs == [("r", 6)]
    assert summary(new_write) == ([21], [70], 1)
    outbox.check_integrity()


def test_a_second_lease_of_a_granted_request_is_given_back() -> None:
    outbox, _ = writing_outbox()
    grant(outbox)  # repeated: ignored
    grant(outbox, generation=6)
    assert outbox.take_ended() == [LeaseEnded(D, "r", 6, "the request has another lease")]


def test_handoffs_of_a_request_are_found_without_looking_at_others() -> None:
    num_compared = 0

    class RequestId(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

    outbox = Outbox()
    for number in range(1000):
        open_handoff(outbox, RequestId(f"r{number}"))
    outbox.open("r7", WorkerEpoch("another", 1), num_blocks=4)
    num_compared = 0
    outbox.requested("r7", grant_deadline=9)
    outbox.blocks_computed("r7", [1], 1)
    outbox.first_tokens("r7", (1,))
    outbox.cancel("r7")
    assert num_compared < 50
    outbox.check_integrity()
    assert [ended.request_id for ended in outbox.take_ended()] == ["r7", "r7"]
    assert outbox.num_open == 999
