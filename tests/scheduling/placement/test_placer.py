from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import DIGEST_BYTES, join_digests
from tandem.protocol.errors import NoWorker
from tandem.protocol.messages import (
    POOL_PLACE,
    BlockEvents,
    Role,
    StepStats,
    TierLoad,
    WorkerLoad,
    WorkerPriority,
    WorkerState,
)
from tandem.protocol.routing import STRATEGIES
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.placement import Held, Placement
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.request import CommonDigests, PlacementRequest, ServiceClass
from tandem.scheduling.workers.bookings import Booking
from tandem.scheduling.workers.load import RequestLoad
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import RegisteredWorker
from tests.support.builders import add_ready, make_card
from tests.support.naive_placer import NaivePlacer, NaiveStrategy, preference


class Pool:
    """A registry with everything a placer needs."""

    def __init__(self, routing: str = "cost") -> None:
        self.registry = Registry()
        self.index = PrefixIndex()
        self.costs = CostModel()
        self.config = RouterConfig(routing=routing)
        self.placer = Placer(self.registry, self.index, self.costs, self.config)

    def add(self, worker_id: str, role: Role, **sizes: int) -> None:
        add_ready(self.registry, make_card(worker_id, role, **sizes))  # type: ignore[arg-type]
        self.index.add_worker(worker_id, epoch=1)

    def cache(self, worker_id: str, digests: list[bytes], place: str = POOL_PLACE) -> None:
        events = BlockEvents(
            worker_id=worker_id, epoch=1, sequence=1, stored=join_digests(digests), removed=b"", place=place
        )
        assert not self.index.apply(events)

    def add_tier(self, worker_id: str, tier: TierLoad, digests: list[bytes]) -> None:
        worker = self.registry.get(worker_id)
        assert worker is not None
        self.registry.note_tiers(worker_id, [*worker.tiers, tier], None)
        self.index.add_worker(f"{worker_id}/{tier.name}", epoch=1)
        self.cache(worker_id, digests, tier.name)

    def book(self, prefill: str, decode: str, *, new: int = 100, kv: int = 200, done: bool = False) -> None:
        booking = self.registry.reserve(RequestLoad(prefill, decode, new, 0, kv))
        if done:
            booking.prefill_done()

    def place(self, num_prompt_tokens: int, *, outputs: int = 100, digests: list[bytes] | None = None) -> Placement:
        return self.placer.place(make_request(num_prompt_tokens, outputs, digests=digests or []), 0.0)


def make_request(
    num_prompt_tokens: int,
    outputs: int = 100,
    *,
    digests: Sequence[bytes] = (),
    workers: tuple[str, ...] = (),
    adapter: str = "",
) -> PlacementRequest:
    """A request of the tenant acme."""
    return PlacementRequest(
        num_prompt_tokens=num_prompt_tokens,
        expected_output_tokens=outputs,
        digests=CommonDigests(digests),
        service_class=ServiceClass("acme"),
        allowed_workers=workers,
        adapter=adapter,
    )


def colocated(*names: str) -> Pool:
    pool = Pool()
    for name in names:
        pool.add(name, Role.COLOCATED)
    return pool


def make_pair(*, batch: int = 0, routing: str = "cost") -> Pool:
    pool = Pool(routing)
    pool.add("p", Role.PREFILL)
    pool.add("d", Role.DECODE)
    for _ in range(batch):
        pool.book("d", "d", done=True)
    return pool


def chain(num_blocks: int) -> list[bytes]:
    return [f"{i}".encode().ljust(DIGEST_BYTES, b".") for i in range(num_blocks)]


def chosen(placement: Placement) -> tuple[str, str]:
    return placement.best.prefill.worker_id, placement.best.decode.worker_id


def test_a_long_prompt_leaves_a_busy_decode_worker_alone() -> None:
    placement = make_pair(batch=4).place(2048)
    assert chosen(placement) == ("p", "d")
    assert placement.runner_up is not None
    assert placement.runner_up.terms.delay_s == pytest.approx(4 * placement.runner_up.terms.prefill_s, rel=0.3)


def test_a_silent_worker_is_passed_over_while_another_one_can_serve() -> None:
    pool = make_pair()
    pool.add("d2", Role.DECODE)
    pool.cache("d", chain(64))
    held = chain(64)
    assert pool.place(1024, digests=held).best.decode.worker_id == "d"
    table = pool.registry.table
    pool.registry.note_silence("d")
    placement = pool.place(1024, digests=held)
    assert (placement.best.decode.worker_id, placement.skipped) == ("d2", {"silent": 1})
    pool.registry.note_silence("p")
    assert chosen(pool.place(1024)) == ("d2", "d2")
    pool.registry.note_silence("d2")
    assert pool.place(1024).skipped == {}, "where all are silent, each is as good as another"
    for worker_id in ("p", "d", "d2"):
        pool.registry.note_load(worker_id, WorkerLoad(), 1.0)
    assert pool.place(1024, digests=held).best.decode.worker_id == "d"
    assert pool.registry.table is table, "not rebuilt at each heartbeat"
    assert not table.has_silent


def test_a_silent_worker_is_not_passed_over_for_one_that_is_too_small() -> None:
    pool = make_pair()
    pool.add("small", Role.DECODE, max_model_len=512)
    pool.registry.note_silence("d")
    assert pool.place(1024).best.decode.worker_id == "d"
    assert pool.place(100).best.decode.worker_id == "small"


def test_prompts_that_come_together_are_computed_on_both_workers_of_a_pair() -> None:
    """Handoffs that come after a prompt is computed on the decode worker are not delayed by it."""
    pool = make_pair()
    placed = []
    for _ in range(8):
        placed.append(chosen(pool.place(1024)))
        pool.book(*placed[-1], new=1024, kv=1124)
    assert (placed[0], placed.count(("p", "d")), placed.count(("d", "d"))) == (("p", "d"), 6, 2)


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


def test_an_idle_decode_worker_saves_the_handoff_of_a_short_prompt_only() -> None:
    assert chosen(make_pair().place(4)) == ("d", "d")
    assert chosen(make_pair().place(512)) == ("p", "d"), "it would stall the next request"
    assert chosen(make_pair(routing="cost,pairs").place(4)) == ("p", "d")


def test_the_last_prompt_token_is_computed_even_on_a_full_hit() -> None:
    pool = colocated("a")
    pool.cache("a", chain(4))
    placement = pool.place(64, digests=chain(4))
    assert (placement.best.num_cached_tokens, placement.num_new_tokens) == (63, 1)


def test_goes_to_the_worker_with_the_prefix_until_its_queue_outweighs_it() -> None:
    pool = colocated("a", "b")
    pool.cache("b", chain(32))
    assert chosen(pool.place(600, digests=chain(32))) == ("b", "b")
    pool.book("b", "b", new=4000, kv=4000)
    placement = pool.place(600, digests=chain(32))
    assert chosen(placement) == ("a", "a")
    assert placement.best.terms.queue_s == 0


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


def test_the_faster_tier_is_taken_unless_the_slower_one_has_much_more() -> None:
    for num_blocks, expected in ((50, "disk"), (99, "host")):
        pool, digests = colocated("a"), chain(100)
        pool.add_tier("a", TierLoad(name="host", block_s=1e-5), digests[:num_blocks])
        pool.add_tier("a", TierLoad(name="disk", block_s=2e-3), digests)
        assert pool.place(1600, digests=digests).best.tier == expected


def test_work_held_for_a_worker_counts_as_its_queue() -> None:
    pool = colocated("a", "b")
    assert chosen(pool.placer.place(make_request(100, 10), 0.0, held={"a": Held(1.0)})) == ("b", "b")
    both = pool.placer.place(make_request(100, 10), 0.0, held={"a": Held(1.0), "b": Held(2.0)})
    assert (chosen(both), both.best.terms.queue_s) == (("a", "a"), 1.0)


def test_ties_go_to_the_worker_with_the_least_work_placed() -> None:
    pool = colocated("a", "b", "c")
    order = []
    for _ in range(6):
        best = pool.place(100).best
        order.append(best.decode.worker_id)
        pool.registry.reserve(RequestLoad(order[-1], order[-1], 100, 0, 200)).release()
    assert order == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("role", [Role.DECODE, Role.COLOCATED])
def test_a_worker_without_a_free_seat_is_avoided(role: Role) -> None:
    pool = Pool()
    pool.add("p", Role.PREFILL)
    pool.add("full", role, max_num_seqs=2)
    pool.add("free", role, max_num_seqs=8)
    for worker_id, num_seqs in (("full", 2), ("free", 5)):
        for _ in range(num_seqs):
            pool.book("p", worker_id, kv=200, done=True)
    placement = pool.placer.place(make_request(1000), 0.0, num_others=9)
    assert (placement.best.decode.worker_id, placement.best.terms.memory_s) == ("free", 0)
    (wait_s,) = {other.terms.memory_s for other in placement.others if other.decode.worker_id == "full"}
    lifetime_s = 100 * pool.costs.steps("cpu-1").costs.step_s(2, 400)
    assert wait_s == pytest.approx(lifetime_s / 2), "one of two sequences ends after half a lifetime"


def test_without_a_usable_worker_the_error_says_why() -> None:
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


def test_shows_the_next_best_candidates_on_request() -> None:
    pool = make_pair(batch=4)
    pool.add("q", Role.PREFILL)
    pool.book("q", "d", new=512)
    placement = pool.placer.place(make_request(2048), 0.0, num_others=4)
    others = [(c.prefill.worker_id, c.decode.worker_id) for c in placement.others]
    assert (chosen(placement), others) == (("p", "d"), [("q", "d"), ("d", "d")])
    assert pool.place(2048).others == ()


def test_a_prompt_goes_where_loading_is_sooner_than_computing_elsewhere() -> None:
    pool, digests = colocated("a", "b"), chain(100)
    pool.add_tier("b", TierLoad(name="host", block_s=1e-4), digests)
    placement = pool.place(1600, digests=digests)
    assert (chosen(placement), placement.best.tier, placement.best.num_cached_tokens) == (("b", "b"), "host", 1599)
    assert placement.best.terms.fetch_s == pytest.approx(100 * 1e-4)
    assert placement.best.explain()["kv_tier"] == "host"


def random_pool(rng: random.Random, num_workers: int, digests: list[bytes]) -> tuple[Pool, list[Booking]]:
    """Workers of two kinds in all roles and states; caches, bookings, measured steps and links."""
    pool = Pool(rng.choice(["cost", "cost", "cost,pairs"]))
    roles = rng.choice([[Role.PREFILL, Role.DECODE], [Role.COLOCATED], list(Role)])
    kinds = rng.choice([["cpu-1"], ["cpu-1", "NVIDIA H200"]])
    chunks, namespaces = rng.choice([[512], [512, 2048]]), rng.choice([[b"n" * 16], [b"n" * 16, b"n" * 16, b"o" * 16]])
    bookings = []
    for i in range(num_workers):
        worker_id, role, kind = f"w{i}", rng.choice(roles), rng.choice(kinds)
        num_blocks, chunk, namespace = rng.choice([64, 300, 4096]), rng.choice(chunks), rng.choice(namespaces)
        num_seats = rng.choice([0, 0, 1, 4, 16])
        sizes = {"num_blocks": num_blocks, "max_num_batched_tokens": chunk, "max_num_seqs": num_seats}
        loads_all = rng.random() < 0.3
        card = make_card(worker_id, role, kind=kind, namespace=namespace, loads_all=loads_all, **sizes)
        add_ready(pool.registry, card)
        pool.index.add_worker(worker_id, epoch=1)
        if rng.random() < 0.6:
            pool.cache(worker_id, digests[: rng.choice([0, 2, len(digests) // 2, len(digests)])])
        for name in ("host", "disk"):
            if rng.random() < 0.3:
                block_s = rng.choice([1e-5, 1e-3, 2e-2, math.inf])
                tier = TierLoad(name=name, latency_s=rng.choice([0.0, 0.1]), block_s=block_s)
                pool.add_tier(worker_id, tier, digests[: rng.choice([2, len(digests) // 3, len(digests)])])
        if rng.random() < 0.1:
            pool.index.speculate({worker_id}, digests, 0.0)
        for _ in range(rng.choice([0, 0, 1, 3])):
            num_new, num_kv = rng.choice([10, 100, 1000]), rng.choice([200, 3000])
            other_id = f"w{rng.randrange(i + 1)}"
            turn = WorkerPriority(order=rng.choice([0.0, 0.5, 2.0]))
            bookings.append(pool.registry.reserve(RequestLoad(worker_id, other_id, num_new, 0, num_kv), turn))
        if rng.random() < 0.1:
            pool.registry.set_state(worker_id, WorkerState.DRAINING, "test")
    return pool, bookings


@pytest.mark.parametrize(
    ("host", "disk", "tier", "num_loaded"), [(8, 4, "host", 6), (4, 10, "disk", 8), (8, 8, "host", 6)]
)
def test_a_worker_that_loads_all_its_tiers_have_is_charged_for_that(
    host: int, disk: int, tier: str, num_loaded: int
) -> None:
    """As vLLM does, also where computing is faster."""
    pool, digests = Pool(), chain(10)
    pool.add("a", Role.COLOCATED, loads_all=True)
    pool.cache("a", digests[:2])
    pool.add_tier("a", TierLoad(name="host", block_s=5.0), digests[:host])
    pool.add_tier("a", TierLoad(name="disk", block_s=5.0), digests[:disk])
    best = pool.place(170, digests=digests).best
    assert (best.tier, best.num_cached_tokens) == (tier, 16 * (2 + num_loaded))
    assert best.terms.fetch_s == 5.0 * num_loaded


def random_held(rng: random.Random) -> Held:
    return Held(rng.random(), rng.randrange(3), rng.randrange(5000))


def shake(rng: random.Random, pool: Pool, bookings: list[Booking]) -> None:
    """Random events between two decisions."""
    for booking in rng.sample(bookings, len(bookings) // 3):
        rng.choice([booking.prefill_done, booking.release])()
    worker_ids = [worker.worker_id for worker in pool.registry]
    for worker_id in rng.sample(worker_ids, len(worker_ids) // 3):
        pool.registry.note_step(worker_id, StepStats(duration_s=0.1, num_prefill_tokens=rng.choice([0, 7, 512])))
    change = rng.randrange(4) if worker_ids else 2
    if change == 0:
        pool.registry.set_role(worker_ids[0], rng.choice(list(Role)))
    if change == 1:
        pool.registry.set_state(worker_ids[-1], WorkerState.DEAD, "test")
        for holder in (worker_ids[-1], f"{worker_ids[-1]}/host", f"{worker_ids[-1]}/disk"):
            pool.index.remove_worker(holder)
    if change == 2:
        pool.costs.steps("cpu-1").observe(StepStats(duration_s=0.5, num_prefill_tokens=512, num_decode_seqs=1))
        pool.costs.transfer("cpu-1", "cpu-1").observe(1e8, rng.choice([1e-3, 1.0]))


def test_tenants_and_adapters_have_their_workers_and_others_are_counted() -> None:
    pool = Pool()
    for worker_id, role, adapters in [
        ("prefill-0", Role.PREFILL, ["sql"]),
        ("prefill-1", Role.PREFILL, []),
        ("decode-0", Role.DECODE, ["sql", "chat"]),
        ("decode-1", Role.DECODE, ["chat"]),
    ]:
        add_ready(pool.registry, make_card(worker_id, role, adapters=adapters))
        pool.index.add_worker(worker_id, epoch=1)
    pool.book("decode-0", "decode-0", new=5000)

    def place(*workers: str, adapter: str = "") -> Placement:
        return pool.placer.place(make_request(2048, workers=workers, adapter=adapter), 0.0)

    assert (chosen(place()), place().skipped) == (("prefill-0", "decode-1"), {})
    limited = place("prefill-1", "decode-[0]")
    assert (chosen(limited), limited.skipped) == (("prefill-1", "decode-0"), {"not for this tenant": 2})
    adapted = place(adapter="sql")
    assert (chosen(adapted), adapted.skipped) == (("prefill-0", "decode-0"), {"without the adapter": 2})
    both = place("*-1", adapter="chat")
    assert chosen(both) == ("decode-1", "decode-1")
    assert both.skipped == {"not for this tenant": 2, "without the adapter": 1}
    with pytest.raises(NoWorker, match="of tenant 'acme': 3 not for this tenant, 1 prefill only"):
        place("prefill-0")
    with pytest.raises(
        NoWorker, match="of tenant 'acme' for adapter 'x': 2 not for this tenant, 2 without the adapter"
    ):
        place("*-0", adapter="x")


def test_a_tenants_patterns_match_workers_that_join_later() -> None:
    pool = make_pair()
    request = make_request(4, workers=("d*",))
    assert chosen(pool.placer.place(request, 0.0)) == ("d", "d")
    pool.add("d2", Role.DECODE)
    pool.book("d", "d", new=5000)
    assert chosen(pool.placer.place(request, 0.0)) == ("d2", "d2")


@given(seed=st.integers(0, 10**6), num_workers=st.integers(2, 14), num_prompt_tokens=st.integers(1, 3000))
def test_decides_as_an_exhaustive_search_does(seed: int, num_workers: int, num_prompt_tokens: int) -> None:
    rng = random.Random(seed)
    digests = chain(num_prompt_tokens // 16)
    pool, bookings = random_pool(rng, num_workers, digests)
    naive = NaivePlacer(pool.registry, pool.index, pool.costs, local_prefill=pool.config.local_prefill)
    for _ in range(3):
        held = {f"w{i}": random_held(rng) for i in range(num_workers) if rng.random() < 0.2}
        order = rng.choice([-1.0, 0.0, 1.0, math.inf])
        excluded = {f"w{i}" for i in range(num_workers) if rng.random() < 0.1}
        outputs = rng.choice([1, 100])
        cheapest = naive.candidates(
            num_prompt_tokens, digests, outputs, 0.0, in_router=held, order=order, excluded=excluded
        )
        service_class = ServiceClass("acme", routing=rng.choice(STRATEGIES), session=rng.choice(["", "a", "b"]))
        request = make_request(num_prompt_tokens, outputs, digests=digests)
        request = msgspec.structs.replace(request, service_class=service_class)
        strategy = NaiveStrategy(pool.registry, pool.index, request, digests)
        expected = strategy.among(service_class.routing, cheapest)
        try:
            placement = pool.placer.place(request, 0.0, held=held, order=order, excluded=excluded, num_others=3)
        except NoWorker:
            assert not expected
        else:
            first = expected[0]
            assert preference(placement.best) == pytest.approx(preference(first), rel=1e-12)
            same = [c for c in expected if preference(c) == preference(first)]
            assert placement.best in same
            if len(same) == 1:
                assert placement.best == first
            others = [c for c in expected if c.is_pair != placement.best.is_pair]
            if not any(c.is_pair for c in expected):  # the next best worker alone
                others = [c for c in expected if c.decode is not placement.best.decode]
            assert (placement.runner_up is None) == (not others)
            if placement.runner_up is not None:
                assert preference(placement.runner_up) == pytest.approx(preference(others[0]), rel=1e-12)
            assert all(other in cheapest for other in placement.others)
            assert placement.strategy == service_class.routing
            assert {type(lost_s) for lost_s in placement.shadow.values()} == {float}, "numpy's are not JSON"
            assert placement.shadow == {
                name: pytest.approx(
                    strategy.among(name, cheapest)[0].terms.total_s - first.terms.total_s, rel=1e-9, abs=1e-9
                )
                for name in STRATEGIES
                if name != service_class.routing
            }
        shake(rng, pool, bookings)


def naive_reason(worker: RegisteredWorker, request: PlacementRequest) -> str | None:
    """The first reason why this worker cannot take the request; None if it can."""
    if worker.state is not WorkerState.READY:
        return worker.state.value
    if request.allowed_workers and not any(fnmatchcase(worker.worker_id, one) for one in request.allowed_workers):
        return "not for this tenant"
    if request.adapter and request.adapter not in worker.card.adapters:
        return "without the adapter"
    if request.num_prompt_tokens >= min(worker.card.num_blocks * worker.card.block_size, worker.card.max_model_len):
        return "too small"
    return None


@pytest.mark.parametrize("seed", range(8))
def test_reasons_are_counted_as_in_a_loop_over_workers(seed: int) -> None:
    rng = random.Random(seed)
    pool = Pool()
    for number in range(40):
        card = make_card(
            f"{rng.choice('ab')}-{number}",
            rng.choice(list(Role)),
            num_blocks=rng.choice([64, 4096]),
            adapters=rng.sample(["sql", "chat"], rng.randrange(3)),
        )
        worker = add_ready(pool.registry, card)
        pool.index.add_worker(worker.worker_id, epoch=1)
    for _ in range(50):
        worker = rng.choice(list(pool.registry))
        pool.registry.set_state(worker.worker_id, rng.choice([WorkerState.READY, WorkerState.DRAINING]), "test")
        workers = list(pool.registry)
        excluded = [one.worker_id for one in rng.sample(workers, rng.choice([0, 3]))] + ["gone"]
        allowed, adapter = rng.choice([(), ("a-*",), ("a-*", "b-1?")]), rng.choice(["", "sql", "unknown"])
        request = make_request(rng.choice([10, 1024, 2000]), 10, workers=allowed, adapter=adapter)
        reasons = [naive_reason(one, request) for one in workers if one.worker_id not in excluded]
        counts = Counter(reason for reason in reasons if reason is not None)
        try:
            skipped = pool.placer.place(request, 0.0, excluded=excluded).skipped
        except NoWorker as error:
            told = re.findall(r"(\d+) (draining|not for this tenant|without the adapter|too small)", str(error))
            skipped = {reason: int(count) for count, reason in told}
        assert skipped == counts


def test_a_prefill_worker_does_all_only_while_no_worker_decodes() -> None:
    pool = Pool()
    assert not pool.placer.can_cover
    pool.add("p", Role.PREFILL)
    assert pool.placer.can_cover
    assert not pool.placer.can_place
    request = msgspec.structs.replace(make_request(64), may_cover=True)
    assert chosen(pool.placer.place(request, 0.0)) == ("p", "p")
    with pytest.raises(NoWorker, match="1 prefill only"):
        pool.placer.place(make_request(64), 0.0)
    pool.add("small", Role.DECODE, num_blocks=4)
    with pytest.raises(NoWorker, match="1 too small, 1 prefill only"):
        pool.placer.place(request, 0.0)
    pool.registry.set_state("small", WorkerState.DRAINING, "test")
    assert chosen(pool.placer.place(request, 0.0)) == ("p", "p")


def falling_back(num_prompt_tokens: int = 64, **fields: bool) -> PlacementRequest:
    """A new request, or one that lost its worker."""
    return msgspec.structs.replace(make_request(num_prompt_tokens), may_fall_back=True, **fields)


def test_a_draining_worker_serves_what_no_ready_one_can() -> None:
    pool = Pool()
    for name in ("stays", "leaves"):
        pool.add(name, Role.DECODE)
    pool.book("stays", "stays", new=20_000)
    pool.registry.set_state("leaves", WorkerState.DRAINING, "test", is_fallback=True)
    assert chosen(pool.placer.place(falling_back(), 0.0)) == ("stays", "stays"), "however busy it is"
    pool.registry.set_state("stays", WorkerState.DEAD, "test")
    assert pool.placer.can_cover
    assert not pool.placer.can_place
    assert chosen(pool.placer.place(falling_back(), 0.0)) == ("leaves", "leaves")
    with pytest.raises(NoWorker, match="1 draining"):  # an answer that moves while its worker lives stays there
        pool.place(64)
    pool.registry.set_state("leaves", WorkerState.DRAINING, "its process is about to end")
    assert not pool.placer.can_cover
    with pytest.raises(NoWorker, match="1 draining"):
        pool.placer.place(falling_back(), 0.0)


def test_one_that_drains_serves_what_the_ready_ones_may_not() -> None:
    pool = Pool()
    pool.add("small", Role.DECODE, num_blocks=4)
    pool.add("large", Role.DECODE)
    pool.registry.set_state("large", WorkerState.DRAINING, "test", is_fallback=True)
    assert chosen(pool.placer.place(falling_back(63), 0.0)) == ("small", "small")
    assert chosen(pool.placer.place(falling_back(64), 0.0)) == ("large", "large")
    with pytest.raises(NoWorker, match="1 too small"):
        pool.placer.place(falling_back(64), 0.0, excluded=["large"])


@pytest.mark.parametrize("draining", ["p", "d"])
def test_half_of_a_pair_that_drains_goes_on_with_the_other_half(draining: str) -> None:
    pool = Pool()
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
        card = msgspec.structs.replace(make_card(name, role), serves_alone=False)
        add_ready(pool.registry, card)
        pool.index.add_worker(name, epoch=1)
    pool.registry.set_state(draining, WorkerState.DRAINING, "test", is_fallback=True)
    assert chosen(pool.placer.place(falling_back(), 0.0)) == ("p", "d")


def test_a_ready_prefill_worker_covers_before_a_draining_one() -> None:
    pool = Pool()
    pool.add("p", Role.PREFILL)
    pool.add("d", Role.DECODE)
    pool.registry.set_state("d", WorkerState.DRAINING, "test", is_fallback=True)
    assert chosen(pool.placer.place(falling_back(may_cover=True), 0.0)) == ("p", "p")
    assert chosen(pool.placer.place(falling_back(is_resumed=True), 0.0)) == ("p", "p")
    pool.registry.set_state("d", WorkerState.DEAD, "test")
    pool.registry.set_state("p", WorkerState.DRAINING, "test", is_fallback=True)
    assert pool.placer.can_cover
    assert chosen(pool.placer.place(falling_back(may_cover=True), 0.0)) == ("p", "p")
