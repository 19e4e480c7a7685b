"""Says which phase a long command is in: a live line on a terminal, elsewhere a line per phase and every 10 s."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tandem.loadtest.stats import minutes_of

_LINE_S = 10.0  # between two lines if nobody watches a terminal


class Phases:
    """The phases of one command, while the block runs. `say` and `begin` may be called from any thread."""

    def __init__(self, console: Console, *, line_s: float = _LINE_S, clock: Callable[[], float] = time.monotonic):
        self._console = console
        self._line_s = line_s
        self._clock = clock
        self._name, self._began_s = "", clock()
        self._status: Callable[[], str] = str
        self._has_ended = threading.Event()
        self._live = Live(get_renderable=self._rendered, console=console, refresh_per_second=2, transient=True)
        self._lines = threading.Thread(target=self._print_lines, daemon=True)

    def __enter__(self) -> Phases:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._name = ""
        self._has_ended.set()
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._lines.join()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, soft_wrap=True, markup=False)

    def begin(self, name: str, status: Callable[[], str] = str) -> None:
        """The next phase. `status` gives how far it has come, in words."""
        self._name, self._status, self._began_s = name, status, self._clock()
        if not self._console.is_terminal:
            self.say(f"{name} ...")

    def line(self) -> str:
        """The present phase, how long it has taken, and how far it has come; "" between phases."""
        name, status = self._name, self._status()
        told = [f"{name}, {minutes_of(self._clock() - self._began_s)}", *([status] if status else [])]
        return ": ".join(told) if name else ""

    def _rendered(self) -> Text:
        return Text(self.line(), style="dim", no_wrap=True, overflow="ellipsis")

    def _print_lines(self) -> None:
        while not self._has_ended.wait(self._line_s):
            if line := self.line():
                self.say(line)
