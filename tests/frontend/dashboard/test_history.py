"""The points of the dashboard's charts."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.core import Metric

from tandem.frontend.dashboard.history import COLUMNS, History, LongHistory
from tandem.frontend.dashboard.traffic import Totals, totals_of
from tandem.protocol.errors import WorkerError
from tests.support.dashboard_world import DashboardWorld


def named(row: list[float | None]) -> dict[str, float | None]:
    return dict(zip(COLUMNS, row, strict=True))


def test_a_point_has_the_rates_and_percentiles_of_the_time_before_it() -> None:
    history, world = History(span_s=60, step_s=1, point_s=10, window_s=60), DashboardWorld()
    for now in range(5):
        world.tick(10)
        history.add(100.0 + now, 1000.0 + now, totals_of(world.metrics.traffic()), waiting=now)
    first, *_, last = (named(row) for row in history.rows(1004.0))
    assert first == dict.fromkeys(COLUMNS) | {"time": 1000.0, "waiting": 0}
    assert (last["time"], last["waiting"], last["failed_per_s"]) == (1004.0, 4, 0.0)
    assert last["finished_per_s"] == pytest.approx(9.5, abs=0.5)  # one in twenty is refused
    for name in ("ttft_s", "itl_s"):
        values = [last[f"{name}_p{share}"] or 0.0 for share in (50, 90, 99)]
        assert 0 < values[0] <= values[1] <= values[2]


def test_what_is_older_than_the_span_goes() -> None:
    history = History(span_s=60, step_s=15, point_s=15, window_s=30)
    for now in range(0, 300, 15):
        history.add(float(now), float(now), Totals({"finished": float(now)}), 0)
    assert [row[0] for row in history.rows(285.0)] == [240.0, 255.0, 270.0, 285.0]
    assert ([named(row)["finished_per_s"] for row in history.rows(285.0)], history.rows(1000.0)) == ([1.0] * 4, [])


async def test_a_deciding_process_that_does_not_answer_leaves_a_gap() -> None:
    world, answers = DashboardWorld(), [True, False, True]

    async def overview() -> dict[str, Any]:
        if not answers.pop(0):
            raise WorkerError("the hub does not answer")
        return await world.overview()

    def traffic() -> list[Metric]:
        return list(world.metrics.traffic())

    history = LongHistory(overview, traffic)
    await history.add()
    with pytest.raises(WorkerError):
        await history.add()
    await history.add()
    assert len(history.to_json()["rows"]) == 2


def test_errors_are_counted_by_status_and_route() -> None:
    world = DashboardWorld()
    for endpoint, status in [("/v1/completions", "429"), ("unmatched", "404"), ("/v1/completions", "200")]:
        world.metrics.requests.labels(endpoint, status).inc(3)
    assert totals_of(world.metrics.traffic()).errors == {("429", "/v1/completions"): 3.0, ("404", "unmatched"): 3.0}
