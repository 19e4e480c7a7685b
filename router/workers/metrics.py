"""Prometheus metrics of the workers and their pins, and of the hit ratios that caches of other sizes would have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tandem.protocol.messages import WorkerCard, WorkerLoad
from tandem.router.reservation import ReservationContext
from tandem.router.workers.pins import PinService
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import RegisteredWorker

# Fixed, so that the series do not depend on the configuration: 256 to 16 million blocks.
_CAPACITIES = [2**power for power in range(8, 25)]

# What servers of other engines report as well.
_LOAD = {
    "num_waiting": "Sequences on the worker that wait to be computed",
    "num_running": "Sequences in the worker's batch",
    "num_kv_tokens": "KV tokens of running sequences",
    "num_free_blocks": "Blocks of the pool that are unused or evictable",
}
_SIZE = {"num_blocks": "Blocks of the worker's pool; assumed where an engine does not report them"}
_OWN_LOAD = {
    "num_waiting_tokens": "Prompt tokens not computed yet",
    "num_free_seats": "Sequences that the batch still has room for, less those promised",
    "num_open_leases": "Leases of blocks that other workers write into",
    "num_quarantined_blocks": "Blocks of ended leases and reads into which a lost write might still land",
    "num_waiting_for_room": "Preempted sequences, and prompts computed elsewhere that wait for blocks or a seat",
}
_POOL_SLOTS = (
    "Token slots of the pool: written with KV of sequences, reserved for their next tokens, waste behind the last one "
    "in their last blocks, or cached without a user; the rest is free"
)
_LOAD_COUNTERS = {
    "num_preemptions": "Sequences whose blocks were given to others",
    "num_drafted_tokens": "Tokens that steps computed in case they come next",
    "num_accepted_tokens": "Drafted tokens that came",
    "num_errors": "Internal errors, each of which ended one request or one message",
    "num_recomputed": "Prompts computed again because their KV arrived damaged, late or incomplete",
}
_TIER_GAUGES = {
    "num_blocks": "Blocks that the tier has",
    "capacity_blocks": "Blocks the tier has room for",
    "num_queued_loads": "Blocks requested and not loaded yet",
    "num_queued_stores": "Blocks that wait to be stored in the tier or are being stored",
    "block_s": "Learned seconds to load a block",
}
_TIER_COUNTERS = {
    "num_hits": "Blocks loaded from the tier",
    "num_stored": "Blocks stored in the tier",
    "num_evictions": "Blocks the tier evicted for others",
    "bytes_in": "Bytes written to the tier",
    "bytes_out": "Bytes read from the tier",
    "seconds_in": "Seconds of I/O threads spent writing",
    "seconds_out": "Seconds of I/O threads spent reading",
}
_TIER_REASONS = {
    "num_misses": "Blocks that a load requested and did not get",
    "num_drops": "Blocks that should have been stored and were not",
}
_LINK_COUNTERS = {
    "num_transfers": "Writes to the peer that succeeded",
    "num_bytes": "Bytes of KV written to the peer",
    "seconds": "Seconds of packing, and for which the link was busy with writes",
    "num_handoffs": "Completed handoffs to the peer",
    "num_saved_bytes": "Bytes of KV that did not cross the link because blocks were packed",
    "exposed_bytes": "Bytes not yet written when the prompt was computed",
    "exposed_s": "Seconds the link was busy with those bytes",
    "num_lost": "Writes to the peer whose outcome is unknown: they might still land",
    "num_resets": "Resets of the link because nothing moved on it",
}
_FETCH_COUNTERS = {
    "num_lent_blocks": "Blocks kept for peers to read",
    "num_copied_blocks": "Blocks read from the workers of running answers, in case these die or are left",
    "predicted_load_s": "Seconds that loads from tiers and peers were predicted to take",
    "actual_load_s": "Seconds that loads from tiers and peers took",
    "saved_s": "Predicted seconds of computing saved by loads",
}


class LoadCollector:
    """Load of every worker or engine in the registry, and failed listeners."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        workers = list(self._registry)
        yield from _fields(GaugeMetricFamily, "worker", _LOAD, ["worker", "role"], _loads(workers))
        yield from _fields(GaugeMetricFamily, "worker", _SIZE, ["worker", "role"], _cards(workers))
        yield CounterMetricFamily(
            "tandem_listener_failures",
            "Errors raised by listeners to changes of workers; each is logged",
            value=self._registry.num_listener_failures,
        )


class WorkerCollector:
    """What only Tandem's own workers report: more of their load, their tiers, fetches and links, dropped messages."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        workers = list(self._registry)
        loads = _loads(workers)
        yield from _fields(GaugeMetricFamily, "worker", _OWN_LOAD, ["worker", "role"], loads)
        yield from _fields(CounterMetricFamily, "worker", _LOAD_COUNTERS, ["worker", "role"], loads)
        slots = [(labels, msgspec.structs.asdict(load.pool_slots)) for labels, load in loads]
        yield _by_key(GaugeMetricFamily, "tandem_pool_slots", _POOL_SLOTS, ["worker", "role", "state"], slots)
        yield from _tier_metrics(workers)
        yield from _fetch_metrics(workers)
        yield from _link_metrics(workers)
        yield _dropped_metric(workers)


class MoveCollector:
    """Requests that continued on other workers, and those that no worker gets again."""

    def __init__(self, reservations: ReservationContext) -> None:
        self._reservations = reservations

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        text = (
            "Times that a request went on with other workers or engines, by the error, or why it left the former ones"
        )
        moves = dict(sorted(self._reservations.moves.num_moves.items()))
        yield _by_key(CounterMetricFamily, "tandem_request_moves", text, ["cause"], [([], moves)])
        yield CounterMetricFamily(
            "tandem_poisoned_requests",
            "Requests that were given up because several workers or engines died while they had them",
            value=self._reservations.poisoned.num_added,
        )


class CacheSizingCollector:
    """Predicted hit ratios of all traffic by the size of the cache, and the sizes that are configured."""

    def __init__(self, sizing: CacheSizing) -> None:
        self._sizing = sizing

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        text = "Share of prompt tokens that one cache of this size would have found"
        ratios = dict(zip(map(str, _CAPACITIES), self._sizing.hit_ratios(_CAPACITIES), strict=True))
        yield _by_key(GaugeMetricFamily, "tandem_cache_hit_ratio_predicted", text, ["capacity_blocks"], [([], ratios)])
        text, levels = "Blocks that fit into all workers together", self._sizing.levels()
        yield _by_key(GaugeMetricFamily, "tandem_cache_capacity_blocks", text, ["level"], [([], levels)])
        text = "Share of prompt tokens that the advised size of this tier would find more; 0 = no size pays back"
        gains = {one["tier"]: one["gain"] for one in self._sizing.advice()}
        yield _by_key(GaugeMetricFamily, "tandem_cache_advised_gain", text, ["tier"], [([], gains)])
        yield CounterMetricFamily(
            "tandem_cache_observed_tokens",
            "Prompt tokens that the predictions are based on",
            value=self._sizing.num_tokens,
        )


class PinCollector:
    """Live pins, refused pins, and the blocks that each worker keeps for pins."""

    def __init__(self, service: PinService, registry: Registry) -> None:
        self._service = service
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """All metrics, as they are now."""
        pins = self._service.summary()
        yield GaugeMetricFamily("tandem_router_pins", "Pins that have not ended", value=pins.num_pins)
        yield GaugeMetricFamily(
            "tandem_router_pinned_blocks", "Blocks that pins cover, cached or not", value=pins.num_blocks
        )
        yield GaugeMetricFamily("tandem_router_max_pinned_blocks", "Blocks that pins may cover", value=pins.max_blocks)
        name, text = "tandem_router_refused_pins", "Pins refused, by quota"
        yield _by_key(CounterMetricFamily, name, text, ["reason"], [([], pins.num_refused)])
        reports = [([worker.worker_id], worker.pins) for worker in self._registry if worker.pins is not None]
        labels, kept = ["worker", "place"], [(worker, report.num_blocks) for worker, report in reports]
        text = "Blocks that the worker keeps for pins, by place"
        yield _by_key(GaugeMetricFamily, "tandem_pinned_blocks", text, labels, kept)
        brought = [(worker, report.num_prefetched) for worker, report in reports]
        text = "Blocks brought up for pins, by where to"
        yield _by_key(CounterMetricFamily, "tandem_prefetched_blocks", text, labels, brought)


def _loads(workers: list[RegisteredWorker]) -> list[tuple[list[str], WorkerLoad]]:
    return [([worker.worker_id, worker.role.value], worker.load) for worker in workers]


def _cards(workers: list[RegisteredWorker]) -> list[tuple[list[str], WorkerCard]]:
    return [([worker.worker_id, worker.role.value], worker.card) for worker in workers]


def _tier_metrics(workers: list[RegisteredWorker]) -> Iterator[Metric]:
    tiers = [([worker.worker_id, tier.name], tier) for worker in workers for tier in worker.tiers]
    yield from _fields(GaugeMetricFamily, "tier", _TIER_GAUGES, ["worker", "tier"], tiers)
    yield from _fields(CounterMetricFamily, "tier", _TIER_COUNTERS, ["worker", "tier"], tiers)
    for name, text in _TIER_REASONS.items():
        rows = [(labels, getattr(tier, name)) for labels, tier in tiers]
        yield _by_key(CounterMetricFamily, f"tandem_tier_{_plain(name)}", text, ["worker", "tier", "reason"], rows)


def _fetch_metrics(workers: list[RegisteredWorker]) -> Iterator[Metric]:
    fetches = [([worker.worker_id], worker.fetches) for worker in workers if worker.fetches is not None]
    text, rows = "Prompts whose KV was in a tier, by outcome", [(labels, one.num_prompts) for labels, one in fetches]
    yield _by_key(CounterMetricFamily, "tandem_fetch_prompts", text, ["worker", "outcome"], rows)
    text, rows = (
        "Blocks of prompts that came from a tier or a peer",
        [(labels, one.num_loaded_blocks) for labels, one in fetches],
    )
    yield _by_key(CounterMetricFamily, "tandem_fetch_loaded_blocks", text, ["worker", "source"], rows)
    yield from _fields(CounterMetricFamily, "fetch", _FETCH_COUNTERS, ["worker"], fetches)


def _link_metrics(workers: list[RegisteredWorker]) -> Iterator[Metric]:
    links = [([worker.worker_id, link.peer_id], link) for worker in workers for link in worker.links]
    yield from _fields(CounterMetricFamily, "link", _LINK_COUNTERS, ["worker", "peer"], links)


def _dropped_metric(workers: list[RegisteredWorker]) -> Metric:
    text = "Messages and connections that a worker or the router did not act upon"
    rows = [
        ([worker.worker_id, at], counts)
        for worker in workers
        for at, counts in (("worker", worker.num_dropped_there), ("router", worker.num_dropped_here))
    ]
    return _by_key(CounterMetricFamily, "tandem_dropped_messages", text, ["worker", "at", "reason"], rows)


def _by_key(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    rows: Iterable[tuple[list[str], Mapping[str, float]]],
) -> Metric:
    """A metric from mappings: each key is the value of the last label, behind the label values of its row."""
    metric = family(name, text, labels=labels)
    for values, numbers in rows:
        for key, number in numbers.items():
            metric.add_metric([*values, key], number)
    return metric


def _fields(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    group: str,
    texts: Mapping[str, str],
    labels: Sequence[str],
    rows: Iterable[tuple[list[str], object]],
) -> Iterator[Metric]:
    """A metric for each field that `texts` describes; `rows` are label values and the object with the fields."""
    for name, text in texts.items():
        metric = family(f"tandem_{group}_{_plain(name)}", text, labels=labels)
        for values, source in rows:
            metric.add_metric(values, getattr(source, name))
        yield metric


def _plain(name: str) -> str:
    """A field's name as part of a metric's name: without `num_`, and with the unit spelled out."""
    name = name.removeprefix("num_")
    return f"{name[:-2]}_seconds" if name.endswith("_s") else name
