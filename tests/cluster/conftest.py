from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.harness import Oracle
from tests.cluster.tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)
