from __future__ import annotations

import argparse
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Row

SETTINGS = argparse.Namespace(device="cpu", quick=True, seed=0)


@pytest.mark.parametrize(("num_equal", "aim"), [(8, "all: hit"), (7, "all: missed")])
def test_a_wrong_answer_is_a_failure(num_equal: int, aim: str) -> None:
    assert gpu_check._equal("x", num_equal, 8) == Row("x", f"{num_equal} of 8", aim=aim, is_right=num_equal == 8)


@pytest.mark.cluster
def test_a_check_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_LIMIT_S", 0.0)
    late, _ = gpu_check._run_apart("environment", SETTINGS)
    assert (late.aim, late.is_right) == ("it took too long", False)


@pytest.mark.cluster
def test_a_check_that_raises_is_a_row_that_says_so() -> None:
    failed, _ = gpu_check._run_apart("tokens", argparse.Namespace(device="no such device", quick=True, seed=0))
    assert failed == Row("failed", "the error is above", is_right=False)


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_what_can_be_checked_without_a_gpu_is_right(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check", "--device", "cpu", "--quick", "--only", "families", "tokens", "host"])
    monkeypatch.setattr(gpu_check, "write_result", lambda *_: None)
    monkeypatch.setattr("benchmarks.common.end_whole", lambda: None)
    assert gpu_check.main() == 0
    assert "8 of 8" in capsys.readouterr().out
