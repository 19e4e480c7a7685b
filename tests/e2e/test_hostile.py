"""Hostile clients against the whole product in real processes. All traffic goes to a server started here."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.hostile import attack
from benchmarks.hostile_inputs import hostile_inputs
from tests.support.server import Server, started

SEED = 0  # of the inputs; printed with every failure


@pytest.fixture(scope="module")
def server(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(text_model, tmp_path_factory.mktemp("log"), "--pool-bytes", "20000000") as server:
        yield server.wait_ready()


def test_there_are_over_a_thousand_inputs_each_with_a_name_of_its_own() -> None:
    names = Counter(hostile.name for hostile in hostile_inputs("tiny", SEED))
    assert names.total() >= 1_000
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_some_of_each_group_get_no_5xx_and_cost_no_worker(server: Server) -> None:
    check(server, step=12)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_them_get_no_5xx_and_cost_no_worker(server: Server) -> None:
    check(server, step=1)


def check(server: Server, step: int) -> None:
    report = asyncio.run(attack(common.Server("tiny", server.url, "tiny", 0.0), SEED, step=step))
    assert len(report.outcomes) >= 1_000 // step
    assert not report.faults, (SEED, report.faults[:10])
    assert not report.lost_workers, (SEED, report.lost_workers, server.output)
    assert not report.complaints, (SEED, report.complaints)
    assert server.process.poll() is None
