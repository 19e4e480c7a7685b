from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from tandem.protocol.config import ClusterConfig


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[ClusterConfig]:
    """The configurations that reach the launcher. It is replaced by one that starts nothing and returns 7."""
    configs: list[ClusterConfig] = []

    def launch(config: ClusterConfig, *_: object) -> int:
        configs.append(config)
        return 7

    monkeypatch.setitem(sys.modules, "tandem.cluster.serve", types.SimpleNamespace(serve=launch))
    return configs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model, named toy."""
    folder = tmp_path / "toy"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder
