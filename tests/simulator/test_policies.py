"""Each policy's published formula, on states small enough to work out by hand."""

from __future__ import annotations

import random

import pytest

from tandem.protocol.messages import Role
from tandem.scheduling.workers.load import RequestLoad
from tandem.simulator.fleet import SimulatedFleet, make_card
from tandem.simulator.policies import POLICIES, Policy, RoutingRequest

BLOCK_SIZE = 512


def make_fleet(num_workers: int = 3, role: Role = Role.COLOCATED, name: str = "w") -> SimulatedFleet:
    fleet = SimulatedFleet()
    for idx in range(num_workers):
        join(fleet, f"{name}{idx}", role)
    return fleet


def join(fleet: SimulatedFleet, worker_id: str, role: Role) -> None:
    card = make_card(
        worker_id,
        role,
        kind="NVIDIA H200",
        num_blocks=1000,
        block_size=BLOCK_SIZE,
        block_bytes=1,
        max_num_batched_tokens=2048,
    )
    fleet.join(card)


def make_policy(name: str, fleet: SimulatedFleet) -> Policy:
    return POLICIES[name](fleet, random.Random(0))


def make_request(num_blocks: int = 10) -> RoutingRequest:
    digests = [f"{idx:016}".encode() for idx in range(num_blocks)]
    return RoutingRequest(num_blocks * BLOCK_SIZE + 1, 100, digests)


def book(fleet: SimulatedFleet, worker_id: str, *, new: int = 0, kv: int = 0, times: int = 1) -> None:
    for _ in range(times):
        fleet.registry.reserve(RequestLoad(worker_id, worker_id, new, 0, kv))
        fleet.add_prompts(worker_id, 1)


def cache(fleet: SimulatedFleet, worker_id: str, num_blocks: int) -> None:
    fleet.announce(worker_id, list(make_request().digests)[:num_blocks], [])


def chosen(policy: Policy, request: RoutingRequest | None = None) -> str:
    return policy.choose(request or make_request(), 0.0).prefill.worker_id


def test_round_robin_takes_one_worker_after_the_other_in_both_pools() -> None:
    fleet = make_fleet(2, Role.PREFILL, "p")
    for worker_id in ("d0", "d1", "d2"):
        join(fleet, worker_id, Role.DECODE)
    policy = make_policy("round_robin", fleet)
    choices = []
    for _ in range(4):
        choices.append(choice := policy.choose(make_request(), 0.0))
        fleet.registry.reserve(RequestLoad(choice.prefill.worker_id, choice.decode.worker_id, 10, 0, 10))
    assert [choice.prefill.worker_id for choice in choices] == ["p0", "p1", "p0", "p1"]
    assert [choice.decode.worker_id for choice in choices] == ["d0", "d1", "d2", "d0"]
    assert all(choice.is_pair for choice in choices)


def test_least_loaded_counts_prompts_before_kv() -> None:
    fleet = make_fleet()
    book(fleet, "w0", new=10, kv=10)
    book(fleet, "w1", kv=900)
    book(fleet, "w2", kv=800)
    assert chosen(make_policy("least_loaded", fleet)) == "w2"


def test_power_of_two_never_takes_the_worst_of_three() -> None:
    fleet = make_fleet()
    book(fleet, "w1", new=500, kv=500)
    policy = make_policy("power_of_two", fleet)
    assert {chosen(policy) for _ in range(50)} == {"w0", "w2"}


def test_cache_aware_follows_its_own_decisions_until_loads_differ_too_much() -> None:
    fleet = make_fleet()
    policy = make_policy("cache_aware", fleet)
    assert chosen(policy) == "w0"
    book(fleet, "w0", kv=1, times=64)
    assert chosen(policy) == "w0"  # 64 more than the least loaded is not an imbalance yet
    book(fleet, "w0", kv=1)
    assert chosen(policy) == "w1"


def test_cache_aware_needs_three_tenths_of_the_prompt() -> None:
    fleet = make_fleet()
    policy = make_policy("cache_aware", fleet)
    chosen(policy, make_request(3))
    book(fleet, "w0")
    assert chosen(policy, make_request(10)) == "w1"  # exactly 0.3 is not more than 0.3
    book(fleet, "w1")
    assert chosen(policy, make_request(9)) == "w1"


def test_dynamo_weighs_overlap_against_blocks_in_use() -> None:
    fleet = make_fleet(2)
    cache(fleet, "w0", 10)
    policy = make_policy("dynamo", fleet)
    book(fleet, "w0", kv=9 * BLOCK_SIZE)
    assert chosen(policy) == "w0"  # 10 blocks of overlap against 9 active ones
    book(fleet, "w0", kv=2 * BLOCK_SIZE)
    assert chosen(policy) == "w1"


def test_dynamo_charges_prompts_that_wait() -> None:
    fleet = make_fleet(2)
    cache(fleet, "w0", 10)
    book(fleet, "w0", new=11 * BLOCK_SIZE)
    assert chosen(make_policy("dynamo", fleet)) == "w1"


@pytest.mark.parametrize(("num_cached", "expected"), [(6, "w1"), (7, "w0")])
def test_llm_d_gives_up_a_queue_score_of_two_for_most_of_the_prompt(num_cached: int, expected: str) -> None:
    fleet = make_fleet(2)
    cache(fleet, "w0", num_cached)
    book(fleet, "w0")  # the only request: queue score 0 against 1
    assert chosen(make_policy("llm_d", fleet)) == expected


def test_llm_d_prefers_free_kv() -> None:
    fleet = make_fleet(2)
    book(fleet, "w0", kv=1000)
    book(fleet, "w1", kv=900)
    assert chosen(make_policy("llm_d", fleet)) == "w1"


def test_load_routers_decode_where_the_load_is_least() -> None:
    for name in ("least_loaded", "dynamo", "llm_d", "cache_aware", "power_of_two"):
        fleet = make_fleet(2, Role.PREFILL, "p")
        for worker_id in ("d0", "d1"):
            join(fleet, worker_id, Role.DECODE)
        book(fleet, "d0", kv=5000)
        assert make_policy(name, fleet).choose(make_request(), 0.0).decode.worker_id == "d1", name


def test_a_choice_expects_the_hits_of_the_index() -> None:
    fleet = make_fleet(1)
    cache(fleet, "w0", 10)
    for name in POLICIES:
        choice = make_policy(name, fleet).choose(make_request(), 0.0)
        assert choice.num_cached_tokens == 10 * BLOCK_SIZE, name
