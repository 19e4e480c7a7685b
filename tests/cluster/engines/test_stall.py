from __future__ import annotations

import pytest

from tandem.cluster.engines.layout import engine_servers
from tandem.cluster.engines.stall import SILENT_S, ServerStallWatch
from tandem.protocol.config import ClusterConfig, EngineConfig, ManagedEngineConfig, RouterConfig
from tandem.router.engines.engine_status import EngineReport, ReportedLoad, WorkDone, parse_report

LIMIT_S = 300.0


def busy(num_tokens: float) -> EngineReport:
    return EngineReport(ReportedLoad(2, 0, 0.0), WorkDone(num_tokens, is_of_each_step=True))


def idle(num_tokens: float) -> EngineReport:
    return EngineReport(ReportedLoad(0, 0, 0.0), WorkDone(num_tokens, is_of_each_step=True))


def first_stall(reports: list[EngineReport | None], step_s: float = 10.0) -> tuple[float, str] | None:
    """When these looks, one each `step_s`, find a stall, and which."""
    watch = ServerStallWatch(LIMIT_S)
    for i, report in enumerate(reports):
        if found := watch.look(report, i * step_s):
            return i * step_s, found
    return None


NOTHING_DONE = "computed nothing for 300 s"
WAITS_WITHOUT_COUNTERS = EngineReport(ReportedLoad(0, 1, 0.0), None)


@pytest.mark.parametrize(
    ("reports", "stall"),
    [
        ([idle(5.0)] * 100, None),
        ([EngineReport(None, None)] * 100, None),
        ([busy(float(i)) for i in range(100)], None),
        ([WAITS_WITHOUT_COUNTERS] * 100, (LIMIT_S, NOTHING_DONE)),
        ([WAITS_WITHOUT_COUNTERS] * 20 + [busy(5.0)] * 100, (200 + LIMIT_S, NOTHING_DONE)),
        ([busy(5.0)] * 100, (LIMIT_S, NOTHING_DONE)),
        ([*(busy(float(i)) for i in range(11)), *[busy(10.0)] * 50], (100 + LIMIT_S, NOTHING_DONE)),
        ([idle(1.0), *[None] * 50], (SILENT_S, f"did not answer for {SILENT_S:g} s")),
    ],
    ids=["idle", "no metrics", "computes", "only waits", "counts since", "stands still", "from last work", "silent"],
)
def test_first_stall_of_a_server(reports: list[EngineReport | None], stall: tuple[float, str] | None) -> None:
    assert first_stall(reports) == stall


def test_a_pause_of_the_watch_itself_is_not_the_servers() -> None:
    watch = ServerStallWatch(LIMIT_S)
    assert not watch.look(busy(1.0), 0.0)
    assert not watch.look(busy(1.0), 1000.0)
    assert not watch.look(busy(1.0), 1000.0 + 29.0)


def test_progress_is_read_from_vllms_metrics() -> None:
    text = """\
vllm:num_requests_running{engine="0"} 2
vllm:num_requests_waiting{engine="0"} 0
vllm:iteration_tokens_total_count{engine="0"} 40
vllm:generation_tokens_total{engine="0"} 100
vllm:generation_tokens_total{engine="1"} 10
"""
    assert parse_report(text) == busy(150.0)
    assert parse_report("nothing_known 1\n") == EngineReport(None, None)


def test_a_server_has_five_times_the_limit_of_our_own_workers() -> None:
    managed = ManagedEngineConfig(engine_kind="vllm")
    config = ClusterConfig(
        engine=EngineConfig(model="m"), managed=managed, router=RouterConfig(worker_stall_timeout_s=20.0)
    )
    assert [server.stall_timeout_s for server, _ in engine_servers(config, "m")] == [100.0, 100.0]
