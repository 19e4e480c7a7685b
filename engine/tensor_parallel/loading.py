"""Loads a model's weights for one rank, each of which reads only its shard; refuses what cannot be cut."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level
from transformers.distributed import DistributedConfig

from tandem.engine.kv_geometry import KvGeometry
from tandem.engine.tensor_parallel.group import RankGroup
from tandem.protocol.errors import ConfigError

_ELSEWHERE = "use tensor_parallel_size=1, or serve it by vLLM or SGLang (`--engine vllm`)"
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_lock = threading.Lock()  # transformers looks at this process's default group, and there is one


@contextmanager
def sharded(group: RankGroup, device: torch.device) -> Iterator[dict[str, Any]]:
    """Arguments of `from_pretrained` by which transformers reads this rank's shard, within the block.

    transformers asks torch's default process group for rank and size. Reading needs no other rank, so that group is one
    that talks to nobody, and is gone after the block.
    """
    found = torch._C._get_accelerator().type
    if found != device.type:
        raise ConfigError(
            f"device={device.type} with tensor_parallel_size={group.size} on a machine with a {found} device: hide it "
            "(CUDA_VISIBLE_DEVICES=)"
        )
    with _lock, _left_as_it_was():
        os.environ.update(zip(_VARIABLES, map(str, (group.rank, group.rank, group.size)), strict=True))
        set_debug_level(DebugLevel.OFF)  # DETAIL would make a second group, which waits for the other ranks
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("fake", rank=group.rank, world_size=group.size, store=store)
        try:
            yield {"distributed_config": DistributedConfig(tp_size=group.size)}
        finally:
            dist.destroy_process_group()


@contextmanager
def _left_as_it_was() -> Iterator[None]:
    """Undo what a default process group, and making it, change in this process."""
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    hook, level = sys.excepthook, get_debug_level()  # torch writes a rank before each line of a traceback
    try:
        yield
    finally:
        sys.excepthook = hook
        set_debug_level(level)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def check_config(name: str, text: Any, size: int) -> None:
    """Raise ConfigError if a model of this text config cannot be cut for `size` ranks."""
    num_heads = text.num_attention_heads
    for field, heads in (
        ("num_attention_heads", num_heads),
        ("num_key_value_heads", getattr(text, "num_key_value_heads", None) or num_heads),
    ):
        if heads % size:
            raise ConfigError(
                f"model={name!r} has {field}={heads}, which tensor_parallel_size={size} does not divide; choose a size "
                "that does (decode_parallel_size sets that of decode workers)"
            )
    if not getattr(text, "base_model_tp_plan", None):
        raise ConfigError(
            f"model={name!r} ({text.model_type}) has no tensor parallel plan in transformers; {_ELSEWHERE}"
        )


def check_heads(name: str, text: Any, kv: KvGeometry, size: int) -> None:
    """Raise ConfigError unless a rank attends with its share of the heads."""
    found = {attention.num_heads for attention in kv.attentions}
    if found != {text.num_attention_heads // size}:
        raise ConfigError(
            f"model={name!r} ({text.model_type}) cannot be served by {size} ranks: its plan in transformers does not "
            f"divide the {text.num_attention_heads} attention heads (each rank has {sorted(found)}); {_ELSEWHERE}"
        )
