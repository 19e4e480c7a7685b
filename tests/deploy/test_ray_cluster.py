from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.model_store import DEFAULT_MODEL
from tests.deploy.commands import accept, tandem_commands

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "cluster" / "ray").glob("*.yaml"))


def load(file: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(file.read_text())
    return config


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_ray_accepts_the_cluster_file(file: Path) -> None:
    config = prepare_config(load(file))
    validate_config(config)
    assert config["head_node_type"] in config["available_node_types"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_start_commands_start_ray_and_this_product(file: Path) -> None:
    config = load(file)
    head = "\n".join(config["head_start_ray_commands"])
    assert "ray start --head" in head
    assert "ray start --address=$RAY_HEAD_IP" in "\n".join(config["worker_start_ray_commands"])
    (command,) = tandem_commands(head)
    flags = accept(command)
    assert flags["ray_address"] == "auto"
    workers = config.get("min_workers") or config["available_node_types"]["worker"]["min_workers"]
    assert flags["num_prefill"] + flags["num_decode"] == workers  # type: ignore[operator]
    (pull,) = tandem_commands("\n".join(config["setup_commands"]))
    assert accept(pull) == {"name": flags["model"]}
    assert flags["model"] == DEFAULT_MODEL


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_that_setup_uses_are_copied_to_the_nodes(file: Path) -> None:
    config = load(file)
    assert list(config["file_mounts"].values()) == ["."]
    assert not {"scripts", "constraints.txt", "Makefile"} & set(config["rsync_exclude"])
