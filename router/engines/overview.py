"""What the dashboard shows of a fleet of engines: `router/overview.py` with circuits and failures."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tandem.router.admission_metrics import AdmissionSource
from tandem.router.engines.engine import RemoteEngine
from tandem.router.engines.engine_fleet import EngineFleet
from tandem.router.overview import MEMBER_COLUMNS, cache_overview, member_row, overview_of
from tandem.scheduling.cache_sizing import CacheSizing

_NUM_MODELS = 20
_MAX_CHARS = 200
_COLUMNS = (*MEMBER_COLUMNS, "model", "circuit", "openings", "foreign", "requests", "failures", "refusal")


def fleet_overview(
    fleet: EngineFleet,
    admission: AdmissionSource,
    sizings: Collection[CacheSizing],
    *,
    decisions: Iterable[dict[str, Any]],
    autoscaler: Mapping[str, Any],
    settings: Mapping[str, str],
) -> dict[str, Any]:
    """All engines, including those that are not ready, and what waits for them.

    `sizings` are those of the models: the one with the most traffic is shown, if any engine has tiers.
    """
    now = fleet.clock()
    has_tiers = any(worker.tiers for worker in fleet.registry)
    sizing = max(sizings, key=lambda one: one.num_tokens, default=None) if has_tiers else None
    return {
        "kind": "engines",
        "models": fleet.models[:_NUM_MODELS],
        "members": {"columns": _COLUMNS, "rows": [_row(engine, fleet, now) for engine in fleet.engines]},
        **(cache_overview(fleet.registry, fleet.index, sizing) if sizing is not None else {}),
        **overview_of(
            fleet.registry,
            fleet.costs,
            admission,
            fleet.tenants,
            decisions=decisions,
            autoscaler=autoscaler,
            settings=settings,
        ),
    }


def _row(engine: RemoteEngine, fleet: EngineFleet, now: float) -> list[object]:
    worker = fleet.registry.get(engine.name)
    if worker is None:  # not reached yet, or lost
        row: list[object] = [None] * len(MEMBER_COLUMNS)
        row[:4] = [engine.name, engine.spec.role.value, engine.state.value, engine.spec.kind]
    else:
        row = member_row(worker, fleet.index, fleet.costs)
        row[MEMBER_COLUMNS.index("used_blocks")] = None  # engines do not say which blocks are in use
    row[MEMBER_COLUMNS.index("running")] = len(engine.running)
    return [
        *row,
        engine.spec.model,
        engine.breaker.state(now).value,
        engine.breaker.num_opened,
        len(engine.foreign),
        engine.num_requests,
        engine.num_failures,
        engine.refusal(now)[:_MAX_CHARS],
    ]
