"""Hostile clients against a running server, on loopback."""

from __future__ import annotations

import asyncio

from benchmarks import common
from benchmarks.hostile import attack
from tests.support.server import Server

SEED = 0  # of the inputs; shown with every failure


def check_hostile_inputs(server: Server, step: int) -> None:
    """Send every `step`-th input: none gets a 5xx, and all workers live on."""
    report = asyncio.run(attack(common.Server("tiny", server.url, "tiny", 0.0), SEED, step=step))
    assert len(report.outcomes) >= 1_000 // step
    assert not report.faults, (SEED, report.faults[:10])
    assert not report.lost_workers, (SEED, report.lost_workers, server.output)
    assert not report.complaints, (SEED, report.complaints)
    assert server.process.poll() is None
