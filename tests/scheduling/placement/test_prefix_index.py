from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.digest import DIGEST_BYTES, join_digests
from tandem.protocol.messages import BlockEvents, BlockSnapshot
from tandem.scheduling.placement.prefix_index import PrefixIndex


def chain(name: str, num_blocks: int) -> list[bytes]:
    return [f"{name}/{i}".encode().ljust(DIGEST_BYTES, b".") for i in range(num_blocks)]


def make_events(
    sequence: int,
    *,
    stored: list[bytes] | None = None,
    removed: list[bytes] | None = None,
    worker_id: str = "w0",
    epoch: int = 1,
) -> BlockEvents:
    runs = {"stored": join_digests(stored or []), "removed": join_digests(removed or [])}
    return BlockEvents(worker_id=worker_id, epoch=epoch, sequence=sequence, **runs)


def make_snapshot(
    sequence: int, digests: list[bytes], *, worker_id: str = "w0", epoch: int = 1, part: int = 0, is_last: bool = True
) -> BlockSnapshot:
    run = join_digests(digests)
    about = {"worker_id": worker_id, "epoch": epoch, "sequence": sequence}
    return BlockSnapshot(**about, digests=run, part=part, is_last=is_last)  # type: ignore[arg-type]


def parts_of(sequence: int, digests: list[bytes], *, epoch: int = 1) -> list[BlockSnapshot]:
    """A snapshot of these blocks, one in each part."""
    last = len(digests) - 1
    return [
        make_snapshot(sequence, [digest], epoch=epoch, part=part, is_last=part == last)
        for part, digest in enumerate(digests)
    ]


def make_index(*worker_ids: str) -> PrefixIndex:
    index = PrefixIndex()
    for worker_id in worker_ids:
        index.add_worker(worker_id, epoch=1)
    return index


def test_speculative_blocks_are_not_held() -> None:
    index = make_index("w0", "w1")
    prompt = chain("a", 7)
    index.apply(make_events(1, stored=prompt[:3]))
    index.speculate({"w0", "w1"}, prompt, 0.0)
    assert index.longest_prefix(prompt, now=0.0) == {"w0": 7, "w1": 7}
    assert [index.count_held(worker_id, prompt, 7) for worker_id in ("w0", "w1", "unknown")] == [3, 0, 0]
    assert [index.count_held("w0", prompt, num) for num in range(5)] == [0, 1, 2, 3, 3]


def test_a_gap_asks_for_a_snapshot_until_it_comes() -> None:
    index = make_index("w0")
    blocks = chain("a", 4)
    assert not index.apply(make_events(1, stored=blocks[:1]))
    assert index.apply(make_events(3, stored=blocks[2:3]))
    assert index.apply(make_events(4, stored=blocks[3:]))
    assert index.longest_prefix(blocks, now=0.0) == {"w0": 1}
    index.apply_snapshot(make_snapshot(4, blocks))
    assert not index.apply(make_events(4, removed=blocks))  # contained in the snapshot
    assert not index.apply(make_events(5, removed=blocks[3:]))
    assert index.longest_prefix(blocks, now=0.0) == {"w0": 3}


def test_a_snapshot_in_parts_replaces_all_blocks_and_is_complete_with_its_last_part() -> None:
    index = make_index("w0")
    blocks = chain("a", 3)
    index.apply(make_events(1, stored=chain("b", 2)))
    first, second, last = parts_of(5, blocks)
    assert [index.apply_snapshot(first), index.apply_snapshot(second)] == [False, False]
    assert index.apply(make_events(6, stored=chain("c", 1))), "it cannot be applied before the whole snapshot"
    assert index.apply_snapshot(last)
    assert (index.longest_prefix(blocks, now=0.0), len(index)) == ({"w0": 3}, 3)
    assert not index.apply(make_events(6, stored=chain("c", 1)))
    assert len(index) == 4


@pytest.mark.parametrize("lost", range(3))
@pytest.mark.parametrize("is_behind", [False, True], ids=["in step", "after a gap"])
def test_a_snapshot_that_lacks_a_part_is_never_complete(lost: int, is_behind: bool) -> None:
    index = make_index("w0")
    if is_behind:
        index.apply(make_events(3))
    parts, again = parts_of(5, chain("a", 3)), parts_of(6, chain("b", 3))
    for part in parts[:lost] + parts[lost + 1 :]:
        assert not index.apply_snapshot(part)
    for part in again[:lost] + again[lost + 1 :]:  # no part of one is taken for that of the other
        assert not index.apply_snapshot(part)
    assert [index.apply_snapshot(part) for part in again] == [False, False, True]
    assert (index.longest_prefix(chain("b", 3), now=0.0), len(index)) == ({"w0": 3}, 3)


def test_a_late_snapshot_in_parts_changes_nothing_and_is_not_awaited() -> None:
    index = make_index("w0")
    for number, block in enumerate(chain("a", 3), 1):
        index.apply(make_events(number, stored=[block]))
    assert [index.apply_snapshot(part) for part in parts_of(2, chain("b", 3))] == [False, False, True]
    assert (index.longest_prefix(chain("a", 3), now=0.0), len(index)) == ({"w0": 3}, 3)


def test_parts_of_another_epoch_do_not_belong_to_this_snapshot() -> None:
    index = make_index("w0")
    first, second, last = parts_of(5, chain("a", 3))
    index.apply_snapshot(first)
    newer = parts_of(1, chain("b", 3), epoch=2)
    assert [index.apply_snapshot(part) for part in newer[1:]] == [False, False], "its first part was lost"
    assert [index.apply_snapshot(part) for part in (second, last)] == [False, True], "a dead process awaits nothing"
    assert [index.apply_snapshot(part) for part in newer] == [False, False, True]
    assert (index.longest_prefix(chain("b", 3), now=0.0), len(index)) == ({"w0": 3}, 3)


def test_a_new_epoch_forgets_the_old_one() -> None:
    index = make_index("w0")
    blocks = chain("a", 2)
    index.apply(make_events(1, stored=blocks))
    assert index.apply(make_events(7, stored=[], epoch=2))
    assert len(index) == 0
    assert not index.apply(make_events(2, stored=blocks, epoch=1))
    index.apply_snapshot(make_snapshot(7, blocks[:1], epoch=2))
    assert index.longest_prefix(blocks, now=0.0) == {"w0": 1}


def test_a_worker_that_leaves_takes_all_with_it_and_its_bit_is_reused() -> None:
    index = make_index("w0", "w1")
    blocks = chain("a", 3)
    index.apply(make_events(1, stored=blocks))
    index.apply(make_events(1, stored=blocks[:1], worker_id="w1"))
    index.speculate({"w0"}, chain("b", 2), now=0.0)
    index.remove_worker("w0")
    assert not index.apply(make_events(2, stored=chain("c", 2)))  # a late event does not bring it back
    assert len(index) == 1
    index.add_worker("w2", epoch=1)
    assert index.longest_prefix(blocks, now=0.0) == {"w1": 1}
    assert index.longest_prefix(chain("b", 2), now=0.0) == {}
    assert index.num_blocks("w0") == 0


def test_later_requests_see_a_decision_for_a_short_time() -> None:
    index = make_index("w0", "w1")
    prompt = chain("a", 4)
    index.apply(make_events(1, stored=prompt[:1], worker_id="w1"))
    index.speculate({"w0"}, prompt, now=10.0)
    assert index.longest_prefix(prompt, now=10.9) == {"w0": 4, "w1": 1}
    assert index.longest_prefix(prompt, now=12.1) == {"w1": 1}
    assert len(index) == 1


class NaiveIndex:
    """One set per worker, walked block by block."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[bytes]] = {}

    def longest_prefix(self, digests: list[bytes]) -> dict[str, int]:
        depths: dict[str, int] = {}
        for worker_id, held in self.blocks.items():
            depth = 0
            while depth < len(digests) and digests[depth] in held:
                depth += 1
            if depth:
                depths[worker_id] = depth
        return depths


class FakeWorker:
    """Holds a prefix of each chain and reports changes, over a channel that may lose, repeat and reorder."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.depths = dict.fromkeys("abc", 0)
        self.epoch = 1
        self.sequence = 0
        self.in_flight: list[BlockEvents] = []

    def set_depth(self, name: str, depth: int) -> None:
        old, self.depths[name] = self.depths[name], depth
        blocks = chain(name, 8)
        self.sequence += 1
        self.in_flight.append(
            make_events(
                self.sequence,
                stored=blocks[old:depth],
                removed=blocks[depth:old],
                worker_id=self.worker_id,
                epoch=self.epoch,
            )
        )

    def restart(self) -> None:
        self.depths = dict.fromkeys("abc", 0)
        self.epoch += 1
        self.sequence = 0
        self.in_flight.clear()

    def held(self) -> set[bytes]:
        return {block for name, depth in self.depths.items() for block in chain(name, depth)}

    def snapshot(self) -> list[BlockSnapshot]:
        """Its blocks in two parts."""
        held = sorted(self.held())
        halves = [held[: len(held) // 2], held[len(held) // 2 :]]
        about = {"worker_id": self.worker_id, "epoch": self.epoch}
        return [
            make_snapshot(self.sequence, half, part=part, is_last=part == 1, **about)  # type: ignore[arg-type]
            for part, half in enumerate(halves)
        ]


WORKERS = ("w0", "w1", "w2")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.sampled_from(WORKERS), st.sampled_from("abc"), st.integers(0, 8)),
        st.tuples(
            st.sampled_from(["deliver", "lose", "repeat", "swap", "restart", "leave"]),
            st.sampled_from(WORKERS),
            st.just("a"),
            st.just(0),
        ),
    ),
    max_size=60,
)


@given(steps=STEPS)
def test_equals_the_naive_index_once_snapshots_are_answered(steps: list[tuple[str, str, str, int]]) -> None:
    index = make_index(*WORKERS)
    workers = {worker_id: FakeWorker(worker_id) for worker_id in WORKERS}

    def deliver(worker: FakeWorker, events: BlockEvents) -> None:
        if index.apply(events):
            for part in worker.snapshot():
                index.apply_snapshot(part)

    for action, worker_id, name, depth in steps:
        worker = workers[worker_id]
        channel = worker.in_flight
        if action == "set":
            worker.set_depth(name, depth)
        elif action == "restart":
            worker.restart()
        elif action == "leave":
            worker.restart()
            index.add_worker(worker_id, worker.epoch)
        elif action == "swap":
            channel[:2] = reversed(channel[:2])
        elif channel:
            events = channel[0] if action == "repeat" else channel.pop(0)
            if action != "lose":
                deliver(worker, events)
    for worker in workers.values():
        worker.set_depth("a", 1)  # lost events show as a gap at the next one
        for events in worker.in_flight:
            deliver(worker, events)
    naive = NaiveIndex()
    naive.blocks = {worker_id: worker.held() for worker_id, worker in workers.items()}
    for name in "abc":
        for length in range(9):
            prompt = chain(name, length)
            assert index.longest_prefix(prompt, now=0.0) == naive.longest_prefix(prompt)
    assert len(index) == len(set().union(*naive.blocks.values()))
    assert {w: index.num_blocks(w) for w in WORKERS} == {w: len(held) for w, held in naive.blocks.items()}
