from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.config import RouterConfig
from protocol.errors import NoWorker
from protocol.messages import BlockEvents, Role, WorkerState
from router.cost_model import CostModel
from router.placement import Candidate, Held, Placement, Placer, _preference, _Request
from router.prefix_index import PrefixIndex
from router.registry import Registry, can_decode, can_prefill
from tests.router.builders import add_ready, make_card


class Pool:
    """A registry with everything a placer needs."""

    def __init__(self, *, local_prefill: bool = True) -> None:
        self.registry = Registry()
        self.index = PrefixIndex()
        self.costs = CostModel()
        self.placer = Placer(self.registry, self.index, self.costs, RouterConfig(local_prefill=local_prefill))

    def add(self, worker_id: str, role: Role, *, num_blocks: int = 4096, max_model_len: int = 32768) -> None:
        add_ready(self.registry, make_card(worker_id, role, num_blocks=num_blocks, max_model_len=max_model_len))
        self.index.add_worker(worker_id, epoch=1)

    def cache(self, worker_id: str, digests: list[bytes]) -> None:
        events = BlockEvents(worker_id=worker_id, epoch=1, sequence=1, stored=digests, removed=[])
        assert not self.index.apply(events)

    def book(self, prefill: str, decode: str, *, new: int = 100, kv: int = 200, done: bool = False) -> None:
        booking = self.registry.reserve(prefill, decode, num_new_tokens=new, num_context_tokens=0, num_kv_tokens=kv)
        if done:
            booking.prefill_done()

    def place(self, num_prompt_tokens: int, *, outputs: int = 100, digests: list[bytes] | None = None) -> Placement:
        return self.placer.place(num_prompt_tokens, digests or [], outputs, now=0.0)


def make_pair(*, batch: int = 0, local_prefill: bool = True) -> Pool:
    pool = Pool(local_prefill=local_prefill)
    pool.add("p", Role.PREFILL)
    pool.add("d", Role.DECODE)
    for _ in range(batch):
        pool.book("d", "d", done=True)
    return pool


def chain(num_blocks: int) -> list[bytes]:
    return [f"{i}".encode() for i in range(num_blocks)]


def chosen(placement: Placement) -> tuple[str, str]:
    return placement.best.prefill.worker_id, placement.best.decode.worker_id


def test_a_long_prompt_leaves_a_busy_decode_worker_alone() -> None:
    placement = make_pair(batch=4).place(2048)
    assert chosen(placement) == ("p", "d")
    assert placement.runner_up is not None
    assert placement.runner_up.terms.delay_s == pytest.approx(4 * placement.runner_up.terms.prefill_s, rel=0.3)


def test_excluded_workers_take_nothing_and_are_no_reason() -> None:
    pool = make_pair(batch=4)
    placement = pool.placer.place(2048, [], 100, 0.0, excluded={"p"})
    assert (chosen(placement), placement.runner_up, placement.skipped) == (("d", "d"), None, {})
    with pytest.raises(NoWorker):
        pool.placer.place(2048, [], 100, 0.0, excluded={"p", "d"})


def test_a_short_uncached_tail_stays_on_the_decode_worker() -> None:
    pool = make_pair(batch=4)
    pool.cache("d", chain(127))
    placement = pool.place(2040, digests=chain(127))
    assert chosen(placement) == ("d", "d")
    assert placement.num_new_tokens == 8


def test_a_prompt_that_another_worker_has_is_read_from_there() -> None:
    pool = make_pair(batch=4)
    pool.cache("d", chain(100))
    placement = pool.place(2048, digests=chain(128))
    assert chosen(placement) == ("p", "d")
    assert placement.best.holder is not None
    assert (placement.best.holder.worker.worker_id, placement.best.holder.num_blocks) == ("d", 100)
    assert placement.num_new_tokens == 28 * 16
    assert placement.best.terms.fetch_s > 0
    assert placement.best.explain()["kv_holder"] == "d"


def test_nothing_is_read_from_a_worker_with_less_or_with_what_is_only_expected() -> None:
    pool = make_pair(batch=4)
    pool.cache("p", chain(100))
    pool.cache("d", chain(90))
    assert pool.place(2048, digests=chain(128)).best.holder is None
    pool.index.speculate({"d"}, chain(128), 0.0)
    assert pool.place(2048, digests=chain(128)).best.holder is None


def test_nothing_is_read_where_the_link_is_slower_than_computing() -> None:
    pool = make_pair(batch=4)
    pool.cache("d", chain(100))
    for _ in range(200):
        pool.costs.transfer("cpu-1", "cpu-1").observe(1e6, 5.0)
    assert pool.place(2048, digests=chain(128)).best.holder is None


def test_an_idle_decode_worker_saves_the_handoff_of_a_short_prompt_only() -> None:
    assert chosen(make_pair().place(4)) == ("d", "d")
    assert chosen(make_pair().place(512)) == ("p", "d"), "it would stall the next request"
    assert chosen(make_pair(local_prefill=False).place(4)) == ("p", "d")


def test_without_prefill_workers_decode_workers_do_it_all() -> None:
    pool = Pool(local_prefill=False)
    pool.add("d", Role.DECODE)
    assert chosen(pool.place(2048)) == ("d", "d")


def test_only_missing_blocks_count_as_transfer() -> None:
    pool = make_pair(batch=8)
    for bandwidth_sample in range(50):  # a slow link, so that bytes matter
        pool.costs.transfer("cpu-1", "cpu-1").observe(
            1e6 * (1 + bandwidth_sample % 5), 1e-2 * (1 + bandwidth_sample % 5)
        )
    cold = pool.place(2048)
    pool.cache("d", chain(64))
    warm = pool.place(2048, digests=chain(64))
    assert chosen(cold) == ("p", "d")
    pair = warm.best if warm.best.is_pair else warm.runner_up
    assert pair is not None
    assert pair.terms.transfer_s <= cold.best.terms.transfer_s
    link = pool.costs.transfer("cpu-1", "cpu-1")
    assert pair.terms.transfer_s <= link.transfer_s(64 * 16 * 23_040)


def test_goes_to_the_worker_with_the_prefix_until_its_queue_outweighs_it() -> None:
    pool = Pool()
    for worker_id in ("a", "b"):
        pool.add(worker_id, Role.COLOCATED)
    pool.cache("b", chain(32))
    assert chosen(pool.place(600, digests=chain(32))) == ("b", "b")
    pool.book("b", "b", new=4000, kv=4000)
    placement = pool.place(600, digests=chain(32))
    assert chosen(placement) == ("a", "a")
    assert placement.best.terms.queue_s == 0


def test_the_last_prompt_token_is_computed_even_on_a_full_hit() -> None:
    pool = Pool()
    pool.add("a", Role.COLOCATED)
    pool.cache("a", chain(4))
    placement = pool.place(64, digests=chain(4))
    assert (placement.best.num_cached_tokens, placement.num_new_tokens) == (63, 1)


def test_ties_go_to_the_worker_with_the_least_work_done() -> None:
    pool = Pool()
    for worker_id in ("a", "b", "c"):
        pool.add(worker_id, Role.COLOCATED)
    order = []
    for _ in range(6):
        best = pool.place(100).best
        order.append(best.decode.worker_id)
        pool.registry.reserve(
            order[-1], order[-1], num_new_tokens=100, num_context_tokens=0, num_kv_tokens=200
        ).release()
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_a_decode_worker_without_room_is_avoided() -> None:
    pool = Pool()
    pool.add("p", Role.PREFILL)
    pool.add("full", Role.DECODE, num_blocks=128)
    pool.add("free", Role.DECODE, num_blocks=128)
    pool.book("p", "full", kv=2000, done=True)
    pool.book("p", "free", kv=200, done=True)
    pool.book("p", "free", kv=200, done=True)
    placement = pool.place(1000)
    assert placement.best.decode.worker_id == "free"
    assert placement.best.terms.memory_s == 0


def test_nothing_to_serve_says_why() -> None:
    pool = Pool()
    with pytest.raises(NoWorker, match="none is connected"):
        pool.place(10)
    assert not pool.placer.can_place
    pool.add("p", Role.PREFILL)
    pool.add("small", Role.DECODE, num_blocks=4)
    pool.add("leaving", Role.DECODE)
    pool.registry.set_state("leaving", WorkerState.DRAINING, "test")
    with pytest.raises(NoWorker, match="1 draining, 1 too small, 1 prefill only"):
        pool.place(64)
    assert chosen(pool.place(63)) == ("p", "small")


def test_explains_itself_in_seconds() -> None:
    placement = make_pair(batch=4).place(2048)
    assert placement.runner_up is not None
    winner, loser = placement.best.explain(), placement.runner_up.explain()
    assert winner["prefill_worker"] == "p"
    terms = [value for name, value in winner.items() if name.endswith("_s") and name != "total_s"]
    assert winner["total_s"] == pytest.approx(sum(terms))  # type: ignore[arg-type]
    assert winner["total_s"] < loser["total_s"]  # type: ignore[operator]


def test_shows_the_next_best_where_asked() -> None:
    pool = make_pair(batch=4)
    pool.add("q", Role.PREFILL)
    pool.book("q", "d", new=512)
    placement = pool.placer.place(2048, [], 100, 0.0, num_others=4)
    others = [(c.prefill.worker_id, c.decode.worker_id) for c in placement.others]
    assert (chosen(placement), others) == (("p", "d"), [("q", "d"), ("d", "d")])
    assert pool.place(2048).others == ()


def test_what_is_held_for_a_worker_counts_as_its_queue() -> None:
    pool = Pool()
    for worker_id in ("a", "b"):
        pool.add(worker_id, Role.COLOCATED)
    assert chosen(pool.placer.place(100, [], 10, 0.0, held={"a": Held(1.0)})) == ("b", "b")
    both = pool.placer.place(100, [], 10, 0.0, held={"a": Held(1.0), "b": Held(2.0)})
    assert (chosen(both), both.best.terms.queue_s) == (("a", "a"), 1.0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_workers=st.integers(2, 14), num_prompt_tokens=st.integers(1, 3000))
def test_finds_the_pair_that_looking_at_all_pairs_finds(seed: int, num_workers: int, num_prompt_tokens: int) -> None:
    rng = random.Random(seed)
    pool = Pool()
    digests = chain(num_prompt_tokens // 16)
    for i in range(num_workers):
        pool.add(f"w{i}", Role.PREFILL if i % 2 else Role.DECODE)
        if rng.random() < 0.6:
            pool.cache(f"w{i}", digests[: rng.choice([0, 2, len(digests) // 2, len(digests)])])
        for _ in range(rng.randint(0, 3)):
            pool.book(f"w{i}", f"w{i}", new=rng.choice([10, 100, 1000]), done=rng.random() < 0.5)
    hits = pool.index.longest_prefix(digests, 0.0)
    request = _Request(num_prompt_tokens, 50, hits, pool.placer._holders(hits, digests), {}, math.inf, pool.costs)
    prefillers = [request.prefill_side(worker) for worker in pool.registry if can_prefill(worker)]
    decoders = [request.decode_side(worker) for worker in pool.registry if can_decode(worker)]
    every_pair: list[Candidate] = [request.pair(p, d) for p in prefillers for d in decoders]
    best = request.best_pair(prefillers, decoders)
    assert best is not None
    assert _preference(best) == pytest.approx(min(map(_preference, every_pair)))
