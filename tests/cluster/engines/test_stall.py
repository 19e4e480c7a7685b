from __future__ import annotations

from tandem.cluster.engines.stall import SILENT_S, ServerStallWatch
from tandem.router.engines.fleet.engine_status import Progress, parse_progress

LIMIT_S = 300.0


def first_stall(seen: list[Progress | None], step_s: float = 10.0) -> tuple[float, str] | None:
    """When these looks, one each `step_s`, find a stall, and which."""
    watch = ServerStallWatch(LIMIT_S)
    for i, progress in enumerate(seen):
        if found := watch.look(progress, i * step_s):
            return i * step_s, found
    return None


def test_an_idle_server_never_stalls() -> None:
    assert first_stall([Progress(False, 5.0)] * 100) is None


def test_a_busy_server_that_computes_never_stalls() -> None:
    assert first_stall([Progress(True, float(i)) for i in range(100)]) is None


def test_a_busy_server_whose_counters_stand_still_stalls() -> None:
    assert first_stall([Progress(True, 5.0)] * 100) == (LIMIT_S, "computed nothing for 300 s")


def test_the_time_counts_from_the_last_work() -> None:
    seen: list[Progress | None] = [Progress(True, float(i)) for i in range(11)]
    assert first_stall(seen + [Progress(True, 10.0)] * 50) == (100 + LIMIT_S, "computed nothing for 300 s")


def test_a_server_that_does_not_answer_stalls_sooner() -> None:
    assert first_stall([Progress(False, 1.0)] + [None] * 50) == (SILENT_S, f"did not answer for {SILENT_S:g} s")


def test_a_pause_of_the_watch_itself_is_not_the_servers() -> None:
    watch = ServerStallWatch(LIMIT_S)
    assert not watch.look(Progress(True, 1.0), 0.0)
    assert not watch.look(Progress(True, 1.0), 1000.0)
    assert not watch.look(Progress(True, 1.0), 1000.0 + 29.0)


def test_progress_is_read_from_vllms_metrics() -> None:
    text = """\
vllm:num_requests_running{engine="0"} 2
vllm:num_requests_waiting{engine="0"} 0
vllm:iteration_tokens_total_count{engine="0"} 40
vllm:generation_tokens_total{engine="0"} 100
vllm:generation_tokens_total{engine="1"} 10
"""
    assert parse_progress(text) == Progress(True, 150.0)
    assert parse_progress("nothing_known 1\n") is None
