"""Packages that tests install: a folder of modules with metadata, as pip leaves them, and first on the path."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def write_package(folder: Path, package: str, entry_points: Mapping[str, Mapping[str, str]], **modules: str) -> None:
    """A package with these entry points, by group and name, and these modules."""
    metadata = folder / f"{package.replace('-', '_')}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    for group, points in entry_points.items():
        with (metadata / "entry_points.txt").open("a") as file:
            file.write("\n".join([f"[{group}]", *(f"{name}={to}" for name, to in points.items()), ""]))
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, *modules: str) -> None:
    """Let this process find the packages in a folder for the test; it has imported none of these modules."""
    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
