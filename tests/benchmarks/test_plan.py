from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.common import Server
from benchmarks.plan import closed_loop, predict
from tandem.simulator.cluster import Cluster
from tandem.simulator.machine import MACHINES
from tests.cli.test_plan import save
from tests.scheduling.planning.test_learned import STEPS, WORKER, pools
from tests.support.published_models import PUBLISHED


@pytest.mark.parametrize("num_streams", [1, 4])
def test_a_stream_sends_its_next_request_when_the_last_one_is_answered(num_streams: int) -> None:
    cluster = Cluster(machine=MACHINES["cpu-135m"], num_prefill=0, num_decode=1)
    jobs = closed_loop(cluster, num_streams, 12, 128, 16).jobs
    times = sorted([(job.arrival_s, 1) for job in jobs] + [(job.end_s or 0.0, -1) for job in jobs])
    running = 0
    for _, change in times:
        running += change
        assert running <= num_streams
    ends = sorted(job.end_s for job in jobs if job.end_s)
    assert [job.arrival_s for job in jobs] == pytest.approx([0.0] * num_streams + ends[: 12 - num_streams], abs=1e-6)


def test_one_stream_on_a_live_worker_is_predicted_as_its_learned_costs_say(tmp_path: Path) -> None:
    folder = save(tmp_path / "m", PUBLISHED["llama-8b"] | {"max_position_embeddings": 8192})
    settings = argparse.Namespace(model=str(folder), input_tokens=100, output_tokens=11)
    content = pools()
    content["roles"] = {"colocated": [WORKER]}
    found = predict(content, Server("s", "http://x", "m", 0.0), settings, 1, 4)
    prefill_s = STEPS["base_s"] + STEPS["prefill_token_s"] * 100 + STEPS["attention_s"] * 100**2 / 2
    step_s = STEPS["base_s"] + STEPS["decode_seq_s"] + STEPS["kv_token_s"] * 105
    assert found["TTFT p50 ms"] == pytest.approx(1e3 * prefill_s)
    assert found["ITL p50 ms"] == pytest.approx(1e3 * step_s, rel=0.01)
    assert found["tok/s"] == pytest.approx(11 / (prefill_s + 10 * step_s), rel=0.01)
