from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.scheduling.admission.fair_queue import (
    CREDIT_S,
    MAX_IDLE_TENANTS,
    MAX_OVERTAKEN_S,
    OLDEST_FIRST_INTERVAL,
    FairQueue,
    QueueEntry,
)
from tandem.scheduling.admission.work import Work

WEIGHTS = {"a": 1.0, "b": 3.0, "c": 1.0}


def make_queue() -> FairQueue:
    return FairQueue(lambda tenant: WEIGHTS.get(tenant, 1.0))


def make_entry(tenant: str = "a", *, priority: int = 0, arrived_s: float = 0.0, worker_s: float = 1.0) -> QueueEntry:
    return QueueEntry(
        tenant=tenant, priority=priority, arrived_s=arrived_s, work=Work(1, worker_s, worker_s / 2, new_tokens=10)
    )


def serve(queue: FairQueue, num: int, now: float = 0.0) -> list[QueueEntry]:
    served = []
    for _ in range(num):
        entry = next(queue.in_order(now))
        queue.serve(entry)
        served.append(entry)
    return served


def tenants(served: list[QueueEntry]) -> Counter[str]:
    return Counter(entry.tenant for entry in served)


@pytest.mark.parametrize(
    ("waiting", "num_served", "expected"),
    [
        ([("a", 1.0, 40), ("b", 1.0, 40)], 40, {"a": 10, "b": 30}),
        ([("a", 4.0, 40), ("c", 1.0, 40)], 30, {"a": 6, "c": 24}),
        ([("b", 1.0, 1), ("a", 1.0, 10)], 11, {"a": 10, "b": 1}),
    ],
    ids=["by weight", "seconds and not requests", "unused shares"],
)
def test_worker_seconds_are_shared(
    waiting: list[tuple[str, float, int]], num_served: int, expected: dict[str, int]
) -> None:
    queue = make_queue()
    for tenant, worker_s, count in waiting:
        for _ in range(count):
            queue.add(make_entry(tenant, worker_s=worker_s))
    assert tenants(serve(queue, num_served)) == expected


def test_work_that_was_not_predicted_is_charged_afterwards() -> None:
    queue = make_queue()
    for _ in range(10):
        queue.add(make_entry("a"))
        queue.add(make_entry("c"))
    queue.charge("a", 4.0)
    queue.charge("never seen", 4.0)
    assert tenants(serve(queue, 4)) == {"c": 4}
    queue.check_integrity()


@pytest.mark.parametrize("idle_s", [0.0, 1000.0])
def test_an_idle_tenant_has_a_bounded_credit_and_a_lone_tenant_no_debt(idle_s: float) -> None:
    queue = make_queue()
    for _ in range(100):
        queue.add(make_entry("a"))
    serve(queue, 50)
    for _ in range(50):
        queue.add(make_entry("c", arrived_s=idle_s))
    served = serve(queue, 41, idle_s)
    first = next(idx for idx, entry in enumerate(served) if entry.tenant == "a")
    assert CREDIT_S <= first <= CREDIT_S + 2, "worker seconds at once, after any time of absence"
    rest = tenants(served[first:])
    assert abs(rest["a"] - rest["c"]) <= 1, "then alternately"


def test_a_burst_of_a_tenant_below_its_share_is_within_it() -> None:
    queue = make_queue()
    for _ in range(100):
        queue.add(make_entry("a"))
    for _ in range(2):
        queue.add(make_entry("c"))
        serve(queue, 20)
    clump = [make_entry("c") for _ in range(8)]
    for entry in clump:
        queue.add(entry)
    list(queue.in_order(0.0))
    assert [queue.is_within_share(entry.start_tag) for entry in clump] == [True] * 5 + [False] * 3
    assert not queue.is_within_share(queue.start_tag("a", 0))
    assert queue.is_within_share(queue.start_tag("new", 0))


def test_a_newcomer_goes_before_one_that_floods() -> None:
    queue = make_queue()
    for _ in range(10):
        queue.add(make_entry("a"))
    serve(queue, 3)
    queue.add(make_entry("c", arrived_s=1.0))
    assert [entry.tenant for entry in serve(queue, 3, now=1.0)] == ["c", "a", "a"]


def test_the_more_urgent_goes_first_within_its_tenant_only() -> None:
    queue = make_queue()
    for priority in (5, 0, -1, 0):
        queue.add(make_entry("a", priority=priority))
    queue.add(make_entry("c", priority=9))
    order = serve(queue, 5)
    assert [entry.priority for entry in order if entry.tenant == "a"] == [-1, 0, 0, 5]
    assert order.index(next(entry for entry in order if entry.tenant == "c")) < 2, (
        "priorities do not count between tenants"
    )


def test_no_request_is_overtaken_for_ever() -> None:
    queue = make_queue()
    patient = make_entry(priority=100)
    queue.add(patient)
    for i in range(200):
        now = float(i)
        queue.add(make_entry(priority=-100, arrived_s=now))
        if serve(queue, 1, now)[0] is patient:
            break
    assert MAX_OVERTAKEN_S <= now < MAX_OVERTAKEN_S + OLDEST_FIRST_INTERVAL


def test_an_old_backlog_takes_only_a_part_from_urgent_requests() -> None:
    queue, now = make_queue(), 2 * MAX_OVERTAKEN_S
    for _ in range(100):
        queue.add(make_entry(priority=5))
    for _ in range(100):
        queue.add(make_entry(priority=0, arrived_s=now))
    assert Counter(entry.priority for entry in serve(queue, 40, now)) == {5: 10, 0: 30}


def test_ahead_are_own_requests_and_those_that_others_are_served_meanwhile() -> None:
    queue = make_queue()
    for _ in range(4):
        queue.add(make_entry("a"))
    for _ in range(100):
        queue.add(make_entry("c"))
    assert queue.ahead("a", 0, 0.0).worker_s == pytest.approx(4 + 5), "four of c, and one whose tag passes this one's"
    assert queue.ahead("a", -1, 0.0).worker_s == 0
    assert queue.ahead("new", 0, 0.0).worker_s == 0
    assert queue.ahead("c", 0, 0.0).worker_s == 100 + 4


def test_demand_is_expected_to_continue() -> None:
    queue = make_queue()
    for i in range(100):
        queue.add(make_entry("c", arrived_s=i / 10))
        serve(queue, 1, now=i / 10)
    for _ in range(50):
        queue.add(make_entry("a", arrived_s=10.0))
    none, some = (queue.ahead("a", 0, 10.0, horizon_s).worker_s - 50 for horizon_s in (0.0, 2.0))
    assert none == 0
    assert some == pytest.approx(2.0 * 10 * (1 - math.exp(-1)), rel=0.02), (
        "the window has seen this part of ten a second"
    )


def test_refused_requests_count_as_demand_of_known_tenants() -> None:
    queue = make_queue()
    queue.add(make_entry("c"))
    serve(queue, 1)
    for _ in range(50):
        queue.add(make_entry("a"))
    for _ in range(20):
        for tenant in ("c", "stranger"):
            queue.note_demand(tenant, make_entry(tenant).work, 0.0)
    assert queue.ahead("a", 0, 0.0, 2.0).worker_s - 50 == pytest.approx(2.0 * 21 / 10)
    assert "stranger" not in queue._tenants


def test_tenants_that_ask_no_more_are_forgotten() -> None:
    queue = make_queue()
    for i in range(3 * MAX_IDLE_TENANTS):
        queue.add(make_entry(f"t{i}"))
        serve(queue, 1)
    assert len(queue) == 0
    queue.check_integrity()  # of tenants who ask nothing, at most MAX_IDLE_TENANTS are remembered


def test_beyond_the_limit_only_the_least_recent_tenants_are_forgotten() -> None:
    queue = make_queue()
    for tenant in ("debtor", "oldest", "debtor"):
        queue.add(make_entry(tenant, worker_s=100.0))
        serve(queue, 1)
    new_tag, debts = queue.start_tag("new", 0), {name: queue.start_tag(name, 0) for name in ("debtor", "oldest")}
    assert min(debts.values()) > new_tag
    for i in range(MAX_IDLE_TENANTS - 1):
        queue.add(make_entry(f"t{i}", worker_s=0.0))
        serve(queue, 1)
    assert queue.start_tag("debtor", 0) == debts["debtor"], "it has been served more than its share lately"
    assert queue.start_tag("oldest", 0) == new_tag
    queue.note_demand("debtor", Work(), 0.0)
    for i in range(MAX_IDLE_TENANTS - 1):
        queue.add(make_entry(f"u{i}", worker_s=0.0))
        serve(queue, 1)
    assert queue.start_tag("debtor", 0) == debts["debtor"], "a refused request renews it"
    queue.check_integrity()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "serve", "remove"]),
        st.sampled_from("abc"),
        st.integers(-1, 1),
        st.floats(0.1, 5.0),
        st.floats(0.0, 20.0),
    ),
    max_size=60,
)


@given(STEPS)
def test_sums_agree_and_each_request_is_served_once(steps: list[tuple[str, str, int, float, float]]) -> None:
    queue, waiting, now = make_queue(), set[QueueEntry](), 0.0
    for action, tenant, priority, worker_s, pause_s in steps:
        now += pause_s
        if action == "add":
            entry = make_entry(tenant, priority=priority, arrived_s=now, worker_s=worker_s)
            queue.add(entry)
            waiting.add(entry)
        elif waiting and action == "serve":
            waiting.remove(serve(queue, 1, now)[0])
        elif waiting:
            gone = min(waiting, key=lambda one: (one.arrived_s, one.tenant))
            waiting.remove(gone)
            assert queue.remove(gone)
            assert not queue.remove(gone)
        queue.check_integrity()
        assert len(queue) == queue.total.num_requests == len(waiting)
        order = list(queue.in_order(now))
        assert len(order) == len(waiting)
        assert set(order) == waiting
