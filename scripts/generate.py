"""Writes every file that is generated from the code; `make generated` runs it, and a test compares its files."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from tandem.cli.metrics_reference import metrics_page
from tandem.cli.reference import configuration_page, values_schema

ROOT = Path(__file__).resolve().parents[1]
_MODELS = ROOT / "docs" / "models.md"
_VALUES_SCHEMA = ROOT / "helm" / "tandem" / "values.schema.json"


def _models_page() -> str:
    """docs/models.md with the tables of families as they are now."""
    sys.path.insert(0, str(ROOT))
    from tests.support.architectures import families_tables

    tables = f"\\1\n\n{families_tables()}\n\n\\2"
    return re.sub(r"(<!-- families: .*? -->).*(<!-- end of families -->)", tables, _MODELS.read_text(), flags=re.DOTALL)


# Each file, and the function that makes its whole text.
FILES: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "configuration.md": configuration_page,
    ROOT / "docs" / "metrics.md": metrics_page,
    _MODELS: _models_page,
    _VALUES_SCHEMA: lambda: values_schema(_VALUES_SCHEMA.read_text()),
}


def main() -> None:
    """Write the files that differ, and name them."""
    for path, make_text in FILES.items():
        text = make_text()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
