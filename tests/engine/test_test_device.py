"""What `make test-gpu` runs: tests without a mark on the device that was asked for, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import add, drain, make_prompt
from tests.support import fake_gpu

pytestmark = pytest.mark.cluster  # runs of their own

ROOT = Path(__file__).parents[2]
MARKED = """
import pytest
from tests.support.device import DEVICE

{module_mark}
def test_plain():
    assert DEVICE == "cpu"

@pytest.mark.exact_bits("of tokens")
def test_bits():
    pass

@pytest.mark.cpu_engine("of its caches")
class TestCaches:
    def test_one(self):
        pass

    @pytest.mark.exact_bits("of scores")
    def test_both(self):
        pass
"""


def run(device: str, folder: Path, module_mark: str = "") -> tuple[int, str]:
    """The exit status and the output of a run of marked tests."""
    (folder / "test_marked.py").write_text(MARKED.format(module_mark=module_mark))
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", "-rs"]
    result = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(folder)],
        cwd=ROOT,
        env={**os.environ, "TANDEM_TEST_DEVICE": device},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


def test_marked_tests_are_skipped_on_a_gpu_with_their_reasons(tmp_path: Path) -> None:
    status, out = run("fake-gpu", tmp_path)
    assert status == 0, out
    assert "1 passed, 3 skipped" in out
    assert "needs equal bits: of tokens" in out
    assert "needs equal bits: of scores; needs an engine on a CPU: of its caches" in out


def test_a_module_says_it_for_all_of_its_tests(tmp_path: Path) -> None:
    status, out = run("fake-gpu", tmp_path, 'pytestmark = pytest.mark.exact_bits("of all")')
    assert status == 0, out
    assert "4 skipped" in out
    assert "needs equal bits: of all" in out


def test_on_a_cpu_every_test_runs(tmp_path: Path) -> None:
    status, out = run("cpu", tmp_path)
    assert status == 0, out
    assert "4 passed" in out


@pytest.mark.parametrize("mark", ["exact_bits", "cpu_engine()", "exact_bits(1)"])
def test_a_mark_without_a_reason_is_an_error_on_a_cpu_too(mark: str, tmp_path: Path) -> None:
    status, out = run("cpu", tmp_path, f"pytestmark = pytest.mark.{mark}")
    assert status != 0
    assert "takes a reason: @pytest.mark." in out


@pytest.mark.parametrize(
    "device", ["gpu", pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it is here"))]
)
def test_without_such_a_gpu_nothing_runs(device: str, tmp_path: Path) -> None:
    status, out = run(device, tmp_path)
    assert status != 0
    assert f"TANDEM_TEST_DEVICE='{device}': torch {torch.__version__} sees no such GPU here" in out
    assert "passed" not in out


def test_the_fake_gpu_rounds_by_the_batch_and_is_late(
    build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.install(monkeypatch)
    engine = build_engine()
    head, x = engine.model.module.lm_head, torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    alone, together = head(x[:1]), head(x)[:1]
    assert not torch.equal(alone, together)
    torch.testing.assert_close(alone, together)
    sequence = add(engine, "r", make_prompt(20))
    assert engine.step() == []
    monkeypatch.setattr("tests.engine.test_engine.IS_GPU", True)
    drain(engine)
    assert len(sequence.output_ids) == 10
