import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from tandem.frontend.keys.api_key import OPERATOR
from tandem.frontend.keys.key_file import KeyFile
from tandem.protocol.config import DEFAULT_MODEL
from tandem.scheduling.admission.tenants import TenantPolicy, Tenants, load_tenants
from tests.support.commands import accept, tandem_commands

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "~/.ray/auth_token"
SECRETS = "~/.config/tandem"
FILES = sorted((ROOT / "cluster" / "ray").glob("*.yaml"))
EACH_FILE = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def load(file: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(file.read_text())
    return config


@EACH_FILE
def test_ray_accepts_the_cluster_file(file: Path) -> None:
    config = prepare_config(load(file))
    validate_config(config)
    assert config["head_node_type"] in config["available_node_types"]


@EACH_FILE
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
    (pull,) = tandem_commands("\n".join(config["worker_setup_commands"]))
    assert accept(pull) == {"name": flags["model"]}
    assert flags["model"] == DEFAULT_MODEL


@EACH_FILE
def test_files_that_setup_uses_are_copied_to_the_nodes(file: Path) -> None:
    config = load(file)
    assert list(config["file_mounts"].values()) == [".", TOKEN, SECRETS]
    assert not {"scripts", "constraints.txt", "Makefile"} & set(config["rsync_exclude"])


@EACH_FILE
def test_every_ray_command_demands_the_token_that_every_node_has(file: Path) -> None:
    config = load(file)
    mounts = config["file_mounts"]
    assert [place.endswith("/.ray/auth_token") for place, source in mounts.items() if source == TOKEN] == [True]
    assert any("chmod 600 ~/.ray/auth_token" in command for command in config["setup_commands"])
    commands = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    joining = [command for command in commands if "ray start" in command or "tandem serve" in command]
    assert len(joining) == 3
    assert [command for command in joining if "RAY_AUTH_MODE=token" not in command] == []
    assert all("--host 127.0.0.1" in command for command in joining if "tandem serve" in command), "it has no TLS"
    assert "scripts/cluster-secrets.sh" in file.read_text()


@EACH_FILE
def test_keys_and_tenants_reach_the_head_as_files(file: Path) -> None:
    config = load(file)
    [place] = [place for place, source in config["file_mounts"].items() if source == SECRETS]
    assert place.endswith("/.config/tandem")
    (command,) = tandem_commands("\n".join(config["head_start_ray_commands"]))
    flags = accept(command)
    assert (flags["api_key_file"], flags["tenants"]) == (f"{SECRETS}/api-keys", f"{SECRETS}/tenants.toml")
    assert any("chmod 600" in line and f"{SECRETS}/*" in line for line in config["setup_commands"])


def test_secrets_are_made_once_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    token, folder = tmp_path / ".ray" / "auth_token", tmp_path / ".config" / "tandem"
    paths = [token, folder / "api-keys", folder / "tenants.toml"]

    def make() -> tuple[str, list[str]]:
        environment = os.environ | {"HOME": str(tmp_path)}
        command = ["bash", str(ROOT / "scripts/cluster-secrets.sh")]
        ran = subprocess.run(command, env=environment, check=True, timeout=30, stdout=subprocess.PIPE, text=True)
        return ran.stdout, [path.read_text() for path in paths]

    printed, made = make()
    assert len(made[0]) == 64
    keys = KeyFile(str(paths[1])).api_keys
    (key,) = keys.all
    assert (key.tenant, keys.find(printed.strip())) == (OPERATOR, key)
    assert printed.strip() not in made[1]
    assert load_tenants(str(paths[2])) == Tenants(default=TenantPolicy())
    for path in paths:
        assert (stat.S_IMODE(path.parent.stat().st_mode), stat.S_IMODE(path.stat().st_mode)) == (0o700, 0o600)
        path.chmod(0o644)
    assert make() == ("", made)
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
