"""What a process does once all that it keeps for good is loaded."""

from __future__ import annotations

import gc

__all__ = ["settle"]


def settle() -> None:
    """Spare what is there now every later garbage collection.

    Else each full one walks through all modules and tokenizers again, which stops the event loop for 0.15 s; with a
    thousand requests a second that was a sixth of the CPU time.
    """
    gc.collect()
    gc.freeze()
