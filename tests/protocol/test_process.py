"""A process id means one process, even if its number was reused."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tandem.protocol.process import has_ended, own_process, process_of
from tests.support.processes import known, sleeping_child


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with sleeping_child() as process:
        yield process


def test_our_own_process_names_us() -> None:
    assert (own_process().pid, own_process().is_here) == (os.getpid(), True)
    assert own_process() == known(os.getpid())


def test_the_descriptor_signals_the_end(child: subprocess.Popen[bytes]) -> None:
    process = known(child.pid)
    descriptor = process.open()
    assert descriptor is not None
    try:
        assert not has_ended(descriptor)
        child.kill()
        assert has_ended(descriptor, 20)
    finally:
        os.close(descriptor)
    child.wait()
    assert process.open() is None
    assert process_of(child.pid) is None


@pytest.fixture
def many_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 4096), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("many_files")
def test_a_large_descriptor_number_works(child: subprocess.Popen[bytes]) -> None:
    first = known(child.pid).open()
    assert first is not None
    large = fcntl.fcntl(first, fcntl.F_DUPFD, 2000)  # as in a process with many connections
    os.close(first)
    try:
        assert not has_ended(large)
        child.kill()
        assert has_ended(large, 20)
    finally:
        os.close(large)


def test_a_process_with_a_reused_number_is_another(child: subprocess.Popen[bytes]) -> None:
    assert replace(known(child.pid), started=1).open() is None


def test_a_number_of_another_machine_is_invalid(child: subprocess.Popen[bytes]) -> None:
    elsewhere = replace(known(child.pid), machine="another")
    assert not elsewhere.is_here
    with pytest.raises(ValueError, match="another"):
        elsewhere.open()


def test_a_name_with_parentheses_does_not_shift_the_fields() -> None:
    code = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'a) R 1 (b', 0, 0, 0); "
        "print('named', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"named\n"
        assert known(process.pid).started >= own_process().started
        process.kill()
