"""`tandem version`, and what a result says about the build and the machine of its measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import psutil
import typer


def version() -> int:
    """Print the version, the commit if it is known, and the version of Python."""
    built_from = f", commit {known}" if (known := commit()) else ""
    typer.echo(f"tandem {product_version()} (Python {platform.python_version()}{built_from})")
    return 0


def print_and_leave(is_asked: bool) -> None:
    """Callback of --version."""
    if is_asked:
        version()
        raise typer.Exit


def product_version() -> str:
    """The version of the installed distribution."""
    return metadata.version("tandem-serve")


def commit() -> str:
    """Commit of the source tree, with `-dirty` if the tree has changed since; empty without a repository."""
    source = Path(__file__).resolve().parent.parent
    if not (source / ".git").exists():
        return ""
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def machine() -> dict[str, str | int | float]:
    """The machine's hardware and system; nothing that identifies it."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
