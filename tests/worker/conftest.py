from __future__ import annotations

import pytest

from tests.support.cluster_harness import DEADLINE_S


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes faster than anything loads: believe in a slow one, and wait for its loads."""
    monkeypatch.setattr("tandem.worker.kv.fetcher._LATE_SLACK_S", DEADLINE_S)
    monkeypatch.setattr("tandem.worker.kv.fetcher.Fetcher.after_step", lambda self, stats: None)
