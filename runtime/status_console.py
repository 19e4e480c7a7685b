"""Where a server says what it does, for as long as somebody reads it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from typing_extensions import override


class StatusConsole(Console):
    """Prints on stderr. If that is gone, because a pipe's reader or a terminal has ended, it prints nothing more.

    The console of `rich` ends the process then, and with it the answers of everybody else.
    """

    def __init__(self) -> None:
        super().__init__(stderr=True, highlight=False)

    @override
    def print(self, *objects: Any, **style: Any) -> None:
        try:
            super().print(*objects, **style)
        except OSError:  # EIO: the terminal is gone
            self.quiet = True

    @override
    def on_broken_pipe(self) -> None:
        self.quiet = True
