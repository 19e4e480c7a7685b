import ast
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(*args: str) -> str:
    finished = subprocess.run(["make", *args], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return finished.stdout


@pytest.mark.parametrize(
    ("requirements", "expected"),
    [
        (["filelock", "sympy>=1.13.3"], []),
        (['nvidia-nccl-cu13==2.0; platform_system == "Linux"', "triton"], ["nvidia-nccl-cu13", "triton"]),
        (['cuda-bindings; sys_platform == "plan9"'], []),
        (['nvidia-something; extra == "opt"'], []),
    ],
)
def test_cuda_build_of_torch_is_recognised_by_its_requirements(requirements: list[str], expected: list[str]) -> None:
    report = {"install": [{"metadata": {"name": "torch", "requires_dist": requirements}}]}
    assert load_script("check_torch_build").cuda_requirements(report) == expected


def test_missing_system_packages_are_named(tmp_path: Path) -> None:
    """With a PATH of next to nothing, and no apt-get in it: nothing may be installed here."""
    for tool in ("id", "python3"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    bash = shutil.which("bash")
    assert bash is not None
    finished = subprocess.run(
        [bash, str(ROOT / "scripts" / "debian-packages.sh")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert finished.returncode == 1
    assert "g++ make" in finished.stderr
    assert finished.stdout == ""


SCRIPTS = [ROOT / ".ci" / "run", *sorted((ROOT / "scripts").glob("*.sh"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_stop_at_the_first_failure(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    is_sourced = script.name == "environment.sh"
    assert ("set -euo pipefail" in script.read_text()) is not is_sourced


ENVIRONMENTS = pytest.mark.parametrize(
    ("script", "variable"), [("clients.sh", "CLIENTS_VENV"), ("engine-vllm.sh", "VLLM_VENV")]
)


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / script)]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=30, check=False
    )


def run_with_python(script: str, variable: str, folder: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Run a script for an environment in `folder`, whose interpreter is the shell command `python`."""
    interpreter = folder / "bin" / "python"
    interpreter.parent.mkdir()
    interpreter.write_text(f"#!/bin/sh\n{python}\n")
    interpreter.chmod(0o755)
    return run(f"scripts/{script}", **{variable: str(folder)})


@ENVIRONMENTS
def test_an_environment_is_ready_when_every_step_succeeded(script: str, variable: str, tmp_path: Path) -> None:
    finished = run_with_python(script, variable, tmp_path, "exit 0")
    assert finished.returncode == 0, finished.stderr
    assert "\nready after " in finished.stdout
    assert "$ pip install " in (tmp_path / "setup.log").read_text()


@ENVIRONMENTS
def test_a_failed_installation_names_the_error_and_the_log(script: str, variable: str, tmp_path: Path) -> None:
    python = 'case "$*" in *--version) exit 0 ;; esac; echo ERROR: there is no such package; exit 1'
    finished = run_with_python(script, variable, tmp_path, python)
    assert finished.returncode == 1
    assert "ready" not in finished.stdout
    log = tmp_path / "setup.log"
    assert finished.stderr == f"ERROR: there is no such package\nerror: pip install failed; the whole log: {log}\n"


@pytest.mark.parametrize(
    ("script", "variable", "inner"),
    [("clients.sh", "CLIENTS_VENV", ""), ("engine-vllm.sh", "VLLM_VENV", ""), ("agents.sh", "AGENTS_VENV", "aider")],
)
def test_an_environment_that_cannot_be_made_is_named(script: str, variable: str, inner: str, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    finished = run(f"scripts/{script}", **{variable: str(folder), "PYTHON": "false"})
    assert (finished.returncode, finished.stderr) == (1, f"error: no environment could be made in {folder / inner}\n")


def test_make_test_runs_lint_types_and_tests() -> None:
    commands = make("--dry-run", "test")
    tests = 'pytest -m "not cluster and not slow and not clients"'
    for command in ("ruff check", "ruff format --check", "bin/mypy", tests):
        assert command in commands


@pytest.mark.parametrize("failing", ["", "test", "test-cluster"])
def test_a_change_must_pass_both_tiers_and_gets_the_errors_of_both(failing: str, tmp_path: Path) -> None:
    (tmp_path / "make").write_text(f'#!/bin/sh\n[ "$1" != "{failing}" ]\n')
    (tmp_path / "make").chmod(0o755)
    finished = run(".ci/run", PATH=f"{tmp_path}:{os.environ['PATH']}")
    results = [line.partition(" after ")[0] for line in finished.stdout.splitlines()]
    expected = {target: "FAILED" if target == failing else "passed" for target in ("test", "test-cluster")}
    assert results == [f"make {target}: {result}" for target, result in expected.items()]
    assert finished.returncode == bool(failing)


def test_make_help_names_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    listed = make("help")
    assert [target for target in phony[1].split() if f"\n  {target} " not in listed] == []


def test_image_holds_every_package() -> None:
    """It is built from the whole tree but for what `.dockerignore` names."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert "\nCOPY . .\n" in (ROOT / "deploy" / "Dockerfile").read_text()
    needed = {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "scripts", "tandem"}
    needed |= {path.name for path in (ROOT / "tandem").iterdir()}
    assert needed.isdisjoint(ignored)


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def dependencies() -> list[str]:
    """What the project declares, by names with hyphens."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    return [re.split(r"[\[<>=;]", requirement)[0].lower().replace("_", "-") for requirement in wanted]


def test_every_dependency_is_pinned_and_explained() -> None:
    pinned = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    pinned += (ROOT / "scripts" / "setup.sh").read_text().replace("nixl_version=", "nixl==")  # one of its CUDA flavours
    explained = (ROOT / "docs" / "dependencies.md").read_text().lower().replace("_", "-")
    assert [name for name in dependencies() if not re.search(rf"^{re.escape(name)}==", pinned, re.MULTILINE)] == []
    assert [name for name in dependencies() if f"`{name}" not in explained] == []


def test_every_package_that_is_imported_is_declared() -> None:
    declared = {name.replace("-", "_") for name in dependencies()}
    declared |= {"tandem", "zmq", "opentelemetry", *sys.stdlib_module_names}  # pyzmq, opentelemetry-sdk
    paths = [path for folder in sorted((ROOT / "tandem").iterdir()) for path in folder.rglob("*.py")]
    imported = {name.partition(".")[0] for path in paths for name in imports_of(path)}
    assert {"starlette", "msgspec"} < imported
    assert sorted(imported - declared) == []


def test_constraints_hold_one_version_for_every_platform() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "no local builds, no URLs, no editables"
    assert "torch==2.13.0" in lines
