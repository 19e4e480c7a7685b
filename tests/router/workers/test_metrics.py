from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, generate_latest

from tandem.protocol.messages import FetchStats, LinkLoad, TierLoad, WorkerLoad
from tandem.router.reservation import ReservationContext
from tandem.router.workers.metrics import CacheSizingCollector, LoadCollector, MoveCollector, WorkerCollector
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.cost_model import CostModel
from tests.support.builders import make_registry

TIER = TierLoad(
    name="disk",
    num_blocks=5,
    capacity_blocks=9,
    num_queued_loads=1,
    num_queued_stores=2,
    num_hits=40,
    num_misses={"corrupt": 1, "absent": 3},
    num_stored=50,
    num_drops={"queue full": 4},
    num_evictions=6,
    bytes_in=500,
    bytes_out=400,
    seconds_in=0.5,
    seconds_out=0.25,
    latency_s=0.001,
    block_s=1e-3,
)


def test_what_workers_tell_is_in_the_metrics() -> None:
    registry = make_registry("a", "b")
    registry.note_dropped("a", {"malformed": 6}, {"impostor": 2})
    registry.note_load("a", WorkerLoad(num_waiting=3, num_open_leases=2, num_quarantined_blocks=11), now=1.0)
    fetches = FetchStats(
        num_prompts={"loaded": 7, "overtaken": 1},
        num_loaded_blocks={"host": 30, "peer": 10},
        num_lent_blocks=5,
        num_copied_blocks=6,
        predicted_load_s=0.5,
        actual_load_s=0.75,
        saved_s=9.0,
    )
    registry.note_tiers("a", [TIER], fetches)
    link = LinkLoad(
        peer_id="b",
        num_transfers=5,
        num_bytes=700,
        seconds=0.5,
        num_handoffs=2,
        exposed_bytes=300,
        exposed_s=0.125,
        num_lost=9,
        num_resets=8,
    )
    registry.note_links("a", [link])
    metrics = CollectorRegistry()
    metrics.register(LoadCollector(registry))
    metrics.register(WorkerCollector(registry))
    text = generate_latest(metrics).decode()
    for line in (
        'tandem_worker_waiting{role="decode",worker="a"} 3.0',
        'tandem_worker_open_leases{role="decode",worker="a"} 2.0',
        'tandem_worker_quarantined_blocks{role="decode",worker="a"} 11.0',
        'tandem_link_lost_total{peer="b",worker="a"} 9.0',
        'tandem_link_resets_total{peer="b",worker="a"} 8.0',
        "tandem_listener_failures_total 0.0",
        'tandem_dropped_messages_total{at="worker",reason="malformed",worker="a"} 6.0',
        'tandem_dropped_messages_total{at="router",reason="impostor",worker="a"} 2.0',
        'tandem_tier_hits_total{tier="disk",worker="a"} 40.0',
        'tandem_tier_misses_total{reason="corrupt",tier="disk",worker="a"} 1.0',
        'tandem_tier_drops_total{reason="queue full",tier="disk",worker="a"} 4.0',
        'tandem_tier_block_seconds{tier="disk",worker="a"} 0.001',
        'tandem_tier_seconds_out_total{tier="disk",worker="a"} 0.25',
        'tandem_fetch_prompts_total{outcome="overtaken",worker="a"} 1.0',
        'tandem_link_transfers_total{peer="b",worker="a"} 5.0',
        'tandem_link_bytes_total{peer="b",worker="a"} 700.0',
        'tandem_link_seconds_total{peer="b",worker="a"} 0.5',
        'tandem_link_handoffs_total{peer="b",worker="a"} 2.0',
        'tandem_link_exposed_bytes_total{peer="b",worker="a"} 300.0',
        'tandem_link_exposed_seconds_total{peer="b",worker="a"} 0.125',
        'tandem_fetch_actual_load_seconds_total{worker="a"} 0.75',
        'tandem_fetch_copied_blocks_total{worker="a"} 6.0',
    ):
        assert line in text.splitlines(), f"{line} is not in\n{text}"
    assert 'tier="disk",worker="b"' not in text


def test_predicted_hit_ratios_are_in_the_metrics() -> None:
    sizing = CacheSizing(make_registry("a", "b"), CostModel())
    for _ in range(2):
        sizing.observe([b"x" * 16], [], block_size=16, num_prompt_tokens=20, num_cached_tokens=0, tenant="search")
    metrics = CollectorRegistry()
    metrics.register(CacheSizingCollector(sizing))
    text = generate_latest(metrics).decode()
    for line in (
        'tandem_cache_hit_ratio_predicted{capacity_blocks="256"} 0.4',
        'tandem_cache_hit_ratio_predicted{capacity_blocks="16777216"} 0.4',
        'tandem_cache_capacity_blocks{level="pool"} 8192.0',
        "tandem_cache_observed_tokens_total 40.0",
    ):
        assert line in text.splitlines(), f"{line} is not in\n{text}"
    assert text.count("tandem_cache_hit_ratio_predicted{") == 17
    assert "tandem_cache_advised_gain{" not in text, "too little traffic for advice"
    sizing.observe([b"y" * 16], [], block_size=16, num_prompt_tokens=8192 * 16, num_cached_tokens=0, tenant="search")
    assert 'tandem_cache_advised_gain{tier="host"} 0.0' in generate_latest(metrics).decode().splitlines()


def test_moves_are_counted_by_their_cause() -> None:
    metrics = CollectorRegistry()
    reservations = ReservationContext(now=time.monotonic)
    reservations.moves.num_moves["worker_lost"] = 3
    reservations.poisoned.num_added = 1
    metrics.register(MoveCollector(reservations))
    text = generate_latest(metrics).decode()
    assert 'tandem_request_moves_total{cause="worker_lost"} 3.0' in text
    assert "tandem_poisoned_requests_total 1.0" in text
