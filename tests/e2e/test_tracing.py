"""One connected trace from real processes, and a collector that hangs."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.collector import Collector, collecting
from tests.support.served_trace import ask, check_trace, tracing_to
from tests.support.server import HTTP, Server, started

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SMALL_QUEUE = {"OTEL_BSP_MAX_QUEUE_SIZE": "16", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8"}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(text_model: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Server]:
    flags = ("--pool-bytes", "20000000", "--tracing", "--no-local-prefill")
    environment = tracing_to(collector) | SMALL_QUEUE
    with started(text_model, tmp_path_factory.mktemp("log"), *flags, env=environment) as server:
        yield server.wait_ready()


def test_a_handed_over_request_makes_one_connected_trace(server: Server, collector: Collector) -> None:
    check_trace(server, collector, num_processes=1)


def test_a_collector_that_hangs_slows_nothing_and_the_server_ends_in_time(server: Server, collector: Collector) -> None:
    collector.is_open.clear()
    num_requests = collector.num_requests
    for _ in range(6):
        assert ask(server).status_code == 200
    assert collector.num_requests > num_requests, "it hangs in a request"
    lost = 'tandem_router_dropped_spans_total{reason="queue_full"} '
    (line,) = [line for line in HTTP.get(f"{server.url}/metrics").text.splitlines() if line.startswith(lost)]
    assert float(line.removeprefix(lost)) > 0
    began = time.monotonic()
    assert server.stop(signal.SIGTERM) == 0
    # The rest of the end takes a few seconds; a batch under way would take ten more.
    assert time.monotonic() - began < 45
