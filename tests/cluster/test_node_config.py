from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cluster.node_config import config_on_node, name_for_nodes
from tandem.protocol.config import EngineConfig, TierConfig, WorkerConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role
from tests.cluster.test_model_store import make_model


def make_config(model: str, **tiers: str) -> WorkerConfig:
    return WorkerConfig(
        worker_id="d", role=Role.DECODE, engine=EngineConfig(model=model), tiers=TierConfig(**tiers), host=""
    )


def test_each_node_finds_the_model_in_its_own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = name_for_nodes("~/models/m")
    for node in ("fd00::1", "10.0.0.2"):
        home = tmp_path / node
        make_model(home / "models" / "m")
        monkeypatch.setenv("HOME", str(home))
        config = config_on_node(make_config(name), node)
        assert (config.host, config.engine.model) == (node, str(home / "models" / "m"))


def test_a_model_that_a_node_lacks_names_the_node(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^on node 10\.0\.0\.2: model folder {tmp_path}/m does not exist$"):
        config_on_node(make_config(f"{tmp_path}/m"), "10.0.0.2")
    make_model(tmp_path / "m", "config.json", "tokenizer.json")
    with pytest.raises(ConfigError, match=r"on node 10\.0\.0\.2: .* lacks weights"):
        config_on_node(make_config(f"{tmp_path}/m"), "10.0.0.2")


def test_a_tier_that_a_node_cannot_keep_names_the_node(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "m"))
    with pytest.raises(ConfigError, match=r"on node 10\.0\.0\.2: disk_cache_path: /dev/null/kv cannot be a folder"):
        config_on_node(make_config(model, disk_cache_path="/dev/null/kv"), "10.0.0.2")


def test_a_home_folder_that_a_node_lacks_names_the_node(tmp_path: Path) -> None:
    model = str(make_model(tmp_path / "m"))
    with pytest.raises(ConfigError, match=r"on node n: disk_cache_path='~nobody-here/kv' names the home folder"):
        config_on_node(make_config(model, disk_cache_path="~nobody-here/kv"), "n")


def test_a_relative_folder_is_the_same_for_workers_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "org" / "m")
    monkeypatch.chdir(tmp_path)
    assert name_for_nodes("org/m") == str(tmp_path / "org" / "m")
    assert name_for_nodes("./none") == str(tmp_path / "none")
    assert name_for_nodes("someone/some-model") == "someone/some-model"
    assert name_for_nodes("smollm2-135m") == "smollm2-135m"
