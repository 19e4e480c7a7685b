"""One snapshot of the dashboard: what the deciding process shows, and the traffic of the last minute."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec
from prometheus_client.core import Metric

from tandem.frontend.dashboard.history import COLUMNS, SHARES, History, look_forever, num_waiting
from tandem.frontend.dashboard.traffic import Change, Totals, totals_of

Json = dict[str, Any]

WINDOW_S = 60.0  # window of rates and percentiles
_POINT_S = 10.0  # time that one point of the curves covers
_IDLE_STEP_S = 5.0  # between two looks at the counters while nobody watches
_NUM_ERRORS = 20  # kinds of errors that are listed


class SnapshotBuilder:
    """Builds snapshots of one server, and remembers the last minute of them."""

    def __init__(
        self,
        overview: Callable[[], Awaitable[Json]],
        traffic: Callable[[], Iterable[Metric]],
        version: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """`overview` is the deciding process's part, `traffic` gives the metrics of the HTTP side."""
        self._overview = overview
        self._traffic = traffic
        self._version = version
        self._clock = clock
        self._unix_clock = unix_clock
        self._looked_s = -math.inf
        self._history = History(span_s=WINDOW_S, step_s=1.0, point_s=_POINT_S, window_s=WINDOW_S)

    async def run(self) -> None:
        """Keep the last minute forever, whether or not somebody watches."""
        await look_forever(self.keep_up, _IDLE_STEP_S)

    async def keep_up(self) -> None:
        """Look at the counters, unless somebody who watches makes that happen. Raises as `build`."""
        if self._clock() - self._looked_s >= _IDLE_STEP_S:
            await self._look()

    async def _look(self) -> tuple[Json, Totals]:
        overview = dict(await self._overview())
        totals = totals_of(self._traffic())
        totals.counts.update(_counters_of(overview))
        self._looked_s = self._clock()
        self._history.add(self._looked_s, self._unix_clock(), totals, num_waiting(overview))
        return overview, totals

    async def build(self) -> bytes:
        """A snapshot as JSON. Raises a `ServingError` if the deciding process does not answer."""
        overview, totals = await self._look()
        now, waiting = self._unix_clock(), num_waiting(overview)
        change = self._history.latest(WINDOW_S)
        large = {name: overview.pop(name) for name in ("members", "decisions")}  # rounded already
        snapshot = {
            **overview,
            "time": now,
            "version": self._version,
            "traffic": {"waiting": waiting, "running": totals.counts.get("running", 0), **_traffic(change)},
            "hits": _hits(overview, change),
            "history": {"columns": COLUMNS, "rows": self._history.rows(now)},
            "errors": _errors(totals.errors, change),
            "pools": {role: _pool(role, pool, change) for role, pool in overview["pools"].items()},
            "tenants": [_tenant(tenant, change) for tenant in overview["tenants"]],
        }
        return msgspec.json.encode(_rounded(snapshot) | large)


def _counters_of(overview: Json) -> dict[str, float]:
    """The deciding process's counters, as `Totals` has them."""
    counts: dict[str, float] = {}
    for source, num_tokens in overview.get("loaded_tokens", {}).items():
        counts[f"loaded {source}"] = num_tokens
    for role, pool in overview["pools"].items():
        for name in ("num_handoffs", "num_bytes", "exposed_s"):
            counts[f"{name} {role}"] = pool[name]
    for tenant in overview["tenants"]:
        counts[f"admitted {tenant['name']}"] = tenant["num_admitted"]
        counts[f"refused {tenant['name']}"] = sum(tenant["refused"].values())
        counts["admitted"] = counts.get("admitted", 0) + tenant["num_admitted"]
    members = overview["members"]
    column = members["columns"].index("preemptions")
    counts["preemptions"] = sum(row[column] or 0 for row in members["rows"])
    return counts


def _traffic(change: Change | None) -> Json:
    if change is None:
        return {"window_s": 0}
    return {
        "window_s": change.seconds,
        "admitted_per_s": change.per_s("admitted"),
        "finished_per_s": change.per_s("finished"),
        "refused_per_s": change.per_s("refused"),
        "failed_per_s": change.per_s("failed"),
        "preemptions": change.total("preemptions"),
        "prompt_tokens_per_s": change.per_s("prompt_tokens"),
        "output_tokens_per_s": change.per_s("output_tokens"),
        "hit_ratio": change.ratio("cached_tokens", "prompt_tokens"),
        # 50th, 90th and 99th percentile
        "ttft_s": change.quantiles("ttft_s", SHARES),
        "itl_s": change.quantiles("itl_s", SHARES),
    }


def _errors(errors: Mapping[tuple[str, str], float], change: Change | None) -> list[Json]:
    """Answers with an error by status and route: how many in the window, and since the start. The latest come first."""
    before = change.first.errors if change else errors
    rows: list[Json] = [
        {"status": status, "route": route, "recent": max(count - before.get((status, route), 0.0), 0.0), "all": count}
        for (status, route), count in errors.items()
    ]
    return sorted(rows, key=lambda row: (-row["recent"], -row["all"]))[:_NUM_ERRORS]


def _hits(overview: Json, change: Change | None) -> list[Json]:
    """Where the prompt tokens of the window came from (pool, tier, peer, computing), as shares of all."""
    num_tokens = change.total("prompt_tokens") if change else 0.0
    if change is None or not num_tokens:
        return []
    cached = min(change.total("cached_tokens"), num_tokens)
    loaded = {source: change.total(f"loaded {source}") for source in overview.get("loaded_tokens", {})}
    # Heartbeats report loads, and first tokens report hits: a load may be known before its hit.
    scale = min(cached / sum(loaded.values()), 1.0) if sum(loaded.values()) else 0.0
    shares = {source: count * scale for source, count in loaded.items()}
    shares = {"pool": cached - sum(shares.values()), **shares, "computed": num_tokens - cached}
    return [{"source": source, "share": max(count, 0.0) / num_tokens} for source, count in shares.items()]


def _pool(role: str, pool: Json, change: Change | None) -> Json:
    shown = {key: value for key, value in pool.items() if key not in ("num_handoffs", "num_bytes", "exposed_s")}
    if change is None:
        return shown
    num_handoffs = change.total(f"num_handoffs {role}")
    exposed_s = change.total(f"exposed_s {role}") / num_handoffs if num_handoffs else None
    return shown | {
        "handoffs_per_s": num_handoffs / change.seconds,
        "bytes_per_s": change.per_s(f"num_bytes {role}"),
        "exposed_s": exposed_s,  # transfer time of a handoff that computing the prompt did not hide
    }


def _tenant(tenant: Json, change: Change | None) -> Json:
    num_admitted = tenant["num_admitted"]
    shown = {**tenant, "mean_wait_s": tenant["wait_s"] / num_admitted if num_admitted else None}
    if change is None:
        return shown
    name, all_admitted = tenant["name"], change.total("admitted")
    return shown | {
        "admitted_per_s": change.per_s(f"admitted {name}"),
        "refused_per_s": change.per_s(f"refused {name}"),
        "share": change.total(f"admitted {name}") / all_admitted if all_admitted else None,
    }


def _rounded(value: Any) -> Any:
    """The value with four decimals: rounding halves the size of a snapshot."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value
