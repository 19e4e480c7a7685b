"""Signals as a background job inherits them from a shell: which are ignored or blocked, and what a child sees."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.runtime.signals import defer_stop, exit_on_sigterm, unless

ROOT = Path(__file__).parents[2]
IGNORED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)
# Prints the signals that its child found ignored and blocked, after the child has ended with 3.
PARENT = """
import subprocess, sys
from tandem.runtime.signals import restore_child_signals
restore_child_signals()
child = '''
import signal
of = lambda numbers: " ".join(sorted(signal.Signals(n).name for n in numbers))
print("ignored:", of(n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN))
print("blocked:", of(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
raise SystemExit(3)
'''
print("code:", subprocess.run([sys.executable, "-c", child]).returncode, flush=True)
"""
# Prints which signal stopped it.
STOPPING = """
import asyncio, signal, sys
from tandem.runtime.signals import restore_child_signals, stop_signals
if sys.argv[1] == "main":
    restore_child_signals()
async def wait():
    signals = stop_signals(signal.SIGINT, signal.SIGTERM)
    print("waiting", flush=True)
    await signals.stop.wait()
    print("stopped by a service manager:", signals.is_service, "now:", signals.stop_now.is_set())
asyncio.run(wait())
"""


def inherit() -> None:
    """Run in a child before its program: ignores and blocks signals, as a careless parent does."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGALRM))


def test_children_react_to_signals_whatever_was_inherited() -> None:
    command = [sys.executable, "-c", PARENT]
    done = subprocess.run(command, cwd=ROOT, preexec_fn=inherit, capture_output=True, text=True, timeout=60, check=True)
    ignored, blocked, code = done.stdout.splitlines()
    assert code == "code: 3", "a parent that ignores SIGCHLD gets no exit code"
    assert blocked == "blocked: "
    # nohup is for the whole tree; Python itself ignores the last two.
    assert ignored == "ignored: SIGHUP SIGPIPE SIGXFSZ"


@pytest.mark.parametrize("is_main", [True, False], ids=["with children's signals", "alone"])
def test_a_background_job_ignores_ctrl_c_and_obeys_sigterm(is_main: bool) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    command = [sys.executable, "-c", STOPPING, "main" if is_main else "alone"]
    with subprocess.Popen(command, cwd=ROOT, preexec_fn=ignore, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)
            assert process.communicate(timeout=30)[0] == "stopped by a service manager: True now: False\n"
            assert process.returncode == 0
        finally:
            process.kill()


@pytest.fixture
def raising_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise exceptions, whatever other tests have left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGTERM, signal.SIG_DFL)
    exit_on_sigterm()
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


RAISED = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}
each_signal = pytest.mark.parametrize("number", RAISED)


def run_stopped(done: list[str], *numbers: signal.Signals, error: Exception | None = None) -> None:
    with defer_stop(lambda: done.append("told")):
        for i, number in enumerate(numbers):
            signal.raise_signal(number)
            done.append(f"after {i}")
        if error is not None:
            raise error


@each_signal
@pytest.mark.usefixtures("raising_signals")
def test_a_stop_waits_for_the_end_of_the_block(number: signal.Signals) -> None:
    done: list[str] = []
    run_stopped(done)
    with pytest.raises(RAISED[number]):
        run_stopped(done, number)
    assert done == ["told", "after 0"]
    with pytest.raises(RAISED[number]):
        signal.raise_signal(number)


@each_signal
@pytest.mark.usefixtures("raising_signals")
def test_a_stop_is_not_lost_where_its_exception_would_be(number: signal.Signals) -> None:
    """In a destructor, for example, or around a fork."""

    class Dying:
        def __del__(self) -> None:
            signal.raise_signal(number)

    with pytest.raises(RAISED[number]), defer_stop(lambda: None):
        Dying()


@each_signal
@pytest.mark.usefixtures("raising_signals")
def test_a_second_stop_takes_effect_at_once(number: signal.Signals) -> None:
    done: list[str] = []
    with pytest.raises(RAISED[number]):
        run_stopped(done, signal.SIGTERM, number, number)
    assert done == ["told", "after 0"]


@pytest.mark.usefixtures("raising_signals")
def test_an_error_comes_before_the_stop_and_ignored_signals_stay_so() -> None:
    with pytest.raises(ValueError, match="within"):
        run_stopped([], signal.SIGTERM, error=ValueError("within"))
    for number in RAISED:
        signal.signal(number, signal.SIG_IGN)
    exit_on_sigterm()
    done: list[str] = []
    run_stopped(done, *RAISED)
    assert done == ["after 0", "after 1"]


async def test_work_is_finished_unless_it_is_stopped_first() -> None:
    stop, said = asyncio.Event(), list[str]()
    assert await unless(stop, asyncio.sleep(0), lambda: said.append("stopping"))
    working = asyncio.create_task(asyncio.Event().wait())
    asyncio.get_running_loop().call_soon(stop.set)
    assert not await unless(stop, working, lambda: said.append("stopping"))
    assert (working.cancelled(), said) == (True, ["stopping"])


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_work_that_fails_raises_unless_it_is_stopped(is_stopped: bool) -> None:
    stop = asyncio.Event()

    async def fail() -> None:
        if is_stopped:
            stop.set()
        raise OSError("broken")

    if is_stopped:
        assert not await unless(stop, fail())
    else:
        with pytest.raises(OSError, match="broken"):
            await unless(stop, fail())
