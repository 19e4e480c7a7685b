from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "keep-serving.sh"
DEADLINE_S = 30.0

# Counts its starts in a file, and does with itself what the arguments say of each.
_CHILD = """
import os, pathlib, signal, sys, time
log = pathlib.Path(sys.argv[1])
log.write_text(log.read_text() + f"{os.getpid()}\\n")
ends = sys.argv[2:][len(log.read_text().splitlines()) - 1]
if ends.startswith("signal"):
    os.kill(os.getpid(), int(ends[6:]))
if ends.startswith("stay"):
    if ends == "stay, then end well":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if ends == "stay until the second signal":
        def second(*_):
            sys.exit(3)
        def first(*_):
            signal.signal(signal.SIGTERM, second)
            print("drains", flush=True)
        signal.signal(signal.SIGTERM, first)
    print("stays", flush=True)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(1)
sys.exit(int(ends))
"""


def command(log: Path, *ends: str) -> list[str]:
    log.write_text("")
    reset = ["env", "--default-signal=INT,HUP"]  # a shell cannot catch what it inherits as ignored, as under `nohup`
    return [*reset, "bash", str(SCRIPT), sys.executable, "-c", _CHILD, str(log), *ends]


@pytest.mark.parametrize("code", [0, 2])
def test_a_killed_server_is_started_again_and_one_that_ended_is_not(tmp_path: Path, code: int) -> None:
    log = tmp_path / "starts"
    ends = [f"signal{int(signal.SIGKILL)}", f"signal{int(signal.SIGABRT)}", str(code)]
    done = subprocess.run(command(log, *ends), timeout=DEADLINE_S, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert len(log.read_text().splitlines()) == 3
    assert "ended by signal 9 and is started again" in done.stderr


@pytest.mark.parametrize(
    ("number", "ends", "code"),
    [
        (signal.SIGTERM, "stay", 128 + signal.SIGTERM),
        (signal.SIGINT, "stay, then end well", 0),
        (signal.SIGHUP, "stay, then end well", 0),
    ],
)
def test_a_stop_signal_ends_the_server_too(tmp_path: Path, number: int, ends: str, code: int) -> None:
    log = tmp_path / "starts"
    with subprocess.Popen(command(log, ends), stdout=subprocess.PIPE, text=True) as keeper:
        try:
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == "stays\n"
            keeper.send_signal(number)
            assert keeper.wait(DEADLINE_S) == code
        finally:
            keeper.kill()
    assert len(log.read_text().splitlines()) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_a_second_signal_reaches_the_server(tmp_path: Path) -> None:
    log = tmp_path / "starts"
    with subprocess.Popen(command(log, "stay until the second signal"), stdout=subprocess.PIPE, text=True) as keeper:
        try:
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == "stays\n"
            keeper.terminate()
            assert keeper.stdout.readline() == "drains\n"
            keeper.send_signal(signal.SIGINT)
            assert keeper.wait(DEADLINE_S) == 3
        finally:
            keeper.kill()


def test_a_signal_during_the_pause_ends_it_well_and_starts_nothing(tmp_path: Path) -> None:
    log = tmp_path / "starts"
    arguments = command(log, f"signal{int(signal.SIGKILL)}", "2")
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as keeper:
        try:
            assert keeper.stderr is not None
            assert any("is started again" in line for line in keeper.stderr)
            keeper.terminate()
            assert keeper.wait(DEADLINE_S) == 0
        finally:
            keeper.kill()
    assert len(log.read_text().splitlines()) == 1
