"""Invariants of every simulation: nothing is lost, computed twice or for free, and time goes forward."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.loadtest.traces import TRACE_BLOCK_SIZE, TraceRequest
from tandem.protocol.config import RouterConfig
from tandem.scheduling.placement.placer import Placer
from tandem.simulator.arrivals import at_load, load_of, spread
from tandem.simulator.cluster import Cluster
from tandem.simulator.machine import MACHINES
from tandem.simulator.policies import POLICIES, UNLIMITED_TOKENS, RoutingChoice, RoutingRequest, placement_request
from tandem.simulator.pool import Pool
from tandem.simulator.simulation import Outcome, _Simulation, simulate


def make_cluster(*, num_prefill: int = 0, num_decode: int = 4, **changes: object) -> Cluster:
    return replace(
        Cluster(machine=MACHINES["h200-8b"], num_prefill=num_prefill, num_decode=num_decode),
        **changes,  # type: ignore[arg-type]
    )


def make_chats(num_chats: int = 30, *, seed: int = 0, mean_gap_s: float = 0.3) -> list[TraceRequest]:
    """Chats of several turns that resend their history and share a first block."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    requests, block_id = [], 1
    for _ in range(num_chats):
        now, block_ids = rng.uniform(0, num_chats * mean_gap_s), [0]
        for _ in range(rng.randint(1, 6)):
            num_new = rng.randint(0, 8)
            block_ids += range(block_id, block_id + num_new)
            block_id += num_new
            num_tokens = len(block_ids) * TRACE_BLOCK_SIZE + rng.randint(0, TRACE_BLOCK_SIZE - 1)
            requests.append(TraceRequest(now, num_tokens, rng.choice([1, 2, 50, 300]), tuple(block_ids)))
            now += rng.uniform(0.5, 5)
    return sorted(requests, key=lambda request: request.arrival_s)


SHAPES = {
    "colocated": make_cluster(),
    "split": make_cluster(num_prefill=2, num_decode=2),
    "host tier": make_cluster(num_prefill=2, num_decode=2, host_cache_tokens=2_000_000, peer_reads=False),
    "small pools": make_cluster(machine=replace(MACHINES["h200-8b"], pool_tokens=50_000, max_num_seqs=5)),
    "small pools, split": make_cluster(
        num_prefill=2, num_decode=2, machine=replace(MACHINES["h200-8b"], pool_tokens=50_000)
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_request_is_served_once_and_completely(policy: str, shape: str) -> None:
    requests = make_chats(mean_gap_s=0.1)
    outcome = simulate(requests, SHAPES[shape], policy)
    assert outcome.num_refused == 0
    assert len(outcome.jobs) == len(requests)
    for job, request in zip(outcome.jobs, requests, strict=True):
        assert job.arrival_s == request.arrival_s
        assert job.num_computed_tokens == job.num_prompt_tokens == request.num_prompt_tokens
        assert job.first_token_s is not None
        assert job.end_s is not None
        assert job.arrival_s < job.first_token_s <= job.end_s
        assert (job.first_token_s == job.end_s) == (job.num_output_tokens == 1)
    # Tokens that were not found or read were computed once, by some worker.
    num_computed = sum(job.num_prompt_tokens - job.num_cached_tokens - job.num_loaded_tokens for job in outcome.jobs)
    assert sum(outcome.prefilled_tokens.values()) == num_computed
    assert sum(gaps.num_gaps for gaps in outcome.gaps) == sum(job.num_output_tokens - 1 for job in outcome.jobs)


@pytest.mark.parametrize("shape", SHAPES)
def test_gaps_add_up_to_the_time_between_tokens(shape: str) -> None:
    outcome = simulate(make_chats(), SHAPES[shape], "tandem")
    gaps_s = sum((gaps.first_s + gaps.last_s) / 2 * gaps.num_gaps for gaps in outcome.gaps)
    assert gaps_s == pytest.approx(sum(job.end_s - job.first_token_s for job in outcome.jobs), rel=1e-6)  # type: ignore[operator, misc]


@pytest.mark.parametrize("policy", POLICIES)
def test_same_seed_same_result(policy: str) -> None:
    def times(outcome: Outcome) -> list[tuple[float | None, float | None, str]]:
        return [(job.first_token_s, job.end_s, job.prefill_worker_id) for job in outcome.jobs]

    cluster = make_cluster(num_prefill=2, num_decode=2)
    assert times(simulate(make_chats(), cluster, policy, 7)) == times(simulate(make_chats(), cluster, policy, 7))


def test_prompts_too_large_for_any_pool_are_refused() -> None:
    cluster = make_cluster(machine=replace(MACHINES["h200-8b"], pool_tokens=10 * TRACE_BLOCK_SIZE))
    requests = [
        TraceRequest(0.0, 9 * TRACE_BLOCK_SIZE, TRACE_BLOCK_SIZE, ()),
        TraceRequest(0.0, 9 * TRACE_BLOCK_SIZE, TRACE_BLOCK_SIZE + 1, ()),
    ]
    outcome = simulate(requests, cluster, "tandem")
    assert (len(outcome.jobs), outcome.num_refused) == (1, 1)


def test_the_router_learns_what_steps_cost() -> None:
    outcome = simulate(make_chats(), make_cluster(machine=MACHINES["h200-70b"]), "tandem")
    assert outcome.step_error < 0.05  # its prior is off by a factor of two to seven


def test_a_long_prompt_reserves_no_room_to_decode_before_it_is_computed() -> None:
    machine = replace(MACHINES["h200-8b"], pool_tokens=600_000)
    requests = [TraceRequest(0.0, 500_000, 50, ()), TraceRequest(5.0, 150_000, 50, ())]
    outcome = simulate(requests, make_cluster(num_prefill=2, num_decode=1, machine=machine), "round_robin")
    long, short = outcome.jobs
    assert short.first_token_s is not None
    assert short.second_token_s is not None
    assert long.first_token_s is not None
    assert long.second_token_s is not None
    assert short.second_token_s < long.first_token_s
    for job in (long, short):
        assert job.second_token_s - job.first_token_s < 1.0, "its room was reserved when its prompt was computed"


def test_a_peer_is_read_if_that_is_faster_and_its_copy_is_demoted(monkeypatch: pytest.MonkeyPatch) -> None:
    demoted: list[int] = []
    monkeypatch.setattr(Pool, "demote", lambda self, digests: demoted.append(self.count_cached(digests)))
    # A prompt is cached on one worker, which then gets a much longer one; then the first prompt comes again.
    shared = tuple(range(100))
    requests = [
        TraceRequest(0.0, 51_200, 2, shared),
        TraceRequest(30.0, 250_000, 2, shared + tuple(range(1000, 1388))),
        TraceRequest(30.1, 51_200, 2, shared),
    ]
    reading, computing = (
        simulate(requests, make_cluster(num_decode=2, machine=MACHINES["h200-70b"], peer_reads=peer_reads), "tandem")
        for peer_reads in (True, False)
    )
    assert [job.num_loaded_tokens for job in reading.jobs] == [0, 0, 99 * TRACE_BLOCK_SIZE]
    assert [job.num_loaded_tokens for job in computing.jobs] == [0, 0, 0]
    assert demoted == [99]
    assert reading.jobs[2].first_token_s < computing.jobs[2].first_token_s  # type: ignore[operator]


def test_without_a_read_nothing_is_demoted() -> None:
    scheduled: list[object] = []
    submitted: list[object] = []
    pool = SimpleNamespace(count_cached=lambda digests: 50, demote=None)
    worker = SimpleNamespace(worker_id="w", pool=pool, submit=submitted.append)
    simulation: Any = SimpleNamespace(
        _workers={"w": worker, "holder": SimpleNamespace(pool=pool)},
        _host_load=lambda worker, digests, num_own: (0.0, 0),
        _peer_load=lambda holder, digests, num_own: (0.1, 50),  # no more than the reader has
        _clock=SimpleNamespace(now=0.0, at=lambda *event: scheduled.append(event)),
    )
    named = SimpleNamespace(worker=SimpleNamespace(worker_id="holder"))
    choice: Any = SimpleNamespace(prefill=SimpleNamespace(worker_id="w"), candidate=SimpleNamespace(holder=named))
    job: Any = SimpleNamespace(digests=[bytes([idx]) for idx in range(100)], num_usable_blocks=lambda size: 99)
    _Simulation._load_and_submit(simulation, job, choice)
    assert (scheduled, submitted) == ([], [job])


def test_a_host_tier_brings_back_what_the_pool_evicted() -> None:
    machine = replace(MACHINES["h200-70b"], pool_tokens=60 * TRACE_BLOCK_SIZE)
    chains = [tuple(range(100 * number, 100 * number + 40)) for number in range(4)]
    requests = [TraceRequest(10.0 * idx, 20_480, 2, chains[idx % 4]) for idx in range(8)]
    without = simulate(requests, make_cluster(num_decode=1, machine=machine), "tandem")
    with_tier = simulate(requests, make_cluster(num_decode=1, machine=machine, host_cache_tokens=10**6), "tandem")
    assert sum(job.num_loaded_tokens for job in without.jobs) == 0
    assert [job.num_loaded_tokens > 0 for job in with_tier.jobs] == [False] * 4 + [True] * 4
    later_s = [job.first_token_s - job.arrival_s for job in with_tier.jobs]  # type: ignore[operator]
    assert max(later_s[4:]) < min(later_s[:4]) / 10


def test_the_last_chunk_of_a_handoff_is_exposed() -> None:
    machine = replace(MACHINES["h200-8b"], link_latency_s=0.5, link_bytes_per_s=1e9)
    cluster = make_cluster(num_prefill=1, num_decode=1, machine=machine)
    job = simulate([TraceRequest(0.0, 4096, 2, tuple(range(8)))], cluster, "round_robin").jobs[0]
    assert job.end_s is not None
    assert job.first_token_s is not None
    costs = machine.costs
    step_s = costs.base_s + costs.decode_seq_s + costs.kv_token_s * 4097
    assert job.end_s - job.first_token_s == pytest.approx(0.5 + 4096 * machine.kv_token_bytes / 1e9 + step_s)


def test_arrivals_on_one_timestamp_are_spread_in_order() -> None:
    requests = [TraceRequest(at_s, 100, number, ()) for number, at_s in enumerate([0.0, 0.0, 0.0, 2.0, 9.0, 9.0])]
    result = spread(requests, random.Random(3))
    assert [request.num_output_tokens for request in result] == [0, 1, 2, 3, 4, 5]
    assert result[3].arrival_s == 2.0
    times_s = [request.arrival_s for request in result]
    assert times_s == sorted(times_s)
    assert 0.0 < times_s[0] < times_s[2] < 2.0
    assert 9.0 < times_s[4] < times_s[5] < 12.0


@pytest.mark.parametrize("num_prefill", [0, 2])
def test_arrivals_are_scaled_to_the_load(num_prefill: int) -> None:
    cluster = make_cluster(num_prefill=num_prefill)
    requests = at_load(make_chats(), 0.8, cluster)
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    assert requests[0].arrival_s == 0.0
    assert load_of(requests, cluster) / span_s == pytest.approx(0.8)


def test_without_cache_a_prefill_pool_is_busy_for_its_load() -> None:
    cluster = make_cluster(num_prefill=4, num_decode=12)
    rng = random.Random(0)
    requests = [TraceRequest(rng.uniform(0, 600), rng.randint(2000, 30_000), 10, ()) for _ in range(3000)]
    requests = at_load(sorted(requests, key=lambda request: request.arrival_s), 0.6, cluster)
    outcome = simulate(requests, cluster, "round_robin")
    busy_s = [outcome.busy_s[f"p{idx}"] for idx in range(4)]
    assert sum(busy_s) / 4 / requests[-1].arrival_s == pytest.approx(0.6, rel=0.05)


def test_prompts_read_from_peers_end_in_small_pools() -> None:
    """The pools hold one or two prompts: some wait for room while the KV of others is being read."""
    machine = replace(MACHINES["h200-8b"], pool_tokens=14_000, link_bytes_per_s=20e9)
    chats = make_chats(80, seed=4246, mean_gap_s=0.02)
    requests = [chat for chat in chats if chat.num_prompt_tokens + chat.num_output_tokens < 13_824]
    outcome = simulate(requests, make_cluster(num_prefill=4, num_decode=2, machine=machine), "tandem")
    assert sum(job.num_loaded_tokens for job in outcome.jobs) > 0
    assert all(job.end_s is not None for job in outcome.jobs)


@pytest.mark.parametrize("strategy", ["kv", "prefix", "round-robin", "least-loaded"])
@pytest.mark.parametrize("shape", ["colocated", "split"])
def test_a_strategy_decides_as_the_products_placement_does(
    strategy: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, decisions = strategy.replace("-", "_"), []

    class Compared(POLICIES[name]):  # type: ignore[misc, name-defined]
        def choose(self, request: RoutingRequest, now: float) -> RoutingChoice:
            choice = super().choose(request, now)
            config = RouterConfig(routing=f"{strategy},pairs", max_queued_prompt_tokens=UNLIMITED_TOKENS)
            placer = Placer(self.fleet.registry, self.fleet.index, self.fleet.costs, config)
            best = placer.place(placement_request(request), now).best
            decisions.append((choice.prefill, choice.decode) == (best.prefill, best.decode))
            return choice

    monkeypatch.setitem(POLICIES, name, Compared)
    outcome = simulate(make_chats(100, mean_gap_s=0.05), SHAPES[shape], name)
    assert len(decisions) == len(outcome.jobs) > 200
    assert all(decisions)
