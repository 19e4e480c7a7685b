"""One snapshot of the dashboard: what the deciding process shows, and the traffic of the last minute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import orjson
from prometheus_client.core import Metric

from tandem.router.dashboard.traffic import Change, TrafficWindow, totals_of

__all__ = ["SnapshotBuilder"]

Json = dict[str, Any]

WINDOW_S = 60.0  # window of rates and percentiles
_POINT_S = 10.0  # time that one point of the small curves covers
_SHARES = (0.5, 0.9, 0.99)
HISTORY_COLUMNS = ("time", "finished_per_s", "output_tokens_per_s", "ttft_s", "itl_s", "hit_ratio", "waiting")


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
        self._window = TrafficWindow(WINDOW_S)
        self._history: deque[tuple[float, list[float | None]]] = deque(maxlen=round(WINDOW_S))

    async def build(self) -> bytes:
        """A snapshot as JSON. Raises a `ServingError` if the deciding process does not answer."""
        overview = dict(await self._overview())
        totals = totals_of(self._traffic())
        totals.counts.update(_counters_of(overview))
        self._window.add(self._clock(), totals)
        change = self._window.latest(WINDOW_S)
        now = self._unix_clock()
        waiting = sum(tenant["num_waiting"] for tenant in overview["tenants"])
        self._history.append((now, [*_point(self._window.latest(_POINT_S)), waiting]))
        large = {name: overview.pop(name) for name in ("members", "decisions")}  # rounded already
        snapshot = {
            **overview,
            "time": now,
            "version": self._version,
            "traffic": {"waiting": waiting, "running": totals.counts.get("running", 0), **_traffic(change)},
            "hits": _hits(overview, change),
            "history": {
                "columns": HISTORY_COLUMNS,
                "rows": [[at, *row] for at, row in self._history if at > now - WINDOW_S],
            },
            "pools": {role: _pool(role, pool, change) for role, pool in overview["pools"].items()},
            "tenants": [_tenant(tenant, change) for tenant in overview["tenants"]],
        }
        return orjson.dumps(_rounded(snapshot) | large)


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
        "prompt_tokens_per_s": change.per_s("prompt_tokens"),
        "output_tokens_per_s": change.per_s("output_tokens"),
        "hit_ratio": change.ratio("cached_tokens", "prompt_tokens"),
        # 50th, 90th and 99th percentile
        "ttft_s": change.quantiles("ttft_s", _SHARES),
        "itl_s": change.quantiles("itl_s", _SHARES),
    }


def _point(change: Change | None) -> list[float | None]:
    if change is None:
        return [None] * (len(HISTORY_COLUMNS) - 2)
    [ttft_s] = change.quantiles("ttft_s", [0.5])
    [itl_s] = change.quantiles("itl_s", [0.5])
    hit_ratio = change.ratio("cached_tokens", "prompt_tokens")
    return [change.per_s("finished"), change.per_s("output_tokens"), ttft_s, itl_s, hit_ratio]


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
