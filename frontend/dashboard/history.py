"""What the traffic was like: points of rates and percentiles over a recent time, at even distances."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

from prometheus_client.core import Metric

from tandem.frontend.dashboard.traffic import Change, Totals, TrafficWindow, totals_of
from tandem.protocol.errors import ServingError

logger = logging.getLogger(__name__)

Json = dict[str, Any]
Row = list[float | None]

SHARES = (0.5, 0.9, 0.99)
_LONG_SPAN_S = 3600.0
_LONG_STEP_S = 15.0
COLUMNS = (
    "time",
    "finished_per_s",
    "failed_per_s",
    "output_tokens_per_s",
    *(f"{name}_p{100 * share:.0f}" for name in ("ttft_s", "itl_s") for share in SHARES),
    "hit_ratio",
    "waiting",
)


class History:
    """The points of the last `span_s`. Each covers the `point_s` before it, or less after a pause."""

    def __init__(self, *, span_s: float, step_s: float, point_s: float, window_s: float) -> None:
        """A point comes every `step_s`. `latest` can look back for `window_s`."""
        self._span_s = span_s
        self._point_s = point_s
        self._window = TrafficWindow(window_s)
        self._rows: deque[Row] = deque(maxlen=round(span_s / step_s))

    def add(self, now_s: float, time_s: float, totals: Totals, waiting: float) -> None:
        """Note the totals of this moment. `now_s` is monotonic, `time_s` is Unix time."""
        self._window.add(now_s, totals)
        self._rows.append([time_s, *_point(self._window.latest(self._point_s)), waiting])

    def latest(self, span_s: float) -> Change | None:
        """What changed in about this time before the latest totals; None until there are two of them."""
        return self._window.latest(span_s)

    def rows(self, time_s: float) -> list[Row]:
        """The points, oldest first, in the order of `COLUMNS`."""
        return [row for row in self._rows if (row[0] or 0.0) > time_s - self._span_s]


async def look_forever(look: Callable[[], Awaitable[object]], step_s: float) -> None:
    """Await `look` again and again. While the deciding process does not answer, there is nothing to see."""
    while True:
        with suppress(ServingError):
            await look()
        await asyncio.sleep(step_s)


class LongHistory:
    """An hour of points, one each quarter of a minute, whether or not somebody looks."""

    def __init__(
        self,
        overview: Callable[[], Awaitable[Json]],
        traffic: Callable[[], Iterable[Metric]],
    ) -> None:
        """`overview` and `traffic` are as for `SnapshotBuilder`."""
        self._overview = overview
        self._traffic = traffic
        step_s = _LONG_STEP_S
        self._history = History(span_s=_LONG_SPAN_S, step_s=step_s, point_s=step_s, window_s=2 * step_s)

    async def run(self) -> None:
        """Add points forever."""
        await look_forever(self.add, _LONG_STEP_S)

    async def add(self) -> None:
        """Add a point for this moment. Raises a `ServingError` if the deciding process does not answer."""
        overview = await self._overview()
        self._history.add(time.monotonic(), time.time(), totals_of(self._traffic()), num_waiting(overview))

    def to_json(self) -> Json:
        """The points, as the dashboard reads them."""
        rows = [[_rounded(value) for value in row] for row in self._history.rows(time.time())]
        return {"columns": COLUMNS, "step_s": _LONG_STEP_S, "span_s": _LONG_SPAN_S, "rows": rows}


def num_waiting(overview: Json) -> int:
    """Requests that wait in the router."""
    return sum(tenant["num_waiting"] for tenant in overview["tenants"])


def _point(change: Change | None) -> Row:
    if change is None:
        return [None] * (len(COLUMNS) - 2)
    return [
        change.per_s("finished"),
        change.per_s("failed"),
        change.per_s("output_tokens"),
        *change.quantiles("ttft_s", SHARES),
        *change.quantiles("itl_s", SHARES),
        change.ratio("cached_tokens", "prompt_tokens"),
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
