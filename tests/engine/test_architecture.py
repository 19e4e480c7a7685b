"""What a config alone shows: no weights are there in these tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tandem.engine.architecture import load_config, model_class
from tandem.protocol.errors import ConfigError
from tests.support.architectures import REFUSED

EARLY = ("its code calls", "linear attention", "state instead", "chunked", "an index", "convolutions")
EARLY += ("an encoder-decoder",)


def save_config(folder: Path, text: str) -> Path:
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json"),
        ("[]", "config.json"),
        ('{"model_type": "no-such-model"}', "no-such-model"),
        ('{"architectures": ["LlamaForCausalLM"]}', "model_type"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
        # Code in the checkpoint's folder, which is never run.
        ('{"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}', "trust_remote_code"),
    ],
)
def test_a_config_that_transformers_cannot_read_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"(?s)model=.*{message}"):
        load_config(save_config(tmp_path, text))


def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a model folder: it has no config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", [name for name, (family, _) in REFUSED.items() if family.note.startswith(EARLY)])
def test_these_are_refused_before_weights_are_read(name: str, tmp_path: Path) -> None:
    family, error = REFUSED[name]
    getattr(transformers, family.config)(**family.settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=error):
        model_class("m", load_config(tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("ViTConfig", "not a model that generates text"),
        ("WhisperConfig", "encoder-decoder"),
        ("RwkvConfig", "keeps state"),
    ],
)
def test_what_does_not_generate_text_from_its_kv_is_refused(config: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_class("m", getattr(transformers, config)())


def test_a_config_without_a_context_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="its config has no max_position_embeddings"):
        model_class("m", transformers.WhisperConfig(is_encoder_decoder=False))
