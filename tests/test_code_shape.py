"""The source keeps its shape: short functions, few handlers of any exception, and folders that the docs explain."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {path.parent.name for path in (REPOSITORY / "tandem").glob("*/__init__.py")} | {"benchmarks"}
MAX_P90_LINES = 18
MAX_LINES = 100
MAX_BROAD_SHARE = 0.08


@functools.cache
def sources() -> dict[Path, str]:
    paths = (path for package in sorted(PACKAGES) for path in sorted((REPOSITORY / package).rglob("*.py")))
    return {path: path.read_text() for path in paths}


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(source) for path, source in sources().items()}


def functions() -> Iterator[tuple[int, str]]:
    """Length in lines with docstring, and name, of every function."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                yield node.end_lineno - node.lineno + 1, f"{path}:{node.lineno} {node.name}"


def handlers() -> Iterator[tuple[bool, str, str]]:
    """Whether it catches any exception, its place, and its line, of every handler."""
    for path, source in sources().items():
        lines = source.splitlines()
        for node in ast.walk(trees()[path]):
            if isinstance(node, ast.ExceptHandler):
                caught = ast.unparse(node.type) if node.type else "BaseException"
                is_broad = caught in ("Exception", "BaseException")
                yield is_broad, f"{path}:{node.lineno}", lines[node.lineno - 1]


def fault_boundaries() -> Iterator[str]:
    """The place of every call of `protocol/fault_boundary.py`, which catches any exception for its caller."""
    for path, tree in trees().items():
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names = {
            one.name for node in imports if node.module == "tandem.protocol.fault_boundary" for one in node.names
        } - {"noted_on_error", "undone_on_error"}  # they raise the exception again
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                yield f"{path}:{node.lineno}"


def test_functions_are_short() -> None:
    lengths = sorted(functions())
    assert lengths[len(lengths) * 9 // 10][0] <= MAX_P90_LINES
    assert lengths[-1][0] <= MAX_LINES, lengths[-1]


def test_few_handlers_catch_any_exception() -> None:
    found, boundaries = list(handlers()), list(fault_boundaries())
    broad = [place for is_broad, place, _ in found if is_broad] + boundaries
    num_all = len(found) + len(boundaries)
    assert len(broad) < MAX_BROAD_SHARE * num_all, f"{len(broad)} of {num_all}: {broad}"


def test_a_handler_of_any_exception_says_why() -> None:
    assert [place for is_broad, place, line in handlers() if is_broad and "#" not in line] == []


def test_every_folder_of_source_is_in_the_table_of_the_architecture() -> None:
    rows = [line for line in (REPOSITORY / "docs/architecture.md").read_text().splitlines() if line.startswith("| `")]
    for path in sources():
        package, *folders = path.relative_to(REPOSITORY).parts[:-1]
        row = next((row for row in rows if f"`{package}/`" in row.split("|")[1]), "")
        assert row, f"{package}/ is in no row"
        assert not folders or f"`{folders[0]}/`" in row, f"{package}/{folders[0]}/ is not in the row of {package}/"


def test_property_tests_take_their_number_of_examples_from_a_profile() -> None:
    paths = [path for path in (REPOSITORY / "tests").rglob("*.py") if path.name != "conftest.py"]
    named = "max" + "_examples"
    assert [str(path) for path in paths if named in path.read_text()] == []
