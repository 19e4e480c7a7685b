"""`tandem chaos` on real processes: two minutes of faults and operators' moves, after which nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "flags",
    [
        ["--seed", "1"],
        ["--seed", "2", "--router-processes", "2"],
        ["--seed", "3", "--", "--pool-bytes", "2000000", "--max-num-seqs", "4"],
    ],
    ids=["one", "edges", "small-pools"],
)
def test_two_minutes_of_faults_and_operations_lose_nothing(text_model: Path, flags: list[str]) -> None:
    command = [sys.executable, "-m", "tandem", "chaos", "--minutes", "2", "--model", str(text_model), *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=800)
    print(result.stdout, result.stderr)
    assert result.returncode == 0, result.stdout + result.stderr
