"""The script that starts a killed server again, with small processes in the server's place."""

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
    print("stays", flush=True)
    time.sleep(600)
sys.exit(int(ends))
"""


def command(log: Path, *ends: str) -> list[str]:
    log.write_text("")
    return ["bash", str(SCRIPT), sys.executable, "-c", _CHILD, str(log), *ends]


@pytest.mark.parametrize("code", [0, 2])
def test_a_killed_server_is_started_again_and_one_that_ended_is_not(tmp_path: Path, code: int) -> None:
    log = tmp_path / "starts"
    ends = [f"signal{int(signal.SIGKILL)}", f"signal{int(signal.SIGABRT)}", str(code)]
    done = subprocess.run(command(log, *ends), timeout=DEADLINE_S, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert len(log.read_text().splitlines()) == 3
    assert "ended by signal 9 and is started again" in done.stderr


@pytest.mark.parametrize(("ends", "code"), [("stay", 128 + signal.SIGTERM), ("stay, then end well", 0)])
def test_sigterm_ends_the_server_too(tmp_path: Path, ends: str, code: int) -> None:
    log = tmp_path / "starts"
    with subprocess.Popen(command(log, ends), stdout=subprocess.PIPE, text=True) as keeper:
        try:
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == "stays\n"
            keeper.terminate()
            assert keeper.wait(DEADLINE_S) == code
        finally:
            keeper.kill()
    assert len(log.read_text().splitlines()) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)
