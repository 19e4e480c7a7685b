"""Packages that tests install: a folder of modules with metadata, as pip leaves them, and first on the path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    package: str,
    entry_points: Mapping[str, Mapping[str, str]],
    **modules: str,
) -> None:
    """Install a package with these entry points, by group and name, and these modules for the test."""
    metadata = folder / f"{package.replace('-', '_')}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name}={to}\n" for name, to in one.items()) for group, one in entry_points.items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
