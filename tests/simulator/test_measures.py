from __future__ import annotations

import base64
import re

import pytest

from tandem.loadtest.traces import TraceRequest
from tandem.protocol.errors import ConfigError
from tandem.simulator.cluster import Cluster
from tandem.simulator.machine import MACHINES
from tandem.simulator.measures import Slo, gap_distribution, summarize, timeline
from tandem.simulator.report import html_report, plots
from tandem.simulator.simulation import Gaps, Outcome, simulate
from tandem.simulator.worker import Job


def make_job(
    number: int, arrival_s: float, first_s: float, end_s: float, outputs: int, worker_id: str = "w0", cached: int = 0
) -> Job:
    job = Job(number, arrival_s, 1000, outputs, (), worker_id, worker_id)
    job.first_token_s, job.end_s, job.num_cached_tokens = first_s, end_s, cached
    return job


def make_outcome(jobs: list[Job], gaps: list[Gaps] | None = None) -> Outcome:
    tokens = dict.fromkeys(("w0", "w1"), 0)
    for job in jobs:
        tokens[job.prefill_worker_id] += job.num_prompt_tokens - job.num_cached_tokens
    cluster = Cluster(machine=MACHINES["h200-8b"], num_prefill=0, num_decode=2)
    return Outcome("tandem", cluster, 0, jobs, 0, gaps or [], {}, tokens, 0, 1.0, 0.5, 0.0)


def test_a_summary_by_hand() -> None:
    jobs = [
        make_job(0, 0.0, 1.0, 2.0, 11),  # TTFT 1, TPOT 0.1
        make_job(1, 0.0, 3.0, 3.0, 1, cached=400),  # TTFT 3, no gap
        make_job(2, 5.0, 6.0, 10.0, 11, worker_id="w1"),  # TTFT 1, TPOT 0.4
    ]
    summary = summarize(make_outcome(jobs, [Gaps(0, 0.1, 0.1, 90), Gaps(0, 0.4, 0.4, 10)]), Slo(3.0, 0.2))
    assert summary.ttft_mean_s == pytest.approx(5 / 3)
    assert summary.ttft_p50_s == 1.0
    assert summary.tpot_mean_s == pytest.approx(0.25)
    assert (summary.itl_p50_s, summary.itl_p99_s) == (0.1, 0.4)
    assert summary.token_hit_ratio == pytest.approx(400 / 3000)
    assert summary.imbalance == pytest.approx(1600 / 1300)
    assert summary.slo_attainment == pytest.approx(2 / 3)
    assert summary.goodput == pytest.approx(2 / 10)


@pytest.mark.parametrize(("ttft_s", "itl_s", "is_met"), [(1.0, 0.1, True), (0.99, 0.1, False), (1.0, 0.099, False)])
def test_an_slo_needs_both_limits(ttft_s: float, itl_s: float, is_met: bool) -> None:
    assert Slo(ttft_s, itl_s).is_met(make_job(0, 0.0, 1.0, 2.0, 11)) == is_met


def test_gaps_that_grow_are_spread_evenly() -> None:
    values, shares = gap_distribution([Gaps(0, 1.0, 2.0, 1000), Gaps(0, 0.5, 0.5, 1000)])
    assert values[0] == 0.5
    assert shares[0] == pytest.approx(0.5)
    assert sum(values[1:]) / len(values[1:]) == pytest.approx(1.5)
    assert shares[-1] == pytest.approx(1.0)


def test_a_timeline_has_each_request_in_the_window_of_its_arrival() -> None:
    jobs = [make_job(idx, float(idx), idx + (1.0 if idx < 5 else 9.0), idx + 10.0, 11) for idx in range(11)]
    line = timeline(make_outcome(jobs), Slo(2.0, 100.0), num_windows=2)
    assert line.offered.tolist() == [1.0, 1.2]
    assert line.goodput.tolist() == [1.0, 0.0]
    assert line.imbalance.tolist() == [2.0, 2.0]  # all work on one of two workers


def make_real_outcome() -> Outcome:
    requests = [TraceRequest(idx / 2, 2000, 20, tuple(range(idx, idx + 3))) for idx in range(40)]
    return simulate(requests, Cluster(machine=MACHINES["h200-8b"], num_prefill=1, num_decode=1), "tandem")


def test_a_report_contains_its_plots() -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    page = html_report("Title <1>", {"load": "85 % & more"}, [make_real_outcome()], Slo(1.0, 0.1))
    assert "Title &lt;1&gt;" in page
    assert "85 % &amp; more" in page
    assert not re.search(r'(src|href)="http', page)
    images = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert len(images) == 5
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)


def test_a_report_without_matplotlib_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"tandem-serve\[report\]"):
        plots([make_real_outcome()], Slo(1.0, 0.1))
