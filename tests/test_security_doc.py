"""docs/security.md names a test for what it promises: each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCUMENT = (TESTS.parent / "docs" / "security.md").read_text()
_NAMED = re.compile(r"`([\w/]+\.py)?(?:::(\w+))?`")


def named_tests() -> list[tuple[str, str]]:
    """(file, function or "") of every test named; a function alone is of the file named before it."""
    found, file = [], ""
    for match in _NAMED.finditer(DOCUMENT):
        if match[1] is None and match[2] is None:
            continue
        if match[1] and "test_" not in match[1]:
            continue  # a source
        file = match[1] or file
        found.append((file, match[2] or ""))
    return found


def test_the_document_names_tests() -> None:
    assert len(named_tests()) > 30


@pytest.mark.parametrize(("file", "function"), named_tests())
def test_it_is_there(file: str, function: str) -> None:
    path = TESTS / file
    assert path.is_file(), file
    assert not function or f"def {function}(" in path.read_text(), f"{file}::{function}"
