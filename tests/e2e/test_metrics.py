"""A pair of real workers with damaged links and a small pool: samples that tell of trouble move and rest."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.server import HTTP, Server, started
from tests.support.waiting import until

GAUGES = ("tandem_worker_waiting_for_room", "tandem_worker_quarantined_blocks", "tandem_pinned_blocks")
COUNTERS = ("tandem_worker_recomputed_total", "tandem_link_lost_total", "tandem_link_resets_total")
NUM_CLIENTS = 12


def totals(server: Server) -> dict[str, float]:
    """Each of these metrics, over all workers."""
    found = dict.fromkeys((*GAUGES, *COUNTERS), 0.0)
    for family in text_string_to_metric_families(HTTP.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    return found


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(500)
def test_faults_and_a_full_pool_are_seen_in_the_metrics_and_pass(text_model: Path, tmp_path: Path) -> None:
    flags = ["--routing=cost,pairs", "--no-autoscale", "--pool-bytes=700000", "--max-restarts=100"]
    flags += ["--lease-ttl-s=3", "--handoff-timeout-s=3"]
    flags += ["--inject-faults=flip=0.05,lose=0.02,stick=0.02,garble=0.05,seed=1"]
    with started(text_model, tmp_path, *flags) as server:
        server.wait_ready()
        assert not any(totals(server).values())
        most = totals(server)
        is_over = threading.Event()

        def ask_until_over(number: int) -> list[int]:
            source, statuses = random.Random(number), []
            while not is_over.is_set():
                body = {"model": "tiny", "prompt": "".join(source.choices("abcdefgh", k=400)), "max_tokens": 60}
                statuses.append(HTTP.post(f"{server.url}/v1/completions", json=body).status_code)
            return statuses

        def missing() -> list[str]:
            for name, value in totals(server).items():
                most[name] = max(most[name], value)
            return [name for name, value in most.items() if not value]

        pinned = HTTP.post(f"{server.url}/v1/cache/pin", json={"prompt": "a" * 100, "ttl_s": 600})
        assert pinned.status_code == 200, pinned.text
        prompt = {"model": "tiny", "prompt": "a" * 100, "max_tokens": 2}
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            asking = [threads.submit(ask_until_over, number) for number in range(NUM_CLIENTS)]
            try:
                HTTP.post(f"{server.url}/v1/completions", json=prompt)
                until(lambda: not missing(), 240, lambda: f"{missing()} of {most}")
            finally:
                is_over.set()
        print(most, Counter(status for one in asking for status in one.result()))
        pin_id = pinned.json()["id"]
        assert HTTP.post(f"{server.url}/v1/cache/unpin", json={"id": pin_id}).status_code == 200
        until(lambda: not any(totals(server)[name] for name in GAUGES), 60, lambda: str(totals(server)))
