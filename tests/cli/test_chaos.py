"""`tandem chaos` starts a server and ends it. The server is a script; a real one is in tests/e2e."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cli import chaos
from tandem.protocol.errors import ConfigError


def server(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this script be run in place of `tandem serve`; the file for its log."""
    path = folder / "serve.sh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(path))
    return folder / "serve.log"


@pytest.fixture
def handlers_of_a_new_process() -> Iterator[None]:
    """The signal handlers with which the command starts, whatever an event loop of another test has left."""
    new = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in new.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers_of_a_new_process")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_too(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = server(tmp_path, "echo Serving m on http://x; exec sleep 600", monkeypatch)
    process = None
    try:
        with chaos._serving([], log) as (process, name, url):
            assert (name, url) == ("m", "http://x")
            os.kill(os.getpid(), number)
    except KeyboardInterrupt:
        assert process is not None
        assert process.poll() == -signal.SIGINT
    else:
        pytest.fail("the signal had no effect")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_server_that_does_not_start_is_reported_in_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = server(tmp_path, "echo no such flag: $*; exit 2", monkeypatch)
    with (
        pytest.raises(ConfigError, match=r"^tandem serve did not start: no such flag: -m tandem serve --port 0 --odd$"),
        chaos._serving(["--odd"], log),
    ):
        pass
