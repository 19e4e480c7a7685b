"""The threads that run plans of the CPU kernels, in a program of their own."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

CPU = Path(__file__).parents[2] / "engine" / "cpu"
PROGRAM = Path(__file__).parents[1] / "support" / "team_check.cpp"


@pytest.mark.parametrize("sanitizer", ["", "-fsanitize=thread"], ids=["", "thread sanitizer"])
def test_items_run_once_or_are_repeated_and_phases_go_in_order(tmp_path: Path, sanitizer: str) -> None:
    built = tmp_path / "team"
    flags = ["-O2", "-g", "-std=c++17", "-pthread", *([sanitizer] if sanitizer else [])]
    sources = [str(CPU / "team.cpp"), str(PROGRAM)]
    command = [os.environ.get("CXX", "g++"), *flags, "-I", str(CPU), *sources, "-o", str(built)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if sanitizer and made.returncode:
        pytest.skip("the compiler has no thread sanitizer")
    assert made.returncode == 0, made.stderr
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    for num_cores in {1, os.cpu_count() or 1}:
        cores = ["taskset", "-c", "0"] if num_cores == 1 and shutil.which("taskset") else []
        done = subprocess.run([*cores, built, str(seed), "2000"], capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
