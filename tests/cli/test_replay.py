from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.cli.main import run
from tandem.simulator.policies import POLICIES


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500 * idx, "input_length": 1500, "output_length": 20, "hash_ids": [0, idx % 5 + 1, idx + 10]}
        for idx in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_replay_prints_a_row_for_each_policy(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    args = ["replay", str(trace), "--workers=4", "--prefill=2", "--policy=all", f"--output={output}"]
    assert run(args) == 0
    screen = capsys.readouterr().out
    results = json.loads(output.read_text())["results"]
    assert [result["policy"] for result in results] == list(POLICIES)
    for result in results:
        assert result["policy"] in screen
        assert result["num_requests"] == 40
    assert "2 prefill, 2 decode" in screen


def test_replay_under_reference_semantics(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    args = ["replay", str(trace), "--reference", "--workers=2", "--policy=cost,tandem", f"--output={output}"]
    assert run(args) == 0
    cost, ours = json.loads(output.read_text())["results"]
    assert cost["token_hit_ratio"] == ours["token_hit_ratio"] > 0.3
    assert "cost" in capsys.readouterr().out


def test_replay_writes_a_report(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    report = tmp_path / "report.html"
    assert run(["replay", str(trace), f"--report={report}"]) == 0
    assert "Replay of trace.jsonl" in report.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy=fastest"], "policy='fastest' is unknown"),
        (["--machine=abacus"], "machine='abacus' is unknown"),
        (["--workers=2", "--prefill=2"], "num_prefill=2 leaves none"),
        (["--workers=0"], "workers=0 must be at least 1"),
        (["--load=-1"], "load=-1.0 must not be negative"),
        (["--requests=1"], "has 1 requests"),
        (["--reference", "--report=x.html"], "needs the full simulation"),
        (["--output=/nowhere/at/all.json"], "its folder does not exist"),
        (["--report=/proc/report.html"], "/proc/report.html cannot be written: No such file or directory"),
    ],
)
def test_wrong_flags_are_one_line(
    trace: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", str(trace), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_file_that_is_not_a_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("{}\n")
    assert run(["replay", str(path)]) == 2
    assert "line 1" in capsys.readouterr().err
    assert run(["replay", str(tmp_path / "missing.jsonl")]) == 2
    assert "missing.jsonl" in capsys.readouterr().err
