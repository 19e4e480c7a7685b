"""Flags that several measuring commands share, and the result file that they write."""

from __future__ import annotations

import datetime
import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table

from tandem.cli.version import commit, machine, product_version
from tandem.loadtest.stats import without_nan
from tandem.protocol.errors import ConfigError

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

ServerUrl = Annotated[
    str, typer.Option(help="Server, with or without /v1; for https://, SSL_CERT_FILE may name a CA of your own.")
]
ServedModel = Annotated[str, typer.Option(help="Served model; empty = the server's first.")]
ApiKey = Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="Key sent to the server.", show_default=False)]
Output = Annotated[Path | None, typer.Option(help="File for the result as JSON.", show_default=False)]

Report = Annotated[Path | None, typer.Option(help="File for a report with plots, as HTML.", show_default=False)]


def no_server(url: str, reason: Exception, remedy: str) -> ConfigError:
    """The error for a server that cannot be reached. For an untrusted certificate it names a remedy."""
    if "certificate verify failed" in str(reason).lower():
        return ConfigError(
            f"url={url} shows a certificate that is not accepted ({reason}); if a CA of your own has signed it, name "
            "that: SSL_CERT_FILE=ca.pem"
        )
    return ConfigError(f"no OpenAI-compatible server at url={url} ({reason}); {remedy}")


def check_writable(*paths: Path | None) -> None:
    """Raise `ConfigError` for a path that cannot be written: before a measurement, not after it."""
    for path in paths:
        if path is None:
            continue
        if not path.resolve().parent.is_dir():
            raise ConfigError(f"{path}: its folder does not exist")
        is_new = not path.exists()
        try:
            path.open("a").close()
        except OSError as exc:
            raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc
        if is_new:
            path.unlink()


def write_result(output: Path, content: Mapping[str, Any], program: str = "tandem") -> None:
    """Write a result as JSON, headed by what is needed to repeat the run and to compare it with another."""
    head = {
        "command": shlex.join([*program.split(), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "version": product_version(),
        "commit": commit(),
        "machine": machine(),
    }
    output.write_text(json.dumps(without_nan({**head, **content}), indent=2, default=str) + "\n")


def write_report(path: Path, page: str) -> None:
    """Write a report, and say where it is."""
    path.write_text(page)
    Console().print(f"written to {path}", highlight=False, markup=False, soft_wrap=True)


def progress_bars() -> Progress:
    """Bars on stderr while the block runs; none if it is not a terminal.

    Drawn twice a second only: the terminal's thread takes time from a server on the same cores.
    """
    console = Console(stderr=True)
    columns = (SpinnerColumn(), "{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, refresh_per_second=2, disable=not console.is_terminal)


def printable(text: str) -> str:
    """A server's text as one line: escape sequences, which would reach the terminal, become visible."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def without_controls(text: str) -> str:
    """An answer for the terminal: line ends and tabs stay, characters that begin escape sequences go."""
    return _CONTROLS.sub("", text)


def print_whole(table: Table, console: Console) -> None:
    """Print a table with every digit: a narrow terminal folds lines, where rich alone would shorten the numbers."""
    needed = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.width = max(console.width, needed)
    console.print(table)
