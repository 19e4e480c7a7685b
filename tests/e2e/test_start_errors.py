"""What keeps a server from starting is told in one line; nothing is left running."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.support.server import START_S, started
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def one_error_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip() and not line.lstrip()[0].isdigit()]
    assert len(lines) == 1, output
    assert lines[0].startswith("tandem: "), output
    return lines[0]


@pytest.mark.slow
def test_a_pool_over_the_memory_is_reported_by_the_worker_that_cannot_build_it(
    text_model: Path, tmp_path: Path
) -> None:
    num_bytes = psutil.virtual_memory().total - 500_000_000  # enough for the check before the start, not beside Ray
    with started(text_model, tmp_path, "--colocated", "--pool-bytes", str(num_bytes)) as server:
        until(lambda: server.children() and server.process.poll() is not None, START_S, lambda: server.output)
        assert server.wait_ended() == 2
        line = one_error_line(server.output)
        assert f"pool_bytes={num_bytes} does not fit" in line
        assert "Error" not in line


def test_a_missing_folder_for_temporary_files_is_reported_before_anything_starts(
    text_model: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    with started(text_model, tmp_path, env={"TMPDIR": str(missing)}) as server:
        assert server.wait_ended() == 2
        assert f"temporary files, {missing}, cannot be written" in one_error_line(server.output)


@pytest.mark.parametrize(
    ("after", "number"),
    [
        pytest.param("starting Ray", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("starting Ray", signal.SIGTERM, marks=pytest.mark.slow),
        ("loading tiny", signal.SIGINT),
    ],
)
def test_a_signal_at_the_start_ends_all(text_model: Path, tmp_path: Path, after: str, number: signal.Signals) -> None:
    with started(text_model, tmp_path) as server:
        until(lambda: after in server.output, START_S, lambda: server.output)
        if after == "starting Ray":
            until(server.children, START_S)
        assert server.stop(number) == 0
        if number is signal.SIGINT:
            assert "stopping: " in server.output
        assert "Traceback" not in server.output
