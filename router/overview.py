"""What the deciding process contributes to the dashboard: members, pools, tiers, tenants and the latest decisions.

Plain values, small enough to be sent once a second: members are rows without names of fields, and the lists of
decisions, moves and tenants are cut. Counts of events are since the start; the dashboard turns them into rates.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem.router.admission_metrics import AdmissionSource
from tandem.scheduling.admission.stats import TenantStats
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.admission.work import NO_WORK, Work
from tandem.scheduling.cache_sizing import CacheSizing, tier_owner
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.placement import Terms
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import RegisteredWorker, queue_s

Json = dict[str, Any]

NUM_DECISIONS = 20
_NUM_MOVES = 12
_NUM_TENANTS = 50
_MAX_CHARS = 200  # in a text that others write
_REST = "(all others)"

# The fields of a row, in order. Rows of engines have more after them.
MEMBER_COLUMNS = (
    *("name", "role", "state", "kind", "running", "seats", "prompts", "queued_tokens", "queue_s"),
    *("used_blocks", "num_blocks", "cached_blocks", "for_room", "leases", "problems", "preemptions", "tiers"),
)


def overview_of(
    workers: Iterable[RegisteredWorker],
    costs: CostModel,
    admission: AdmissionSource,
    tenants: Tenants,
    *,
    decisions: Iterable[Json],
    autoscaler: Mapping[str, Any],
    settings: Mapping[str, str],
) -> Json:
    """The part that routers of workers and of engines share. `decisions` and `autoscaler` are as `/v1` shows them.

    `settings` are those that the operator gave, by flag.
    """
    return {
        "settings": _cut(settings),
        "pools": _pools(workers, costs),
        "tenants": _tenants(admission, tenants),
        "decisions": _decisions(decisions),
        "shadow": admission.shadow.report(),
        "autoscaler": _latest_moves(autoscaler),
    }


def workers_overview(registry: Registry, index: PrefixIndex, costs: CostModel, sizing: CacheSizing) -> Json:
    """The part that only a router of our own workers knows."""
    return {
        "kind": "workers",
        "members": {"columns": MEMBER_COLUMNS, "rows": [member_row(worker, index, costs) for worker in registry]},
        **cache_overview(registry, index, sizing),
    }


def cache_overview(workers: Iterable[RegisteredWorker], index: PrefixIndex, sizing: CacheSizing) -> Json:
    """What the tiers hold, where prompt tokens came from, and what more memory would give."""
    workers = list(workers)
    return {
        "tiers": _tiers(workers, index),
        "loaded_tokens": _loaded_tokens(workers),
        "curve": _curve(sizing),
    }


def member_row(worker: RegisteredWorker, index: PrefixIndex, costs: CostModel) -> list[object]:
    """One worker in the order of `MEMBER_COLUMNS`."""
    card, load = worker.card, worker.load
    return [
        worker.worker_id,
        worker.role.value,
        worker.state.value,
        card.kind,
        load.num_running,
        card.max_num_seqs,
        len(worker.prompts),
        worker.uncomputed_tokens,
        round(queue_s(worker, costs.steps(card.kind)), 3),
        card.num_blocks - load.num_free_blocks,
        card.num_blocks,
        index.num_blocks(worker.worker_id),
        load.num_waiting_for_room,
        load.num_open_leases,
        load.num_errors + load.num_recomputed,
        load.num_preemptions,
        [[tier.name, tier.num_blocks, tier.capacity_blocks] for tier in worker.tiers],
    ]


def _pools(workers: Iterable[RegisteredWorker], costs: CostModel) -> Json:
    """By role: how many workers there are, and what waits and runs on them together."""
    by_role: dict[str, list[RegisteredWorker]] = defaultdict(list)
    for worker in workers:
        by_role[worker.role.value].append(worker)
    return {role: _pool(members, costs) for role, members in sorted(by_role.items())}


def _pool(workers: Sequence[RegisteredWorker], costs: CostModel) -> Json:
    ready = [worker for worker in workers if worker.state == "ready"]
    return {
        "num_workers": len(workers),
        "num_ready": len(ready),
        "prompts": sum(len(worker.prompts) for worker in workers),
        "queued_tokens": sum(worker.uncomputed_tokens for worker in workers),
        # A prompt that arrives now would wait for the shortest queue.
        "queue_s": min((queue_s(worker, costs.steps(worker.card.kind)) for worker in ready), default=None),
        "booked": sum(worker.num_booked_seqs for worker in workers),
        "incoming": sum(worker.num_incoming_seqs for worker in workers),
        "running": sum(worker.load.num_running for worker in workers),
        "seats": sum(worker.card.max_num_seqs for worker in workers),
        "for_room": sum(worker.load.num_waiting_for_room for worker in workers),
        "leases": sum(worker.load.num_open_leases for worker in workers),
        **_sent(workers),
    }


def _sent(workers: Iterable[RegisteredWorker]) -> Json:
    """What the workers wrote to their peers since the start."""
    num_handoffs, num_bytes, exposed_s = 0, 0, 0.0
    for worker in workers:
        for link in worker.links:
            num_handoffs += link.num_handoffs
            num_bytes += link.num_bytes
            exposed_s += link.exposed_s
    return {"num_handoffs": num_handoffs, "num_bytes": num_bytes, "exposed_s": exposed_s}


def _tiers(workers: Sequence[RegisteredWorker], index: PrefixIndex) -> list[Json]:
    """The pools and each kind of tier, fast to slow, summed over all workers. A shared store counts once."""
    if not workers:
        return []
    num_blocks = sum(worker.card.num_blocks for worker in workers)
    pool = {
        "name": "pool",
        "num_blocks": num_blocks - sum(worker.load.num_free_blocks for worker in workers),
        "capacity_blocks": num_blocks,
        "cached_blocks": sum(index.num_blocks(worker.worker_id) for worker in workers),
    }
    return [pool, *(_tier(name, workers) for name in _tier_names(workers))]


def _tier_names(workers: Iterable[RegisteredWorker]) -> list[str]:
    return list(dict.fromkeys(tier.name for worker in workers for tier in worker.tiers))


def _tier(name: str, workers: Sequence[RegisteredWorker]) -> Json:
    reports = [(tier_owner(name, worker), tier) for worker in workers for tier in worker.tiers if tier.name == name]
    by_owner = dict(reports)  # workers that share a store report the same about it
    costs_s = [tier.block_s for _, tier in reports if tier.block_s < float("inf")]
    return {
        "name": name,
        "num_blocks": sum(tier.num_blocks for tier in by_owner.values()),
        "capacity_blocks": sum(tier.capacity_blocks for tier in by_owner.values()),
        "queued_loads": sum(tier.num_queued_loads for _, tier in reports),
        "block_s": sum(costs_s) / len(costs_s) if costs_s else None,
    }


def _loaded_tokens(workers: Iterable[RegisteredWorker]) -> dict[str, int]:
    """Prompt tokens that came from a tier or a peer since the start, by source."""
    loaded: Counter[str] = Counter()
    for worker in workers:
        for source, num_blocks in (worker.fetches.num_loaded_blocks if worker.fetches else {}).items():
            loaded[source] += num_blocks * worker.card.block_size
    return dict(loaded)


def _curve(sizing: CacheSizing) -> Json:
    """The predicted hit ratio by size, and for each configured level what twice its size would reach."""
    report = sizing.summary()
    ratios = {point["num_blocks"]: point["hit_ratio"] for point in report["capacities"]}
    levels = [
        {
            "name": name,
            "num_blocks": num_blocks,
            "num_bytes": num_blocks * report["block_bytes"],
            "hit_ratio": ratios[num_blocks],
            "twice_hit_ratio": ratios[2 * num_blocks],
        }
        for name, num_blocks in sizing.levels().items()
        if num_blocks
    ]
    points = [[point["num_bytes"], round(point["hit_ratio"], 4)] for point in report["capacities"]]
    return {
        "num_tokens": report["num_tokens"],
        "measured_hit_ratio": report["measured_hit_ratio"],
        "block_bytes": report["block_bytes"],
        "points": points,
        "levels": levels,
        "advice": [one["text"] for one in report["advice"]],
    }


def _decisions(decisions: Iterable[Json]) -> Json:
    """The latest decisions, newest first: the chosen candidate, and the cheapest of the others."""
    return {"terms": [name.removesuffix("_s") for name in Terms._fields], "rows": [_decision(one) for one in decisions]}


def _decision(decision: Json) -> Json:
    placement = decision.get("placement") or {}
    candidates = [_candidate(one) for one in placement.get("candidates", [])[:2]]
    error = decision.get("error")
    return {
        "id": decision["request_id"],
        "age_s": round(decision["age_s"], 1),
        "outcome": decision["outcome"],
        "tenant": decision["tenant"],
        "predicted_ttft_s": decision["predicted_ttft_s"],
        "actual_ttft_s": decision["actual_ttft_s"],
        "wait_s": decision["wait_s"],
        "num_prompt_tokens": placement.get("num_prompt_tokens"),
        "num_output_tokens": placement.get("expected_output_tokens"),
        "chosen": candidates[0] if candidates else None,
        "runner_up": candidates[1] if len(candidates) > 1 else None,
        "skipped": placement.get("skipped", {}),
        "error": error and f"{error['code']}: {error['message']}"[:_MAX_CHARS],
    }


def _candidate(candidate: Json) -> Json:
    return {
        "prefill": candidate["prefill_worker"],
        "decode": candidate["decode_worker"],
        "num_cached_tokens": candidate["num_cached_tokens"],
        "source": candidate["kv_holder"] or candidate["kv_tier"],  # where cached blocks are fetched from
        "terms": [round(candidate[name], 4) for name in Terms._fields],
    }


def _latest_moves(autoscaler: Mapping[str, Any]) -> Json:
    """The autoscaler's latest decision, and the latest moves of workers with their kind, newest first."""
    moves = [{"kind": "flip", **flip} for flip in autoscaler.get("flips", [])]
    moves += [{"kind": "add", **arrival} for arrival in autoscaler.get("arrivals", [])]
    moves += [
        {"kind": "restart" if departure.get("restart") else "remove", **departure}
        for departure in autoscaler.get("departures", [])
    ]
    newest = sorted(moves, key=lambda move: -float(move.get("began", 0.0)))[:_NUM_MOVES]
    decision = {name: value for name, value in autoscaler.items() if not isinstance(value, list)}
    return _cut(decision) | {"moves": [_cut(move) for move in newest]}


def _cut(fields: Mapping[str, Any]) -> Json:
    """The same with texts of bounded length: the reason why a move failed may be long."""
    return {name: value[:_MAX_CHARS] if isinstance(value, str) else value for name, value in fields.items()}


def _tenants(admission: AdmissionSource, tenants: Tenants) -> list[Json]:
    """The waiting work and the outcomes of the busiest tenants, and the sum over the others."""
    queued = admission.queued()
    ranked = sorted(admission.stats.items(), key=lambda item: item[1].num_admitted, reverse=True)
    rows = [
        _tenant(label, stats, queued.get(label, NO_WORK), tenants.policy(label).weight)
        for label, stats in ranked[:_NUM_TENANTS]
    ]
    rest, waiting = TenantStats(), NO_WORK
    for label, stats in ranked[_NUM_TENANTS:]:
        rest.add(stats)
        waiting += queued.get(label, NO_WORK)
    return [*rows, _tenant(_REST, rest, waiting, None)] if len(ranked) > _NUM_TENANTS else rows


def _tenant(label: str, stats: TenantStats, waiting: Work, weight: float | None) -> Json:
    return {
        "name": label,
        "weight": weight,
        "num_waiting": waiting.num_requests,
        "waiting_s": waiting.worker_s,
        "num_admitted": stats.num_admitted,
        "wait_s": stats.wait_s,
        "refused": dict(stats.rejected + stats.dropped),
    }
