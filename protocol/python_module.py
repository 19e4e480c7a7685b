"""How a process of ours starts another that runs one of our modules."""

from __future__ import annotations

import os
import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module, without the current folder in its path, which may have a user's random.py."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """This process's environment, extended so that the module is found where this process found its own."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
