from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tandem.engine.loader import load_model, model_revision, resolve_device, resolve_dtype
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


def test_revision_names_the_weights_and_not_the_folder(tmp_path: Path) -> None:
    assert model_revision(save_weights(tmp_path / "a")) == model_revision(save_weights(tmp_path / "b"))


def test_fine_tunes_that_share_their_embeddings_have_other_revisions(tmp_path: Path) -> None:
    assert model_revision(save_weights(tmp_path / "a", last=0.0)) != model_revision(
        save_weights(tmp_path / "b", last=1.0)
    )


def test_revision_depends_on_the_config(tmp_path: Path) -> None:
    a, b = save_weights(tmp_path / "a"), save_weights(tmp_path / "b", config='{"rope_theta": 1}')
    assert model_revision(a) != model_revision(b)


def test_an_explicit_dtype_is_taken_as_it_is() -> None:
    assert resolve_dtype("float32", None, torch.device("cpu")) is torch.float32
    assert resolve_dtype("bfloat16", None, torch.device("cpu")) is torch.bfloat16


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
