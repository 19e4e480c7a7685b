from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import DeadlineUnmet, NoWorker, Overloaded
from tandem.protocol.messages import Role, StepStats, WorkerPriority, WorkerState
from tandem.scheduling.admission.admission import Admission, Dispatch, Drop
from tandem.scheduling.admission.answer_lengths import AnswerLengths
from tandem.scheduling.admission.contention import MAX_TENANTS
from tandem.scheduling.admission.fair_queue import CREDIT_S
from tandem.scheduling.admission.forecaster import LEAD_S, MAX_SCANNED, fill_level
from tandem.scheduling.admission.queued_request import QueuedRequest
from tandem.scheduling.admission.tenants import TenantPolicy, Tenants
from tandem.scheduling.admission.worker_room import WorkerRoom
from tandem.scheduling.cost_model import CPU_PRIOR, CostModel, StepModel
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.request import CommonDigests, PlacementRequest, ServiceClass
from tandem.scheduling.workers.bookings import Booking
from tandem.scheduling.workers.load import RequestLoad
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import queue_s, wait_s
from tests.support.builders import add_ready, make_card
from tests.support.virtual_cluster import Arrival, VirtualCluster, poisson
from tests.support.work_count import num_lines_run


@dataclass
class Desk:
    """An admission with everything it reads; it books what it dispatches."""

    registry: Registry
    index: PrefixIndex
    admission: Admission
    bookings: list[Booking]
    room: WorkerRoom

    def enter(self, num_tokens: int = 512, now: float = 0.0, **fields: object) -> QueuedRequest:
        request = make_request(num_tokens, **fields)
        return self.admission.enter(request, self.admission.forecast(request, now), now)

    def decide(self, now: float = 0.0) -> list[Dispatch | Drop]:
        decisions: list[Dispatch | Drop] = []
        while (decided := self.admission.next(now)) is not None:
            decisions.append(decided)
            if isinstance(decided, Dispatch):
                self.bookings.append(self.book(decided))
        return decisions

    def book(self, decided: Dispatch) -> Booking:
        return self.registry.reserve(decided.placement.load, decided.worker_priority)

    def full_step_s(self) -> float:
        worker = next(iter(self.registry))
        return self.room.full_step_s(worker)

    def computes(self, worker_id: str, num_tokens: int) -> None:
        self.registry.note_step(worker_id, StepStats(duration_s=0.4, num_prefill_tokens=num_tokens))


def make_request(
    num_tokens: int = 512, *, expected_output_tokens: int = 32, digests: Sequence[bytes] = (), **service: Any
) -> PlacementRequest:
    """`service`: fields of its `ServiceClass`."""
    return PlacementRequest(
        num_prompt_tokens=num_tokens,
        expected_output_tokens=expected_output_tokens,
        digests=CommonDigests(digests),
        service_class=ServiceClass(**service),
    )


def make_desk(
    *roles: Role,
    tenants: dict[str, TenantPolicy] | None = None,
    num_blocks: int = 4096,
    max_num_seqs: int = 0,
    one_priority: bool = False,
    **config: object,
) -> Desk:
    """Without `one_priority` priorities have differed lately, so workers get half a step."""
    registry, index, costs = Registry(), PrefixIndex(), CostModel()
    for number, role in enumerate(roles or (Role.COLOCATED,)):
        add_ready(registry, make_card(f"w{number}", role, num_blocks=num_blocks, max_num_seqs=max_num_seqs))
        index.add_worker(f"w{number}", epoch=1)
    settings = RouterConfig(**config)  # type: ignore[arg-type]
    placer = Placer(registry, index, costs, settings)
    admission = Admission(registry, costs, placer, Tenants(named=tenants or {}), settings)
    if not one_priority:
        admission.contention.urgencies_until_s = math.inf
    return Desk(registry, index, admission, [], WorkerRoom(registry, costs, settings))


def test_requests_wait_in_the_router_once_their_worker_has_enough() -> None:
    desk = make_desk()
    waiting = [desk.enter() for _ in range(3)]
    assert [decided.queued for decided in desk.decide()] == waiting[:1]
    desk.computes("w0", 256)
    assert desk.decide() == [], "the rest of the first prompt is half a step"
    desk.computes("w0", 100)
    assert [decided.queued for decided in desk.decide()] == waiting[1:2]


@pytest.mark.parametrize("tenant", ["default", "other"])
def test_requests_of_one_priority_wait_at_the_worker_a_little_longer(tenant: str) -> None:
    desk = make_desk(one_priority=True)
    desk.enter(tenant=tenant, priority=1)
    for _ in range(6):
        desk.enter(priority=1 if tenant == "default" else 0)
    assert len(desk.decide()) == 2, "two full steps; priorities of different tenants are not compared"


def test_workers_get_less_while_priorities_differ_and_a_minute_after() -> None:
    desk = make_desk(one_priority=True)
    desk.enter()
    desk.enter(priority=-1)
    for _ in range(4):
        desk.enter()
    assert len(desk.decide()) == 1
    assert [isinstance(decided, Dispatch) for decided in desk.decide(now=61.0)].count(True) == 1


def use_up_credit(desk: Desk, tenant: str) -> None:
    """Serve the tenant more than its credit."""
    for _ in range(10):
        desk.enter(tenant=tenant)
        (decided,) = desk.decide()
        assert isinstance(decided, Dispatch)
        desk.bookings.pop().release()


def two_tenants(desk: Desk) -> QueuedRequest:
    """A tenant beyond its share has two prompts at the worker; another tenant's first request comes at 20 s."""
    use_up_credit(desk, "greedy")
    for _ in range(5):
        desk.enter(tenant="greedy", now=20.0)
    assert len(desk.decide(20.0)) == 2
    return desk.enter(tenant="modest", now=20.0)


def test_a_tenant_below_its_share_overtakes_the_prompts_of_one_above_it() -> None:
    desk = make_desk(one_priority=True)
    modest = two_tenants(desk)
    half_s = desk.full_step_s() / 2
    assert half_s <= modest.forecast.start_s < 1.2 * half_s, (
        "it overtakes the prompts at the worker, except for the step in progress"
    )
    assert modest.placement.best.terms.queue_s == modest.forecast.start_s
    (decided,) = desk.decide(20.0)
    assert isinstance(decided, Dispatch)
    assert decided.queued is modest
    (worker,) = desk.registry
    assert [booking.order for booking in worker.prompts] == [20.0 - LEAD_S, 20.0, 20.0]


def beside_decoding(**options: Any) -> Desk:
    """A prefill worker, and a worker that decodes four sequences, where long prompts cost too much."""
    desk = make_desk(Role.PREFILL, Role.DECODE, **options)
    use_up_credit(desk, "default")
    for _ in range(4):
        booking = desk.registry.reserve(RequestLoad("w0", "w1", 1, 0, 64))
        booking.prefill_done()
        desk.bookings.append(booking)
    return desk


def test_a_request_with_a_deadline_goes_to_an_idle_worker() -> None:
    desk = beside_decoding()
    desk.enter(2048, now=20.0)
    (decided,) = desk.decide(20.0)
    assert isinstance(decided, Dispatch)
    assert decided.placement.best.is_pair
    urgent = desk.enter(6, now=20.5, ttft_slo_s=1.0, expected_output_tokens=2)
    assert (urgent.placement.best.prefill.worker_id, urgent.forecast.start_s) == ("w1", 0.0)


@pytest.mark.parametrize("ttft_slo_s", [None, 1.0])
def test_prompts_for_prefill_workers_do_not_delay_those_for_decode_workers(ttft_slo_s: float | None) -> None:
    desk = beside_decoding()
    for _ in range(3):
        desk.enter(2048, now=20.0)
    assert len(desk.decide(20.0)) == 1
    short = desk.enter(6, now=20.5, ttft_slo_s=ttft_slo_s, expected_output_tokens=2)
    assert (short.forecast.ahead.new_tokens, short.forecast.start_s) == (2 * 2048, 0.0)
    (decided,) = desk.decide(20.5)
    assert isinstance(decided, Dispatch)
    assert decided.queued is short
    long = desk.admission.forecast(make_request(2048), 20.5)
    assert long.placement.best.is_pair
    assert long.start_s >= 2 * desk.full_step_s(), "it is behind them"


def test_requests_beyond_the_scan_limit_count_in_the_forecast() -> None:
    desk = beside_decoding(num_blocks=1 << 20, max_queued_prompt_tokens=1 << 30)
    for _ in range(MAX_SCANNED + 4):
        desk.enter(2048, now=20.0)
    desk.decide(20.0)
    short = desk.enter(6, now=20.5, expected_output_tokens=2)
    assert desk.decide(20.5) == []
    assert short.forecast.start_s > 10.0


def test_an_overtaking_prompt_waits_only_for_the_step_in_progress() -> None:
    registry, model = Registry(), StepModel(CPU_PRIOR)
    worker = add_ready(registry, make_card("w0"))
    registry.reserve(RequestLoad("w0", "w0", 2048, 0, 2048), WorkerPriority(order=20.0, max_step_tokens=64))
    short_s = wait_s(worker, model, order=10.0)
    assert 0 < short_s < wait_s(worker, model, order=30.0) / 16
    registry.reserve(RequestLoad("w0", "w0", 2048, 0, 2048), WorkerPriority(order=21.0))  # has not begun
    assert wait_s(worker, model, order=10.0) == pytest.approx(short_s, rel=0.1)
    assert queue_s(worker, model, order=10.0) == 0


def no_room(desk: Desk) -> QueuedRequest:
    """The default tenant has used its credit. At 20 s one of its prompts is at the worker and another one waits."""
    use_up_credit(desk, "default")
    desk.enter(now=20.0)
    assert len(desk.decide(20.0)) == 1
    waiting = desk.enter(4000, now=20.0)
    assert desk.decide(20.0) == []
    return waiting


def test_a_request_with_a_deadline_goes_where_only_its_order_has_room() -> None:
    desk = make_desk()
    first = no_room(desk)
    hurried = desk.enter(ttft_slo_s=5.0, now=20.0)
    (decided,) = desk.decide(22.5)  # it would be late behind the 4000 tokens
    assert isinstance(decided, Dispatch)
    assert (decided.queued, decided.worker_priority.order) == (hurried, 22.5 - LEAD_S)
    desk.enter(ttft_slo_s=9.0, now=22.5)
    assert desk.decide(22.5) == [], "the worker has a prompt of that order"
    desk.computes("w0", 1024)
    assert next(decided.queued for decided in desk.decide(23.0)) is first


def test_a_request_that_has_waited_long_is_not_overtaken_by_a_deadline() -> None:
    desk = make_desk()
    no_room(desk)
    desk.registry.reserve(RequestLoad("w0", "w0", 1024, 0, 1024), WorkerPriority(order=28.0))
    desk.bookings[0].release()
    hurried = desk.enter(ttft_slo_s=60.0, now=28.0)
    assert desk.decide(20.0 + LEAD_S) == []
    assert [decided.queued for decided in desk.decide(19.9 + LEAD_S)] == [hurried]


def test_deadlines_of_one_tenant_overtake_another_only_within_its_credit() -> None:
    desk = make_desk()
    first = no_room(desk)
    overtaking_s = 0.0
    for number in range(90):  # in 9 s
        now = 20.0 + 0.1 * number
        desk.enter(128, ttft_slo_s=60.0, tenant="hurried", now=now)
        decisions = desk.decide(now)
        if first in [decided.queued for decided in decisions]:
            break
        for decided in decisions:  # computed at once, because they overtake the prompt at the worker
            overtaking_s += decided.queued.work.worker_s
            desk.bookings.pop().release()
        if not decisions:
            desk.computes("w0", 512)
    # The tenant used its own credit before it was behind the first request in the queue.
    assert 2 * CREDIT_S < overtaking_s < 2 * CREDIT_S + 2
    assert first not in desk.admission.requests


def test_a_decision_takes_no_longer_with_thousands_of_deadlines() -> None:
    def work(num_requests: int) -> int:
        desk = make_desk(max_queued_prompt_tokens=10**9)
        no_room(desk)
        for priority, slo_s in ((0, math.inf), (1, 1e6)):
            request = make_request(16, priority=priority, ttft_slo_s=slo_s)
            forecast = desk.admission.forecast(request, 20.0)
            for _ in range(num_requests // 2):
                desk.admission.enter(request, forecast, 20.0)
        assert desk.admission.next(20.1) is None
        return num_lines_run(lambda: desk.admission.next(20.2))

    assert work(5000) <= 1.1 * work(500)


@pytest.mark.parametrize(
    ("tenant", "num_held", "goes"),
    [("greedy", 0, False), ("modest", 0, True), ("modest", 1, True), ("modest", 2, False)],
)
def test_a_tenant_that_holds_less_is_sent_to_anothers_seats(tenant: str, num_held: int, *, goes: bool) -> None:
    """The worker takes one back for it. The tenants have four seats each at most, and would wait for long answers."""
    desk = make_desk(max_num_seqs=4)
    for name in ["modest"] * num_held + ["greedy"] * (4 - num_held):
        priority = WorkerPriority(tenant=name)
        desk.registry.reserve(RequestLoad("w0", "w0", 16, 0, 2016), priority).prefill_done()
    queued = desk.enter(16, tenant=tenant, expected_output_tokens=2000)
    assert [decided.queued for decided in desk.decide()] == ([queued] if goes else [])
    assert (queued.forecast.start_s < 1.0) is goes
    (worker,) = desk.registry
    assert worker.gives_way_to(tenant, 3 * worker.card.num_blocks * worker.card.block_size) is False
    for booking in desk.bookings:
        booking.release()
    assert sum(load.num_seqs for worker in desk.registry for load in worker.tenants.values()) == 4


def test_prompts_that_may_be_overtaken_take_short_steps_among_tenants() -> None:
    desk = make_desk(one_priority=True)
    two_tenants(desk)
    (modest,) = desk.decide(20.0)
    desk.computes("w0", 1536)
    greedy = [decided for decided in desk.decide(21.0) if isinstance(decided, Dispatch)]
    assert isinstance(modest, Dispatch)
    assert modest.worker_priority == WorkerPriority(order=20.0 - LEAD_S, tenant="modest")
    assert {decided.worker_priority for decided in greedy} == {WorkerPriority(21.0, 240, "greedy")}, (
        "20 ms of 200 are fixed"
    )
    desk.computes("w0", 10_000)
    (last,) = desk.decide(100.0)
    assert isinstance(last, Dispatch)
    assert last.worker_priority.max_step_tokens == 0, "the other tenant's request was over a minute ago"


@pytest.mark.parametrize("max_worker_queue_s", [0.0, 1e9])
def test_waiting_in_the_router_does_not_change_the_placement(max_worker_queue_s: float) -> None:
    """A decode worker gets as many prompts whether earlier ones wait in the router or at the prefill worker.

    Of prompts that come together, a quarter on it delays all of them least: it stalls what it decodes meanwhile.
    """
    desk = make_desk(Role.PREFILL, Role.DECODE, one_priority=True, max_worker_queue_s=max_worker_queue_s)
    crowd = []
    for _ in range(64):
        crowd.append(desk.enter(128, expected_output_tokens=64))
        desk.decide()
    assert (len(desk.admission) == 0) == (max_worker_queue_s > 0)
    pairs = [waiting.placement.best.is_pair for waiting in crowd]
    assert pairs.count(False) <= 64 // 4


def test_short_prompts_fill_a_worker_up() -> None:
    desk = make_desk()
    for _ in range(100):
        desk.enter(16)
    assert 5 < len(desk.decide()) < 50


def test_a_late_urgent_request_goes_first() -> None:
    desk = make_desk()
    first, second = desk.enter(), desk.enter()
    urgent = desk.enter(priority=-1, now=0.1)
    assert [decided.queued for decided in desk.decide(0.1)] == [urgent], "no decision was taken before"
    desk.computes("w0", 512)
    assert [decided.queued for decided in desk.decide(0.5)] == [first]
    desk.computes("w0", 512)
    assert [decided.queued for decided in desk.decide(0.9)] == [second]


def test_a_request_is_placed_again_before_it_is_dispatched() -> None:
    desk = make_desk(Role.COLOCATED, Role.COLOCATED)
    for _ in range(3):
        waiting = desk.enter(1000)
    desk.decide()
    assert waiting.placement.best.decode.worker_id == "w0"
    desk.computes("w1", 1000)
    (decided,) = desk.decide(0.1)
    assert decided.queued is waiting
    assert isinstance(decided, Dispatch)
    assert decided.placement.best.decode.worker_id == "w1"


def test_a_request_that_waits_for_its_prefix_does_not_block_the_others() -> None:
    desk = make_desk(Role.COLOCATED, Role.COLOCATED)
    chain = [b"%d" % i for i in range(240)]
    desk.index.speculate({"w0"}, chain, 0.0)
    for worker_id, num in (("w0", 1000), ("w1", 500)):
        desk.registry.reserve(RequestLoad(worker_id, worker_id, num, 0, num), WorkerPriority(order=-LEAD_S))
    cached, other = desk.enter(240 * 16, digests=chain), desk.enter(16)
    assert desk.decide() == []
    desk.computes("w1", 500)
    assert [decided.queued for decided in desk.decide(0.1)] == [other]
    assert cached.placement.best.prefill.worker_id == "w0"


def test_many_requests_for_one_prefix_spread_over_workers() -> None:
    desk = make_desk(Role.COLOCATED, Role.COLOCATED)
    chain = [b"%d" % i for i in range(60)]
    desk.index.speculate({"w0"}, chain, 0.0)
    crowd = [desk.enter(64 * 16, digests=chain) for _ in range(30)]
    preferred = {waiting.placement.best.prefill.worker_id for waiting in crowd}
    assert preferred == {"w0", "w1"}, "requests that wait for a worker count as its queue"


def test_requests_wait_in_the_router_while_memory_is_full() -> None:
    desk = make_desk(num_blocks=128, max_worker_queue_s=0.1)
    for _ in range(3):
        desk.enter(1000, expected_output_tokens=500)
    assert len(desk.decide()) == 1
    desk.computes("w0", 1000)
    desk.bookings[0].prefill_done()
    assert desk.decide(1.0) == []
    desk.bookings[0].release()
    assert len(desk.decide(2.0)) == 1


def test_requests_wait_in_the_router_while_all_seats_are_taken() -> None:
    desk = make_desk(max_num_seqs=2, max_worker_queue_s=0.1)
    for _ in range(5):
        desk.enter(10, expected_output_tokens=500)
    assert len(desk.decide()) == 2
    for booking in desk.bookings:
        booking.prefill_done()
    assert desk.decide(1.0) == []
    forecast = desk.admission.forecast(make_request(10, expected_output_tokens=500), 1.0)
    step_s = desk.registry.table.pace(CostModel()).step_s.item(0)
    assert forecast.start_s == pytest.approx(500 * step_s * 4 / 2), "three go first, and two run"
    desk.bookings[0].release()
    assert len(desk.decide(2.0)) == 1


def test_too_much_queued_work_is_refused_with_a_true_retry_after() -> None:
    desk = make_desk(max_queued_prompt_tokens=2000)
    desk.enter(3000)  # nothing is queued: waiting would not help this prompt
    (first,) = desk.decide()
    assert isinstance(first, Dispatch)
    desk.bookings[0].release()
    desk.enter(1000)
    desk.decide()
    desk.enter(900)
    with pytest.raises(Overloaded, match="max_queued_prompt_tokens=2000") as refused:
        desk.enter(500)
    assert refused.value.code == "queue_full"
    retry_after_s = refused.value.retry_after_s
    assert 0 < retry_after_s < 5
    rate = 1000 / desk.admission.forecast(make_request(10), 0.0).placement.best.terms.queue_s
    desk.computes("w0", round(rate * retry_after_s) + 1)
    desk.enter(500, now=retry_after_s)


def test_one_tenant_cannot_fill_the_queue() -> None:
    desk = make_desk(max_queued_prompt_tokens=10_000, tenants={"a": TenantPolicy(max_queue_share=0.1)})
    desk.enter()
    desk.decide()
    desk.enter(900, tenant="a")
    with pytest.raises(Overloaded, match=r"900 prompt tokens of tenant 'a'.*max_queue_share=0.1") as refused:
        desk.enter(500, tenant="a")
    assert (refused.value.code, refused.value.retry_after_s > 0) == ("tenant_queue_full", True)
    desk.enter(500, tenant="b")
    assert "other" not in desk.admission.report()["tenants"]  # type: ignore[operator]
    assert desk.admission.report()["tenants"]["a"]["rejected"] == {"tenant_queue_full": 1}  # type: ignore[index]


def test_a_deadline_that_cannot_be_met_is_refused_with_the_prediction() -> None:
    desk = make_desk(tenants={"a": TenantPolicy(ttft_slo_s=2.0)})
    for _ in range(10):
        desk.enter()
    with pytest.raises(DeadlineUnmet, match=r"predicted in 4\d\d\d ms; the TTFT SLO is 2000 ms") as refused:
        desk.enter(tenant="default", ttft_slo_s=2.0)
    assert 2 < refused.value.retry_after_s < 3.5
    desk.enter(tenant="a")  # its tenant has nothing waiting, so it goes before them
    desk.enter(ttft_slo_s=math.inf)


@pytest.mark.parametrize(("slo_s", "is_foreseen"), [(2.0, True), (0.5, False)])
def test_a_tenant_refused_because_of_others_is_expected_to_go_first_later(slo_s: float, is_foreseen: bool) -> None:
    desk = make_desk()
    for tenant, num_served in (("a", 8), ("c", 12)):
        for _ in range(num_served):
            desk.enter(tenant=tenant)
            desk.decide()
            desk.bookings.pop().release()
    for _ in range(8):
        desk.enter(tenant="b")
    for _ in range(2):
        desk.enter(tenant="a")
    desk.decide()

    def start_s() -> float:
        return desk.admission.forecast(make_request(tenant="c"), 0.0).start_s

    before_s = start_s()
    for _ in range(10):
        with pytest.raises(DeadlineUnmet):
            desk.enter(tenant="a", ttft_slo_s=slo_s)
    assert (start_s() > before_s) is is_foreseen, "a request that would be late on its own is never admitted"


def test_admitted_requests_meet_their_deadlines_at_twice_the_capacity() -> None:
    admitted = []
    for seed in range(3):
        print(f"seed {seed}")
        rng = random.Random(seed)
        arrivals = [
            arrival
            for number in range(20)
            for arrival in poisson(rng, f"t{number}", 8.6 / 20, 60.0, slo_s=2.0, num_retries=1)
        ]
        jobs = VirtualCluster(seed=seed).run(arrivals)
        # Before that their demand is not known yet.
        admitted += [job for job in jobs if not job.is_refused and job.arrival.time_s > 15.0]
    assert sum(job.is_in_time for job in admitted) / len(admitted) >= 0.95


def test_an_idle_worker_is_worth_a_try_so_that_a_wrong_model_learns() -> None:
    desk = make_desk()
    desk.enter(1000, ttft_slo_s=0.1)
    assert isinstance(desk.decide()[0], Dispatch)
    with pytest.raises(DeadlineUnmet, match="the TTFT SLO is 100 ms") as refused:
        desk.enter(1000, ttft_slo_s=0.1)
    desk.computes("w0", 1000)
    desk.enter(1000, ttft_slo_s=0.1, now=refused.value.retry_after_s)


def test_a_request_is_dropped_as_soon_as_it_is_known_to_be_late() -> None:
    desk = make_desk()
    desk.enter()
    desk.decide()
    waiting = desk.enter(ttft_slo_s=1.5)
    assert desk.decide(waiting.latest_start_s - 0.01) == []
    (dropped,) = desk.decide(waiting.latest_start_s + 0.01)  # the worker has reported nothing
    assert isinstance(dropped, Drop)
    assert isinstance(dropped.error, DeadlineUnmet)
    assert desk.admission.report()["tenants"]["default"]["dropped"] == {"ttft_slo_unmet": 1}  # type: ignore[index]
    desk.admission.check_integrity()


def test_without_workers_nothing_waits() -> None:
    desk = make_desk()
    for _ in range(2):
        desk.enter()
    desk.decide()
    desk.registry.set_state("w0", WorkerState.DEAD, "test")
    (dropped,) = desk.decide()
    assert isinstance(dropped, Drop)
    assert isinstance(dropped.error, NoWorker)
    with pytest.raises(NoWorker):
        desk.enter()


def test_a_refusal_takes_no_longer_with_a_thousand_waiting() -> None:
    def work(num_requests: int) -> int:
        desk = make_desk(*[Role.PREFILL, Role.DECODE] * 4)
        for number in range(num_requests):
            desk.enter(100, tenant=f"t{number % 50}", priority=number % 7)
        desk.decide()
        assert len(desk.admission) > 0.8 * num_requests

        def refuse() -> None:
            with pytest.raises(DeadlineUnmet):
                desk.enter(100, tenant="t3", priority=9, ttft_slo_s=1.0)

        return num_lines_run(refuse)

    assert work(1000) <= 1.1 * work(500)


def test_a_client_that_retries_after_the_given_time_is_admitted() -> None:
    refused_jobs = 0
    for seed in range(5):
        print(f"seed {seed}")
        rng = random.Random(seed)
        arrivals = [
            Arrival(
                time_s=rng.uniform(0, 5),
                tenant=f"t{rng.randrange(3)}",
                num_prompt_tokens=rng.randint(64, 1024),
                num_output_tokens=rng.randint(1, 60),
            )
            for _ in range(60)
        ]
        # One client has an SLO, and the load ends before it asks again.
        last = Arrival(time_s=5.1, tenant="t0", slo_s=2.0, num_retries=1)
        job = VirtualCluster(seed=seed).run([*arrivals, last])[60]
        refused_jobs += job.is_refused
        if job.retry is not None:
            assert job.retry.error is None, job.retry.error
            assert job.retry.is_in_time
    assert refused_jobs >= 4


def test_each_tenant_has_its_own_expected_length() -> None:
    lengths = AnswerLengths()
    for _ in range(200):
        lengths.note("long", 1000)
        lengths.note("short", 10)
    assert lengths.expected("long", 10_000) > 990
    assert lengths.expected("long", 20) == 20
    assert lengths.expected("short", 10_000) == 10
    assert 10 < lengths.expected("new", 10_000) < 1000


def test_beyond_the_limit_only_the_least_recent_tenant_is_forgotten() -> None:
    lengths = AnswerLengths()
    for _ in range(200):
        lengths.note("oldest", 1000)
        lengths.note("long", 1000)
    for number in range(MAX_TENANTS - 1):
        lengths.note(f"t{number}", 10)
    assert lengths.expected("long", 10_000) > 990
    assert lengths.expected("oldest", 10_000) == lengths.expected("new", 10_000) < 20


def test_priorities_of_tenants_within_the_limit_are_kept() -> None:
    desk = make_desk(one_priority=True, max_queued_prompt_tokens=10**9)
    request = make_request(1, tenant="mixed")
    desk.admission.enter(request, desk.admission.forecast(request, 0.0), 0.0)
    for number in [*range(MAX_TENANTS - 1), 0]:
        request = make_request(1, tenant=f"t{number}")
        desk.admission.leave(desk.admission.enter(request, desk.admission.forecast(request, 0.0), 0.0), "test")
    desk.enter(1, tenant="mixed", priority=1)
    for _ in range(6):
        desk.enter()
    assert len([one for one in desk.decide() if one.queued.tenant == "default"]) == 1, "urgencies are mixed"


@pytest.mark.parametrize(
    ("queues", "work", "level"),
    [([1.0], 0.0, 1.0), ([1.0, 3.0], 1.0, 2.0), ([1.0, 3.0], 4.0, 4.0), ([3.0, 1.0, 9.0], 2.0, 3.0), ([], 1.0, 0.0)],
)
def test_work_fills_the_shortest_queues_first(queues: list[float], work: float, level: float) -> None:
    assert fill_level(queues, work) == pytest.approx(level)


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        time_s=st.floats(0, 3),
        tenant=st.sampled_from("abc"),
        num_prompt_tokens=st.integers(1, 1500),
        num_output_tokens=st.integers(1, 20),
        priority=st.integers(-1, 1),
        slo_s=st.sampled_from([0.5, 1.0, 3.0, math.inf]),
        leaves_s=st.sampled_from([1.0, 2.0, math.inf]),
        num_retries=st.integers(0, 1),
    ),
    min_size=1,
    max_size=40,
)


@given(arrivals=ARRIVALS, num_prefill=st.integers(0, 2), dies_s=st.sampled_from([None, 0.5, 2.0]))
def test_every_request_gives_everything_back(arrivals: list[Arrival], num_prefill: int, dies_s: float | None) -> None:
    arrivals = [a for a in arrivals if a.leaves_s > a.time_s]
    cluster = VirtualCluster(num_prefill=num_prefill, num_decode=1)
    first = next(iter(cluster.registry)).worker_id
    if dies_s is not None:
        cluster.at(dies_s, lambda: cluster.registry.set_state(first, WorkerState.DRAINING, "test"))
    for job in cluster.run(arrivals):
        assert not math.isnan(job.ended_s), "nothing waits for ever"
    cluster.admission.check_integrity()
    assert len(cluster.admission) == cluster.registry.num_bookings == 0
    assert cluster.admission.report()["waiting_prompt_tokens"] == 0
    for worker in cluster.registry:
        assert (worker.queued_prompt_tokens, worker.num_booked_seqs, worker.booked_kv_tokens) == (0, 0, 0)


def test_a_worker_that_drains_is_given_what_nobody_else_serves_in_portions() -> None:
    desk = make_desk(Role.COLOCATED, Role.COLOCATED)
    desk.registry.set_state("w0", WorkerState.DRAINING, "test", is_fallback=True)
    desk.registry.set_state("w1", WorkerState.DEAD, "test")

    def enter() -> QueuedRequest:
        request = msgspec.structs.replace(make_request(), may_fall_back=True)
        forecast = desk.admission.forecast(request, 0.0)
        starts_s.append(forecast.start_s)
        return desk.admission.enter(request, forecast, 0.0)

    starts_s: list[float] = []
    waiting = [enter() for _ in range(4)]
    assert starts_s == sorted(set(starts_s)), "each waits for those before it"
    assert [decided.queued for decided in desk.decide()] == waiting[:1]
    desk.computes("w0", 512)
    assert [decided.queued for decided in desk.decide()] == waiting[1:2]
    desk.registry.set_state("w0", WorkerState.DRAINING, "its process ends")
    desk.computes("w0", 512)
    assert [isinstance(decided, Drop) for decided in desk.decide()] == [True, True]
