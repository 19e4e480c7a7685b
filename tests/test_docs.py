"""What the documents name is there: tests, source files and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])
NAMES = [str(path.relative_to(REPOSITORY)) for path in DOCUMENTS]
_TEST = re.compile(r"`([\w/]+\.py)?(?:::(\w+))?`")
_FILE = re.compile(r"`([\w-]+/[\w/.-]+\.(?:py|cpp|c|h|sh|toml|yaml|json|md|gz))(?:::\w+)?`")
_LINK = re.compile(r"\]\(([^)#]*)(?:#([\w-]*))?\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def named_tests() -> list[tuple[str, str]]:
    """(file, function or "") of every test named; a function alone is of the file named before it."""
    found = set()
    for document in DOCUMENTS:
        file = ""
        for match in _TEST.finditer(document.read_text()):
            if (match[1] is None and match[2] is None) or (match[1] and "test_" not in match[1]):
                continue
            file = match[1] or file
            found.add((file, match[2] or ""))
    return sorted(found)


@pytest.mark.parametrize(("file", "function"), named_tests())
def test_a_named_test_is_there(file: str, function: str) -> None:
    path = REPOSITORY / file  # from the root, so that it can be passed to pytest
    assert path.is_file(), file
    assert not function or f"def {function}(" in path.read_text(), f"{file}::{function}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_named_files_and_links_are_there(document: Path) -> None:
    text = document.read_text()
    files = [name for name in _FILE.findall(text) if not name.startswith("bench-results")]
    missing = [name for name in files if not (REPOSITORY / name).exists()]
    for link, heading in _LINK.findall(text):
        target = document.parent / link if link else document
        if "://" not in link and not (target.exists() and (not heading or heading in anchors(target))):
            missing.append(f"{link}#{heading}")
    assert not missing, f"{document.name} names {missing}"


def anchors(document: Path) -> set[str]:
    """Of the headings, as GitHub makes them: lower case, without punctuation, with a hyphen for a space."""
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in _HEADING.findall(document.read_text())}


def test_the_security_page_names_its_tests() -> None:
    security = (REPOSITORY / "docs" / "security.md").read_text()
    assert len(re.findall(r"`[\w/]*test_\w+\.py", security)) > 30


def test_the_map_names_every_document() -> None:
    plan = (REPOSITORY / "docs" / "README.md").read_text()
    assert [path.name for path in (REPOSITORY / "docs").glob("*.md") if f"]({path.name})" not in plan] == ["README.md"]
