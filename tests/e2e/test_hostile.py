"""All hostile inputs against the whole product in real processes. `test_serve.py` sends some of each group."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.hostile_check import SEED, check_hostile_inputs
from tests.support.hostile_inputs import hostile_inputs
from tests.support.server import started


@pytest.mark.slow  # it makes all of them, and only the test below sends them all
def test_there_are_over_a_thousand_inputs_each_with_a_name_of_its_own() -> None:
    names = Counter(hostile.name for hostile in hostile_inputs("tiny", SEED))
    assert names.total() >= 1_000
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_them_get_no_5xx_and_cost_no_worker(text_model: Path, tmp_path: Path) -> None:
    with started(text_model, tmp_path, "--pool-bytes", "20000000") as server:
        check_hostile_inputs(server.wait_ready(), step=1)
