"""Chooses transformers' class for a checkpoint, and refuses from the config alone what this engine cannot page.

What the config does not show is found later: `kv_geometry` measures the KV, `model_check` compares logits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from tandem.protocol.errors import ConfigError

_SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_ELSEWHERE = "choose another model, or serve this one by vLLM or SGLang behind `tandem route`"


def load_config(folder: Path) -> Any:
    """The checkpoint's config. Raises ConfigError if the folder has none that this version of transformers knows."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model={str(folder)!r} is not a model folder: it has no config.json")
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"model={str(folder)!r}: its config.json is not JSON: {exc}") from exc
    except (AttributeError, KeyError, OSError, StrictDataclassError, TypeError, ValueError) as exc:
        raise ConfigError(f"model={str(folder)!r}: transformers cannot read its config.json: {exc}") from exc


def text_config(config: Any) -> Any:
    """The part of a model's config that describes its language model."""
    return config.get_text_config(decoder=True)


def model_class(name: str, config: Any) -> type[PreTrainedModel]:
    """The class that generates text for this config. Raises ConfigError if its models cannot be paged."""
    if config.is_encoder_decoder:
        raise ConfigError(f"model={name!r} is an encoder-decoder; this engine serves decoder-only models")
    text = text_config(config)
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - _SERVED_LAYER_TYPES)
    if unknown:
        raise ConfigError(
            f"model={name!r} ({config.model_type}) has layers this engine cannot serve: {', '.join(unknown)}; "
            f"{_ELSEWHERE}"
        )
    chosen = _generator(config)
    if chosen is None:
        raise ConfigError(f"model={name!r} ({config.model_type}) is not a model that generates text")
    if chosen._is_stateful:
        raise ConfigError(
            f"model={name!r} ({config.model_type}) keeps state outside its KV cache, which this engine cannot page; "
            f"{_ELSEWHERE}"
        )
    if not _can_be_paged(chosen):
        raise ConfigError(
            f"model={name!r} ({config.model_type}) cannot be paged: its code in transformers has only its own "
            f"attention; {_ELSEWHERE}"
        )
    for field in ("vocab_size", "max_position_embeddings"):
        if not isinstance(getattr(text, field, None), int):
            raise ConfigError(f"model={name!r} ({config.model_type}) cannot be paged: its config has no {field}")
    return chosen


def _generator(config: Any) -> type[PreTrainedModel] | None:
    """The text generator of this config, or otherwise the wrapper of one that also reads images or sound."""
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING):
        if type(config) in mapping:
            found: type[PreTrainedModel] | tuple[type[PreTrainedModel], ...] = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    return None


def _can_be_paged(chosen: type[PreTrainedModel]) -> bool:
    """Whether its layers look their attention function up where ours is registered."""
    return chosen.is_backend_compatible() or hasattr(sys.modules[chosen.__module__], "ALL_ATTENTION_FUNCTIONS")
