"""All hostile inputs against the whole product in real processes. `test_serve.py` sends some of each group."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hostile_check import check_hostile_inputs
from tests.support.server import started


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_them_get_no_5xx_and_cost_no_worker(text_model: Path, tmp_path: Path) -> None:
    with started(text_model, tmp_path, "--pool-bytes", "20000000") as server:
        check_hostile_inputs(server.wait_ready(), step=1)
