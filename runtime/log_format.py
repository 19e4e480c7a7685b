"""The format of log lines in every process: with the time."""

from __future__ import annotations

import logging

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def show_warnings() -> None:
    """Write warnings and errors to stderr, unless the program that uses us has set up its logs already."""
    logging.basicConfig(level=logging.WARNING, format=_FORMAT)
