"""Counts work, for tests that a cost does not grow: unlike a time, the count is the same on a busy machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_lines_run(function: Callable[[], object]) -> int:
    """Lines of Python that a call executes, each turn of a loop counted. Loops inside C functions are not."""
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
