from __future__ import annotations

import pytest

from tests.support.cluster_harness import wait_for_loads


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_loads(monkeypatch)
