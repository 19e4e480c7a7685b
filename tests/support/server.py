"""`tandem serve` as a user starts it: a process of its own, stopped by the signal a terminal sends."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.waiting import until

REPOSITORY = Path(__file__).parents[2]
START_S = 180.0  # deadlines, several times what a quiet machine needs
STOP_S = 45.0
URL = re.compile(r"Serving .* on (http://\S+)")
# Each request has a connection of its own, so that any router process may get it. Making a TLS context for each one, as
# `httpx.get` does, would keep a core busy.
HTTP = httpx.Client(headers={"connection": "close"}, timeout=60, trust_env=False, verify=False)


class Server:
    """Started at once; use `running` or call `wait_ready`."""

    def __init__(
        self,
        model: Path | str,
        folder: Path,
        *flags: str,
        env: dict[str, str] | None = None,
        tandem: Sequence[str] = (sys.executable, "-m", "tandem"),
        cwd: Path = REPOSITORY,
        terminal: int | None = None,
    ) -> None:
        """`tandem` is the command as words; it runs in `cwd`.

        It logs into `folder`, or to the descriptor `terminal`.
        """
        self.log = folder / f"serve-{time.monotonic_ns()}.log"
        command = [*tandem, "serve", "--model", str(model), "--port", "0", *flags]
        self.scratch = Path(tempfile.mkdtemp(prefix="t-"))  # short: Ray puts sockets in it
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment
                | {"PYTHONUNBUFFERED": "1", "COLUMNS": "400", "TMPDIR": str(self.scratch)}
                | (env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log if terminal is None else terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.url = ""
        self._seen: set[psutil.Process] = set()

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_ready(self) -> Server:
        until(lambda: URL.search(self.output) or self.process.poll() is not None, START_S, lambda: self.output)
        match = URL.search(self.output)
        assert match is not None, f"it ended with {self.process.returncode}: {self.output}"
        self.url = match[1]
        self.children()
        return self

    def children(self) -> set[psutil.Process]:
        """All processes below ours, ever seen, by handle: a reused pid is another process."""
        with suppress(psutil.NoSuchProcess):
            self._seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self._seen

    def worker(self, role: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
        workers = HTTP.get(f"{self.url}/v1/pools", headers=headers).json()["roles"][role]
        return workers[0] if workers else {}

    def is_ready(self) -> bool:
        return HTTP.get(f"{self.url}/ready").status_code == 200

    def wait_recovered(self, victim: dict[str, Any]) -> None:
        """Until the worker is replaced, and no other one does its work any more."""

        def is_back() -> bool:
            roles = HTTP.get(f"{self.url}/v1/pools").json()["roles"]
            away = [one for role, workers in roles.items() for one in workers if not one["worker_id"].startswith(role)]
            epochs = {one["worker_id"]: one["epoch"] for workers in roles.values() for one in workers}
            return epochs.get(victim["worker_id"], victim["epoch"]) != victim["epoch"] and not away

        until(is_back, START_S, lambda: self.output)
        until(self.is_ready, START_S, lambda: self.output)
        self.children()

    def stop(self, number: int = signal.SIGINT) -> int:
        """The exit code, after checking that nothing it started is left."""
        children = self.children()
        self.process.send_signal(number)
        return self.wait_ended(children)

    def wait_ended(self, children: set[psutil.Process] | None = None) -> int:
        code = self.process.wait(STOP_S)
        _, alive = psutil.wait_procs(children or self._seen, timeout=5.0)
        assert not alive, f"left running: {alive}"
        left = list(self.scratch.iterdir())
        assert not left, f"left behind: {left}"
        return code

    def kill(self) -> None:
        """For the end of a test that failed."""
        for process in self.children():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.scratch, ignore_errors=True)


@contextmanager
def started(model: Path | str, folder: Path, *flags: str, **options: Any) -> Iterator[Server]:
    """A server that is stopped at the end; `options` are those of `Server`."""
    server = Server(model, folder, *flags, **options)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(STOP_S)
        server.kill()


def status_of(url: str) -> int:
    """Status of an answer; 0 = the port is closed."""
    try:
        return HTTP.get(url).status_code
    except httpx.TransportError:
        return 0


@contextmanager
def begun_stream(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Iterator[Iterator[str]]:
    """The lines of a completion's stream whose first event has come."""
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=120, trust_env=False
    ) as answer:
        lines = answer.iter_lines()
        first = next(lines)
        assert first.startswith("data: {")
        yield chain([first], lines)
