"""Signals as a background job inherits them from a shell: which are ignored or blocked, and what a child sees."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.runtime.signals import defer_keyboard_interrupt

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
    assert code == "code: 3", "a parent that ignores SIGCHLD hears of no exit code"
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
def python_interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run_interrupted(done: list[str], num_interrupts: int, error: Exception | None = None) -> None:
    with defer_keyboard_interrupt(lambda: done.append("told")):
        for number in range(num_interrupts):
            signal.raise_signal(signal.SIGINT)
            done.append(f"after {number}")
        if error is not None:
            raise error


@pytest.mark.usefixtures("python_interrupts")
def test_an_interrupt_waits_for_the_end_of_the_block() -> None:
    done: list[str] = []
    run_interrupted(done, 0)
    with pytest.raises(KeyboardInterrupt):
        run_interrupted(done, 1)
    assert done == ["told", "after 0"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("python_interrupts")
def test_a_second_interrupt_takes_effect_at_once() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run_interrupted(done, 3)
    assert done == ["told", "after 0"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("python_interrupts")
def test_an_error_in_the_block_comes_before_the_interrupt_and_ignored_signals_stay_ignored() -> None:
    with pytest.raises(ValueError, match="within"):
        run_interrupted([], 1, ValueError("within"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    done: list[str] = []
    run_interrupted(done, 2)
    assert done == ["after 0", "after 1"]
