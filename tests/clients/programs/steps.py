"""Runs a client's program step by step and prints the title of each step, and what it printed itself.

The programs run in an environment that has the client and not Tandem, so they import nothing from Tandem.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from importlib.metadata import version

URL = os.environ["TANDEM_URL"]
MODEL = os.environ["TANDEM_MODEL"]
KEY = os.environ["TANDEM_KEY"]


def run(package: str, *steps: Callable[[], None]) -> None:
    """Run the steps in order. Each has a docstring, which is its title; an assertion that fails ends the program."""
    print(f"## {package} {version(package)}")
    for step in steps:
        print(f"\n### {inspect.getdoc(step)}\n", flush=True)
        step()
