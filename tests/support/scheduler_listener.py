"""A listener of a scheduler that does what a test says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.engine.sequence import Sequence


def _nothing(*_: object) -> None: ...


@dataclass
class FakeListener:
    """May be changed at any time."""

    when_admitted: Callable[[Sequence], None] = _nothing
    when_published: Callable[[Sequence, int, int], None] = _nothing

    def admitted(self, sequence: Sequence) -> None:
        self.when_admitted(sequence)

    def published(self, sequence: Sequence, first_block: int, end_block: int) -> None:
        self.when_published(sequence, first_block, end_block)
