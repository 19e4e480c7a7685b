from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tandem.engine.text_part import dropping_idle_parts
from tests.support.architectures import load_plain

IDS = torch.arange(2).unsqueeze(0)


def num_bytes(module: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def test_a_tower_that_text_does_not_call_is_emptied(model_folder: Callable[[str], Path]) -> None:
    model = load_plain(model_folder("llava"))
    text = {name: num_bytes(part) for name, part in model.named_modules() if "language_model" in name or "head" in name}
    with torch.inference_mode():
        before = model(IDS, use_cache=False).logits
        with dropping_idle_parts(model):
            model(IDS, use_cache=False)
        assert torch.equal(model(IDS, use_cache=False).logits, before)
    assert num_bytes(model.model.vision_tower) == num_bytes(model.model.multi_modal_projector) == 0
    assert {name: num_bytes(part) for name, part in model.named_modules() if name in text} == text


def test_a_part_that_was_called_stays(model_folder: Callable[[str], Path]) -> None:
    model = load_plain(model_folder("llava"))
    size = num_bytes(model.model.multi_modal_projector)
    with dropping_idle_parts(model):
        model.model.multi_modal_projector(torch.zeros(1, 1, 32))
        model(IDS, use_cache=False)
    assert num_bytes(model.model.multi_modal_projector) == size > 0


def test_a_model_of_text_alone_keeps_all_its_parts(model_folder: Callable[[str], Path]) -> None:
    model = load_plain(model_folder("mixtral"))
    size = num_bytes(model)
    with dropping_idle_parts(model):
        pass
    assert num_bytes(model) == size
