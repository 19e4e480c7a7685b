"""The process tree of one engine server: started, watched until it serves, watched for progress, and ended whole."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

import httpx
import psutil

from tandem.protocol.errors import WorkerError
from tandem.router.engines.engine_status import EngineReport, parse_report

logger = logging.getLogger(__name__)

_TAIL_LINES = 60
_MAX_LINE = 2000  # bytes; longer lines are cut
_LOOK_S = 0.5  # between two looks at a server that starts
_ANSWER_TIMEOUT_S = 5.0
_SPIN_LOOK_S = 0.5
_SPIN_SHARE = 0.05  # of a core, which may be shared with other processes; idle threads take none
_SPIN_NICENESS = 10  # a tenth of the weight of a thread that computes
_STOP_TIMEOUT_S = 8.0  # for a server to end by itself
_ERROR = re.compile(r"\b(\w*(Error|Exception|Interrupt)\b.*|error: .*|.* not found.*)")


class ServerProcess:
    """One server. Its standard output and error are read here: the last lines are kept for error messages."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log_file: Path | None
    ) -> None:
        """Start it. Raises `WorkerError` if that is impossible."""
        self._name = name
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal is for `tandem serve`, which ends this in good order
            )
        except OSError as exc:
            raise WorkerError(f"{command[0]} cannot be started: {exc.strerror or exc}") from exc
        assert self._process.stdout is not None, "its output is a pipe"
        self._client = httpx.Client(timeout=_ANSWER_TIMEOUT_S, trust_env=False)
        reading = self._process.stdout, log_file
        self._reader = threading.Thread(target=self._read, args=reading, name="log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the server's first process."""
        return self._process.pid

    @property
    def tail(self) -> list[str]:
        """The last lines that it wrote."""
        return list(self._tail)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_healthy(self, url: str, deadline_s: float, is_stopping: threading.Event) -> None:
        """Return when `url` answers 200. Raises `WorkerError` if the server ends first, is late, or is to be stopped.

        The deadline is on the clock of `time.monotonic`.
        """
        while not is_stopping.is_set():
            if (ended := self.ended(timeout_s=_LOOK_S)) is not None:
                raise WorkerError(ended)
            with contextlib.suppress(httpx.HTTPError):
                if self._client.get(url).status_code == 200:
                    return
            if time.monotonic() > deadline_s:
                raise WorkerError(f"{self._name} did not serve in time; its last line: {self._last_line()}")
        raise WorkerError("stopped while it loaded")

    def generate(self, url: str, fields: Mapping[str, object], api_key: str, deadline_s: float) -> None:
        """Have the server generate one token. `fields` are those of its request. Raises `WorkerError` if it cannot."""
        body = {"prompt": "Hello", "max_tokens": 1, "temperature": 0, "stream": False, **fields}
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout_s = max(deadline_s - time.monotonic(), _ANSWER_TIMEOUT_S)
        try:
            answer = self._client.post(f"{url}/v1/completions", json=body, headers=headers, timeout=timeout_s)
        except httpx.HTTPError as exc:
            ended = self.ended(timeout_s=_LOOK_S)
            raise WorkerError(ended or f"{self._name} did not generate a token: {exc or type(exc).__name__}") from exc
        # A server of embeddings or of a model without completions answers 404: it has loaded its model nevertheless.
        if answer.status_code not in (200, 404):
            raise WorkerError(f"{self._name} did not generate a token: {answer.status_code} {answer.text[:300]}")

    def report(self, url: str) -> EngineReport | None:
        """What its `/metrics` say about its load and its work; None if nothing answers."""
        try:
            answer = self._client.get(url)
        except httpx.HTTPError:
            return None
        return parse_report(answer.text)

    def ended(self, *, timeout_s: float) -> str | None:
        """How it ended; None if it does not end within this time."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(1.0)
        if code < 0:  # SGLang ends its own tree by force when a part of it fails
            error = self._error_line()
            return f"{self._name} was ended by signal {-code}" + (f"; its last error: {error}" if error else "")
        return f"{self._name} ended with code {code}: {self._error_line() or self._last_line()}"

    def lower_spinning_threads(self) -> None:
        """Lower the priority of threads that run although the server has nothing to do. Takes half a second.

        NIXL's progress thread looks for messages all the time, and neither vLLM nor NIXL's Python has an option against
        it. At an equal priority it takes half of a core from the thread that computes there.
        """
        before, began_s = self._thread_times(), time.monotonic()
        time.sleep(_SPIN_LOOK_S)
        least_s = _SPIN_SHARE * (time.monotonic() - began_s)
        for thread, used_s in self._thread_times().items():
            if used_s - before.get(thread, used_s) > least_s:
                with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                    os.setpriority(os.PRIO_PROCESS, thread, _SPIN_NICENESS)

    def _thread_times(self) -> dict[int, float]:
        """Seconds of CPU time by thread, without the first thread of each process: that one computes."""
        times: dict[int, float] = {}
        for process in _tree_of(self.pid):
            with contextlib.suppress(psutil.Error):
                times |= {one.id: one.user_time + one.system_time for one in process.threads() if one.id != process.pid}
        return times

    def stop(self) -> None:
        """End the whole tree: by SIGTERM to the server, then by force. Later calls change nothing."""
        tree = _tree_of(self.pid)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
        for process in {*tree, *_tree_of(self.pid)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._client.close()

    def _read(self, output: IO[bytes], log_file: Path | None) -> None:
        with output, open(log_file or os.devnull, "ab", buffering=0) as log:
            while line := output.readline(_MAX_LINE):
                self._tail.append(line.decode(errors="replace").rstrip())
                with contextlib.suppress(OSError):  # a full disk costs the log, not the server
                    log.write(line)

    def _last_line(self) -> str:
        return next((line for line in reversed(self.tail) if line.strip()), "none")

    def _error_line(self) -> str:
        """The last line that names an error; "" if none does."""
        for line in reversed(self.tail):
            if found := _ERROR.search(line):
                return found[0].strip()
        return ""


def pin(pid: int, cores: Sequence[int]) -> None:
    """Give these cores, and no others, to all threads of a server.

    vLLM's NIXL connector moves the main thread of each worker to the last core of the machine, whatever it has been
    told: with few cores, those of all servers end up on the same one.
    """
    for process in _tree_of(pid):
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                    os.sched_setaffinity(thread.id, cores)


def _tree_of(pid: int) -> list[psutil.Process]:
    """The process and all below it; none if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
