"""The layout holds: one import root, imports point one way and in no circle, and what must run without torch does."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = {path.parent.name for path in (REPOSITORY / "tandem").glob("*/__init__.py")}
WORKER_ROLE = {"engine", "kv_transfer", "protocol"}
MAY_IMPORT: dict[str, set[str]] = {
    "protocol": set(),
    "runtime": {"protocol"},
    "scheduling": {"nixl", "protocol"},
    "engine": {"protocol", "runtime"},
    "kv_transfer": {"protocol", "runtime"},
    "prefill_worker": WORKER_ROLE,
    "decode_worker": WORKER_ROLE,
    "worker": WORKER_ROLE | {"prefill_worker", "decode_worker", "runtime", "scheduling"},
    "text": {"protocol", "scheduling"},
    "router": {"protocol", "runtime", "scheduling", "text"},
    "frontend": {"protocol", "router", "runtime", "scheduling", "text"},
    "cluster": {"frontend", "protocol", "router", "runtime", "scheduling", "text", "worker"},
    "loadtest": {"protocol"},
    "testing": {"kv_transfer", "protocol"},
    "simulator": {"scheduling", "protocol", "loadtest", "kv_transfer"},
    "cli": PACKAGES,
}
IO = {"asyncio", "fastapi", "httpx", "socket", "starlette", "threading", "uvicorn", "zmq"}
FOREIGN: dict[str, set[str]] = {  # what a package must never need, at the top of a file or below
    "protocol": {"torch", "ray", "zmq", "fastapi", "transformers"},
    "scheduling": IO | {"nixl", "ray", "torch"},
    "runtime": {"torch", "ray", "fastapi", "transformers"},
    "engine": {"ray", "zmq", "fastapi", "nixl"},
    "kv_transfer": {"ray", "fastapi", "transformers"},
    "prefill_worker": {"ray", "zmq", "fastapi"},
    "decode_worker": {"ray", "zmq", "fastapi"},
    "worker": {"ray", "fastapi"},
    "text": {"torch", "ray", "nixl", "zmq", "fastapi", "starlette", "uvicorn", "httpx"},
    "router": {"torch", "ray", "nixl", "fastapi", "starlette", "uvicorn"},
    "frontend": {"torch", "ray", "nixl"},
    "simulator": {"torch", "ray", "nixl", "zmq", "fastapi", "transformers"},
}


def modules_of(package: str) -> dict[str, Path]:
    """Paths of a package's modules, under their full names."""
    names = {path: path.with_suffix("").relative_to(REPOSITORY) for path in (REPOSITORY / package).rglob("*.py")}
    return {f"tandem.{'.'.join(name.parts)}".removesuffix(".__init__"): path for path, name in sorted(names.items())}


@functools.cache
def imports_of(path: Path) -> list[str]:
    """Full names that a file imports, anywhere in it: modules, and what is taken out of them."""
    return list(_imports_of(path))


def _imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_package_has_its_place() -> None:
    assert MAY_IMPORT.keys() == PACKAGES


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_imports_point_one_way(package: str) -> None:
    for path in modules_of(package).values():
        for name in imports_of(path):
            root, _, rest = name.partition(".")
            assert root not in PACKAGES | {"tests", "benchmarks"}, f"{path} imports {name} past the import root"
            assert root not in FOREIGN.get(package, set()), f"{path} must not import {name}"
            if root == "tandem":
                imported = rest.partition(".")[0]
                assert imported in MAY_IMPORT[package] | {package}, f"{path} must not import {name}"


def test_there_is_no_circle_of_imports() -> None:
    paths = {name: path for package in PACKAGES for name, path in modules_of(package).items()}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        names = set(imports_of(path))
        graph[module] = ((names | {name.rpartition(".")[0] for name in names}) & paths.keys()) - {module}
    TopologicalSorter(graph).prepare()  # raises CycleError with the circle


def test_relaying_knows_the_dispatcher_and_nothing_of_how_it_decides() -> None:
    known = {"addresses", "bounded_json", "config", "dispatcher", "errors", "tls", "upstream"}
    for name, path in modules_of("frontend").items():
        if name.startswith("tandem.frontend.relay"):
            used = {one.split(".")[3] for one in imports_of(path) if one.startswith("tandem.router.engines.")}
            assert used <= known, f"{path} imports {used - known}"


def test_no_two_folders_import_each_other() -> None:
    """A folder and one inside it may: `app.py` puts together what is below it."""
    graph: dict[Path, set[Path]] = {}
    paths = {name: path for package in PACKAGES for name, path in modules_of(package).items()}
    for path in paths.values():
        names = set(imports_of(path))
        imported = {paths[name].parent for name in names | {name.rpartition(".")[0] for name in names} if name in paths}
        graph.setdefault(path.parent, set()).update(imported - {path.parent})
    both = [(one, other) for one in graph for other in graph[one] if one in graph.get(other, ()) and one < other]
    assert [pair for pair in both if not pair[1].is_relative_to(pair[0])] == []


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_nothing_is_importable_past_the_root(package: str) -> None:
    """A second import of a file would make second classes of the same name, and shadow a user's own module."""
    code = f"import {package}"
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert f"ImportError: import tandem.{package}" in result.stderr


def test_the_router_runs_without_torch() -> None:
    run_without(
        ["torch", "ray", "nixl"],
        "tandem.frontend.serve_app",
        "tandem.frontend.route_app",
        "tandem.router.workers.flow",
        "tandem.router.workers.client",
        "tandem.scheduling.placement.placer",
        "tandem.cluster.route",
    )


def test_commands_and_a_router_of_engines_start_without_transformers() -> None:
    """transformers brings torch where that is installed: seconds and 200 MB."""
    run_without(["torch", "ray", "nixl", "transformers"], "tandem.cli.main", "tandem.cluster.route")


def test_frontend_processes_of_engines_run_without_what_decides() -> None:
    run_without(["numpy", "httpx"], "tandem.frontend.route_app", "tandem.frontend.processes.remote_dispatcher")


def test_the_supervisor_needs_no_torch() -> None:
    run_without(["torch", "transformers", "nixl"], "tandem.cluster.serve")


def test_the_pure_core_loads_no_io_library() -> None:
    blocked = sorted(FOREIGN["scheduling"] - {"asyncio", "socket", "threading"})  # the standard library uses these
    run_without(blocked, *modules_of("scheduling"))


def run_without(blocked: list[str], *modules: str) -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import {', '.join(modules)}"
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("package", sorted(PACKAGES - {"loadtest"}))  # locust patches the process when imported
def test_every_module_can_be_imported(package: str) -> None:
    for name in modules_of(package):
        importlib.import_module(name)
