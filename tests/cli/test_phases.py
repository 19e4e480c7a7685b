from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from tandem.cli.phases import Phases
from tests.support.waiting import eventually


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def told(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def console_of(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=60, highlight=False)


def counting(total: int) -> tuple[list[int], Callable[[], str]]:
    done: list[int] = []
    return done, lambda: f"{len(done)} of {total}"


async def test_without_a_terminal_each_phase_is_a_line_at_intervals() -> None:
    console, clock = console_of(is_terminal=False), Clock()
    done, status = counting(24)
    with Phases(console, line_s=0.001, clock=clock) as phases:
        phases.begin("starting the server")
        clock.now = 61.0
        await eventually(lambda: "starting the server, 1:01\n" in told(console))
        phases.say("the server is up [after] 1:01")
        phases.begin("undisturbed answers", status)
        done.extend(range(12))
        clock.now = 69.0
        await eventually(lambda: "undisturbed answers, 0:08: 12 of 24\n" in told(console))
    assert told(console).startswith("starting the server ...\n")
    assert "the server is up [after] 1:01\n" in told(console)
    assert "undisturbed answers ...\n" in told(console)
    assert "\x1b" not in told(console)


async def test_on_a_terminal_one_line_lives_and_leaves_nothing() -> None:
    console, clock = console_of(is_terminal=True), Clock()
    done, status = counting(24)
    with Phases(console, clock=clock) as phases:
        phases.begin("undisturbed answers", status)
        done.append(1)
        clock.now = 8.0
        await eventually(lambda: "undisturbed answers, 0:08: 1 of 24" in told(console))
        phases.say("1 was left out")
        assert "undisturbed answers ..." not in told(console)
    assert "1 was left out" in told(console)
    assert re.search(r"\x1b\[2K\Z", told(console)), "the live line is erased at the end"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_error_ends_it_too(is_terminal: bool) -> None:
    phases = Phases(console_of(is_terminal=is_terminal), line_s=3600.0)

    def interrupted() -> str:
        with phases:
            phases.begin("trial")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert phases.line() == ""
