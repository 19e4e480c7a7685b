"""The wheel as a user gets and installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.support.server import REPOSITORY

HIDDEN = (".git", ".venv*", ".*_cache", ".hypothesis")
NOT_COPIED = (*HIDDEN, "build", "dist", "*.egg-info", "*.so", "__pycache__", "bench-results")


def built_wheel(folder: Path) -> Path:
    """The wheel, built from a copy: a build leaves folders behind, which the next build would take for sources."""
    shutil.copytree(REPOSITORY, folder / "source", symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source"))
    (path,) = folder.glob("*.whl")
    return path


def installed_command(wheel: Path, folder: Path) -> str:
    """The command of a new environment that has the wheel, and our dependencies without those of the extra `otel`."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = str(folder / "bin" / "python")
    paths = {"base": str(folder), "platbase": str(folder)}
    (packages,) = {Path(sysconfig.get_path(name, vars=paths)) for name in ("purelib", "platlib")}
    pip("--python", python, "install", "--no-deps", "--no-index", str(wheel))
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name == "opentelemetry":  # FastAPI requires its API
            (dependencies / path.name).mkdir()
            for part in path.iterdir():
                if part.name not in ("exporter", "proto", "sdk"):
                    (dependencies / path.name / part.name).symlink_to(part)
        elif not path.name.startswith(("opentelemetry_exporter", "opentelemetry_proto", "opentelemetry_sdk")):
            (dependencies / path.name).symlink_to(path)
    # Python does not read the path files of a folder that a path file adds. So it finds no editable Tandem there.
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return str(folder / "bin" / "tandem")


def folder_of_our_names(folder: Path) -> Path:
    """A project whose modules have the names of our packages and of others. Importing one of them ends its process."""
    says_so = "raise SystemExit(f'{__name__} of the current folder was imported')\n"
    folder.mkdir()
    for name in ("http", "msgspec", "numpy", "protocol", "queue", "random", "tandem", "torch"):
        (folder / f"{name}.py").write_text(says_so)
    for package in (REPOSITORY / "tandem").glob("*/__init__.py"):
        if package.parent.name != "protocol":
            (folder / package.parent.name).mkdir()
            (folder / package.parent.name / "__init__.py").write_text(says_so)
    return folder


def pip(*arguments: str) -> None:
    """Run pip without PYTHONPATH: it would take the metadata of the source tree for an installed Tandem."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "pip", *arguments]
    finished = subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
