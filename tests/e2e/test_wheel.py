"""The wheel holds every file that runs, under one name. It serves from a folder whose modules have our names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from urllib.parse import urljoin

import pytest

from tests.support.server import HTTP, REPOSITORY, started

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

HIDDEN = (".git", ".venv*", ".*_cache", ".hypothesis")
NOT_COPIED = (*HIDDEN, "build", "dist", "*.egg-info", "*.so", "__pycache__", "bench-results")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves folders behind, which the next build would take for sources."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPOSITORY, folder / "source", symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source"))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def tandem(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The command of a new environment that has the wheel, and our dependencies without those of the extra `otel`."""
    folder = tmp_path_factory.mktemp("environment")
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


@pytest.fixture
def folder_of_the_user(tmp_path: Path) -> Path:
    """A project whose modules have the names of our packages. Importing one of them ends the process."""
    folder = tmp_path / "project"
    names = [path.parent.name for path in (REPOSITORY / "tandem").glob("*/__init__.py")]
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise SystemExit('{name} of the user was imported')\n")
    shutil.rmtree(folder / "protocol")
    (folder / "protocol.py").write_text("raise SystemExit('protocol of the user was imported')\n")
    return folder


def pip(*arguments: str) -> None:
    """Run pip without PYTHONPATH: it would take the metadata of the source tree for an installed Tandem."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "pip", *arguments]
    finished = subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, timeout=300, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_its_one_top_level_name_is_tandem_and_nothing_is_missing(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.split("/")[0].endswith(".dist-info")}
        licenses = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
    assert {name.split("/")[0] for name in names} == {"tandem"}
    assert licenses
    folders = {path.name for path in (REPOSITORY / "tandem").iterdir() if path.is_symlink()}
    sources = {
        str(Path("tandem", path.relative_to(REPOSITORY)))
        for folder in folders
        for path in (REPOSITORY / folder).rglob("*")
        if path.is_file() and path.suffix not in {".pyc", ".so"}
    }
    assert sources - names == set()
    some = ("py.typed", "engine/cpu/common.h", "helm/tandem/Chart.yaml", "helm/tandem/templates/NOTES.txt")
    some += ("helm/tandem/.helmignore", "frontend/http/static/main.js", "frontend/dashboard/static/index.html")
    assert {f"tandem/{name}" for name in some} <= names


def test_router_and_workers_start_beside_modules_of_the_same_names(
    tandem: str, folder_of_the_user: Path, text_model: Path, tmp_path: Path
) -> None:
    with started(
        text_model,
        tmp_path,
        "--pool-bytes",
        "20000000",
        tandem=[tandem],
        cwd=folder_of_the_user,
        env={"PYTHONPATH": ""},
    ) as server:
        server.wait_ready()
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
        answer = HTTP.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert {server.worker(role)["state"] for role in ("prefill", "decode")} == {"ready"}
        assert files_of_page(f"{server.url}/docs") > 5
        assert files_of_page(f"{server.url}/dashboard") > 10
        assert server.stop() == 0


def files_of_page(url: str) -> int:
    """Get a page, and every file that it links to or imports. Returns the number of files."""
    found, left = set[str](), [url]
    while left:
        file = left.pop()
        answer = HTTP.get(file)
        assert answer.status_code == 200, (file, answer.text)
        found.add(file)
        links = re.findall(r'(?:src=|href=|from )"([^#"]+)"', answer.text)
        left += [one for one in (urljoin(file, link) for link in links) if one not in found]
    return len(found)


def test_without_the_extra_tracing_is_refused_before_anything_starts(
    tandem: str, text_model: Path, tmp_path: Path
) -> None:
    with started(text_model, tmp_path, "--tracing", tandem=[tandem], cwd=tmp_path, env={"PYTHONPATH": ""}) as server:
        assert server.wait_ended() == 2
    (line,) = server.output.strip().splitlines()
    assert line.startswith("tandem: --tracing needs the extra otel")
    assert line.endswith("pip install 'tandem-serve[otel]'")
