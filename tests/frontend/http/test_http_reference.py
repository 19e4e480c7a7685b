"""What a client may see is written down: headers in docs/api_table.md, codes of errors in the OpenAPI document."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.apps import route_app, serve_app

REPOSITORY = Path(__file__).resolve().parents[3]
SERVER = [path for folder in ("frontend", "router", "text") for path in (REPOSITORY / folder).rglob("*.py")]
# Headers that engines get, the beginning of a text, a key of the OpenAPI document, and a name of gzip.
NOT_OURS = {"x-guidance", "x-data-parallel-rank", "x-anthropic-billing-header", "x-event-schema", "x-gzip"}


def test_every_header_of_ours_is_in_the_docs() -> None:
    page = (REPOSITORY / "docs" / "api_table.md").read_text()
    sources = "".join(path.read_text() for path in SERVER)
    headers = set(re.findall(r"""["'](x-[a-z-]+)["']""", sources)) - NOT_OURS
    assert len(headers) >= 6
    assert [header for header in sorted(headers) if f"`{header}`" not in page] == []


def codes_of(tree: ast.AST) -> Iterator[str]:
    """Codes that errors are given where they are raised: `code="..."`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value)


def test_every_code_of_an_error_is_in_the_document() -> None:
    document = json.dumps([serve_app().openapi(), route_app().openapi()])
    codes = {code for path in SERVER for code in codes_of(ast.parse(path.read_text()))}
    assert {"not_ready", "unsupported_parameter"} <= codes
    assert [code for code in sorted(codes) if f"`{code}`" not in document] == []
