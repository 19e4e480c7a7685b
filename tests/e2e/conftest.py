from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_llama import save_tiny_text_model


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_text_model(tmp_path_factory.mktemp("model") / "tiny")
