from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.engine.loader import load_model, model_revision, resolve_device
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tests.support.architectures import SERVED, save_model


def save_weights(folder: Path, last: float = 0.0, config: str = "{}") -> Path:
    """Weights of 3 MB; all elements of the last tensor are `last`."""
    folder.mkdir()
    (folder / "config.json").write_text(config)
    tensors = {"embed": torch.zeros(512, 1024), "layer": torch.full((256, 1024), last)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_revision_names_the_weights_and_the_config_and_not_the_folder(tmp_path: Path) -> None:
    a, same = (model_revision(save_weights(tmp_path / name)) for name in "ab")
    fine_tuned = model_revision(save_weights(tmp_path / "c", last=1.0))  # the embeddings are the same
    other_config = model_revision(save_weights(tmp_path / "d", config='{"rope_theta": 1}'))
    assert same == a
    assert len({a, fine_tuned, other_config}) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_a_config_error() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device=cuda"):
        resolve_device("cuda")


def test_a_generation_config_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", SERVED["llama"])
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load_model(EngineConfig(model=str(folder), dtype="float32", device="cpu"))
