"""Processes of tests' own, and how they are named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.protocol.process import ProcessId, process_of


@contextmanager
def sleeping_child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing for as long as the block runs."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def known(pid: int) -> ProcessId:
    """The process of this number, which there is."""
    process = process_of(pid)
    assert process is not None
    return process
