from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tandem.runtime.cleanup import clean_up, private_run
from tests.support.waiting import until

DEADLINE_S = 20.0
StartServer = Callable[[str], tuple[subprocess.Popen[str], Path]]
SLEEP = "import time; print(flush=True); time.sleep(600)"
# A server that starts a child, whose child outlives it, in its own session, and does not learn of the end.
SERVER = """
import subprocess, sys, time
from tandem.runtime.cleanup import private_run
sleep = "[sys.executable, '-c', 'import time; time.sleep(600)']"
child = f"import subprocess, sys; subprocess.Popen({sleep}, start_new_session=True)"
with private_run() as folder:
    (folder / "secret").write_text("x")
    subprocess.run([sys.executable, "-c", child])
    print(folder, flush=True)
    {then}
"""


def marked_with(folder: Path) -> list[psutil.Process]:
    """Processes that were started within that run; the guard is none."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process)
    return found


def guards_in(folder: Path) -> list[psutil.Process]:
    """Guards of servers that were started with this folder for temporary files."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_guard = "tandem.runtime.cleanup" in process.cmdline()
            if is_guard and process.environ().get("TMPDIR") == str(folder):
                found.append(process)
    return found


@pytest.fixture
def sleeper() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(**env: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SLEEP]
        process = subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def the_guard(folder: Path) -> psutil.Process:
    """The guard of the one server that was started with this folder for temporary files."""
    until(lambda: guards_in(folder))
    (guard,) = guards_in(folder)
    return guard


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Starts a server, and gives it with its folder. A failed test leaves none behind."""
    servers: list[subprocess.Popen[str]] = []

    def start(then: str) -> tuple[subprocess.Popen[str], Path]:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVER.replace("{then}", then)],
            env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        servers.append(server)
        assert server.stdout is not None
        folder = server.stdout.readline().strip()
        assert folder, f"it ended with code {server.wait()}"
        return server, Path(folder)

    yield start
    for server in servers:
        if server.poll() is None:
            server.kill()
            server.communicate()


@pytest.mark.parametrize("kills_group", [False, True], ids=["the server", "its process group"])
def test_the_guard_ends_what_a_killed_server_left(tmp_path: Path, start_server: StartServer, kills_group: bool) -> None:
    server, folder = start_server("time.sleep(600)")
    guard = the_guard(tmp_path)
    until(lambda: marked_with(folder))  # a process has no environment while it begins to run its program
    (orphan,) = marked_with(folder)
    assert (folder / "secret").exists()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert guard not in psutil.Process(server.pid).children(), "Ray ends the children of an actor with it"
    (os.killpg if kills_group else os.kill)(server.pid, signal.SIGKILL)
    server.communicate()
    _, alive = psutil.wait_procs([guard, orphan], DEADLINE_S)
    assert not alive
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_guard_leaves_signals_to_the_server(tmp_path: Path, start_server: StartServer, number: int) -> None:
    server, folder = start_server("time.sleep(600)")
    guard = the_guard(tmp_path)
    until(lambda: "ignored" in status_of(guard, number))
    guard.send_signal(number)
    assert folder.exists()
    server.kill()
    server.communicate()
    guard.wait(DEADLINE_S)
    until(lambda: not folder.exists())


def status_of(process: psutil.Process, number: int) -> str:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn"))
    return "ignored" if ignored >> (number - 1) & 1 else ""


def test_a_server_that_ends_leaves_nothing_to_its_guard(tmp_path: Path, start_server: StartServer) -> None:
    """Though the server itself still writes into a file of the folder, as Ray does."""
    then = (
        "import tandem.runtime.cleanup as cleanup; cleanup._GRACE_S = 0.1; (folder / 'ray').mkdir(); "
        "log = (folder / 'ray/log').open('w'); sys.stdin.readline()"
    )
    server, _ = start_server(then)
    guard = the_guard(tmp_path)
    server.communicate("end\n", timeout=DEADLINE_S)
    assert server.returncode == 0
    assert not guard.is_running() or guard.status() == psutil.STATUS_ZOMBIE  # until init has asked for its code
    assert list(tmp_path.iterdir()) == []


def test_what_ends_by_itself_is_not_killed(tmp_path: Path, sleeper: Callable[..., subprocess.Popen[bytes]]) -> None:
    child = sleeper(TANDEM_RUN="this run")
    child.terminate()
    assert clean_up("this run", str(tmp_path / "none"), grace_s=DEADLINE_S) == 0


def test_only_those_with_the_whole_mark_end(tmp_path: Path, sleeper: Callable[..., subprocess.Popen[bytes]]) -> None:
    ours = sleeper(TANDEM_RUN="this run")
    inner = sleeper(TANDEM_RUN="this run:another")  # of a server that was started within the run
    others = [sleeper(**env) for env in ({}, {"TANDEM_RUN": "this run too"}, {"XTANDEM_RUN": "this run"})]
    others.append(sleeper(TANDEM_RUN="another"))
    os.kill(ours.pid, signal.SIGSTOP)
    folder = tmp_path / "folder"
    folder.mkdir()
    assert clean_up("this run", str(folder), grace_s=0.0) == 2
    assert [one.wait(DEADLINE_S) for one in (ours, inner)] == [-signal.SIGKILL] * 2
    assert [other.poll() for other in others] == [None] * 4
    assert not folder.exists()


def test_a_process_without_its_environment_is_known_by_what_it_writes(tmp_path: Path) -> None:
    """As Ray's do. A process that only reads Ray's files, or writes other files, is not ours."""
    folder = tmp_path / "folder"
    (folder / "ray").mkdir(parents=True)
    log_file, notes_file = folder / "ray" / "log", folder / "notes"
    with log_file.open("w") as log, log_file.open() as reading, notes_file.open("w") as notes:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        ours = subprocess.Popen(command, env={}, stdout=subprocess.DEVNULL, pass_fds=(log.fileno(),))
        reader = subprocess.Popen(command, env={}, stdin=reading)
        writer = subprocess.Popen(command, env={}, stdout=notes)
    try:
        assert clean_up("this run", str(folder), grace_s=0.0) == 1
        assert ours.wait(DEADLINE_S) == -signal.SIGKILL
        assert (reader.poll(), writer.poll()) == (None, None)
    finally:
        for process in (ours, reader, writer):
            process.kill()
            process.wait()


def test_temporary_files_go_into_the_folder_while_the_block_runs() -> None:
    before = tempfile.gettempdir()
    with private_run() as folder:
        assert (tempfile.gettempdir(), os.environ["TMPDIR"]) == (str(folder), str(folder))
    assert tempfile.gettempdir() == before
    assert "TANDEM_RUN" not in os.environ
    assert not folder.exists()
