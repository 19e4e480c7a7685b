from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.test_setup import load_script

ROOT = Path(__file__).resolve().parents[2]


FILES: dict[Path, Callable[[], str]] = load_script("generate").FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_committed_file_is_what_the_code_generates(path: Path) -> None:
    assert path.read_text() == FILES[path](), "run: make generated"


def test_bounds_are_written_alike_whichever_annotation_came_first() -> None:
    script = (  # the types of messages come before those of the configuration
        "import sys, typing, msgspec\n"
        "typing.Annotated[float, msgspec.Meta(gt=0, le=1e6)], typing.Annotated[float, msgspec.Meta(ge=0, le=1e6)]\n"
        "from tandem.cli.reference import values_schema\n"
        "sys.stdout.write(values_schema(sys.stdin.read()))\n"
    )
    committed = (ROOT / "helm" / "tandem" / "values.schema.json").read_text()
    shown = subprocess.run(
        [sys.executable, "-c", script], input=committed, cwd=ROOT, capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    assert shown.stdout == committed


def test_every_environment_variable_of_ours_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.sh", "*.yaml", "*.tpl", "deploy"],
        cwd=ROOT, capture_output=True, text=True, check=True, timeout=30,
    ).stdout.split()  # fmt: skip
    named: set[str] = set()
    for name in tracked:
        if not name.startswith(("tests/", "benchmarks/")) and (ROOT / name).is_file():
            named.update(re.findall(r"\bTANDEM_[A-Z_]+[A-Z]\b", (ROOT / name).read_text()))
    ours = named - {"TANDEM_RUN"}  # a mark that Tandem puts into its own processes
    assert len(ours) >= 6
    assert [name for name in sorted(ours) if f"`{name}" not in page] == []
