"""The layout holds: imports point one way, and what must run without torch does."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {
    "protocol",
    "engine",
    "kv_transfer",
    "prefill_worker",
    "decode_worker",
    "router",
    "cluster",
    "cli",
    "loadtest",
    "simulator",
}
WORKER_ROLE = {"engine", "kv_transfer", "protocol"}
MAY_IMPORT: dict[str, set[str]] = {
    "protocol": set(),
    "engine": {"protocol"},
    "kv_transfer": {"protocol"},
    "prefill_worker": WORKER_ROLE,
    "decode_worker": WORKER_ROLE,
    "router": {"protocol"},
    "cluster": PACKAGES - {"cli", "loadtest", "simulator"},
    "loadtest": {"protocol"},
    "simulator": {"router", "protocol", "loadtest", "kv_transfer"},
    "cli": PACKAGES,
}
FOREIGN: dict[str, set[str]] = {  # what a package must never need, at the top of a file or below
    "protocol": {"torch", "ray", "zmq", "fastapi", "transformers"},
    "engine": {"ray", "zmq", "fastapi", "nixl"},
    "kv_transfer": {"ray", "fastapi", "transformers"},
    "prefill_worker": {"ray", "zmq", "fastapi"},
    "decode_worker": {"ray", "zmq", "fastapi"},
    "router": {"torch", "ray", "nixl"},
    "simulator": {"torch", "ray", "nixl", "zmq", "fastapi", "transformers"},
}


def imported_by(package: str) -> dict[str, str]:
    """Top-level names imported anywhere in a package, with one file that does."""
    found: dict[str, str] = {}
    for path in sorted((REPOSITORY / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} has a relative import"
                names = [node.module or ""]
            found |= {name.split(".")[0]: str(path.relative_to(REPOSITORY)) for name in names}
    return found


def modules_of(package: str) -> list[str]:
    return [package] + [
        module.name
        for module in pkgutil.walk_packages([str(REPOSITORY / package)], f"{package}.")
        if not module.name.endswith("__main__")
    ]


def test_every_package_has_its_place() -> None:
    assert MAY_IMPORT.keys() == PACKAGES


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_imports_point_one_way(package: str) -> None:
    imported = imported_by(package)
    assert "tests" not in imported
    wrong = {name: path for name, path in imported.items() if name in PACKAGES - MAY_IMPORT[package] - {package}}
    wrong |= {name: path for name, path in imported.items() if name in FOREIGN.get(package, set())}
    assert not wrong, f"{package} must not import {wrong}"


@pytest.mark.parametrize(
    "module",
    ["router.app", "router.engines.app", "router.flow", "router.worker_client", "router.placement", "cluster.front"],
)
def test_the_router_runs_without_torch(module: str) -> None:
    run_without(["torch", "ray", "nixl"], module)


@pytest.mark.parametrize("module", ["cli.main", "cluster.front"])
def test_commands_and_a_router_of_engines_start_without_transformers(module: str) -> None:
    """transformers brings torch where that is installed: seconds and 200 MB."""
    run_without(["torch", "ray", "nixl", "transformers"], module)


def test_the_supervisor_needs_no_torch() -> None:
    run_without(["torch", "transformers", "nixl"], "cluster.launch")


def run_without(blocked: list[str], module: str) -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import {module}"
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", sorted(PACKAGES - {"loadtest"}))  # locust patches the process when imported
def test_exported_names_exist(package: str) -> None:
    for name in modules_of(package):
        module = importlib.import_module(name)
        exported = getattr(module, "__all__", [])
        missing = [attribute for attribute in exported if not hasattr(module, attribute)]
        assert not missing, f"{name}.__all__ names {missing}"
        assert list(exported) == sorted(exported, key=_isort_key), f"{name}.__all__ is not in order"


def _isort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, as ruff sorts them."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)
