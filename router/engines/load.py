"""What engines tell of themselves in `/metrics` and `/v1/models`, as plain values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["EngineLoad", "EngineSize", "model_of", "parse_load", "parse_size"]

# Names in the order of preference; the values of all label sets (data parallel ranks) are added up.
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
_USAGE = (
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "sglang:token_usage",
    "llamacpp:kv_cache_usage_ratio",
)
_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class EngineLoad(NamedTuple):
    """What runs and waits in an engine, whoever sent it."""

    num_running: int
    num_waiting: int
    kv_usage: float  # share of its KV cache in use


class EngineSize(NamedTuple):
    """Size of an engine's KV cache; 0 = not told."""

    block_size: int
    num_blocks: int


def parse_load(text: str) -> EngineLoad | None:
    """Load in a Prometheus exposition; None when it has none of the names we know."""
    values: dict[str, float] = {}
    wanted = {*_RUNNING, *_WAITING, *_USAGE}
    for name, _, value in _samples(text):
        if name in wanted:
            values[name] = max(values.get(name, 0.0), value) if name in _USAGE else values.get(name, 0.0) + value
    running = _first(values, _RUNNING)
    if running is None:
        return None
    return EngineLoad(int(running), int(_first(values, _WAITING) or 0), _first(values, _USAGE) or 0.0)


def parse_size(text: str) -> EngineSize:
    """Block size and number of blocks that vLLM tells in the labels of its `cache_config_info`."""
    for name, labels, _ in _samples(text):
        if name == "vllm:cache_config_info":
            found = dict(_LABEL.findall(labels))
            return EngineSize(_whole(found.get("block_size")), _whole(found.get("num_gpu_blocks")))
    return EngineSize(0, 0)


def model_of(catalog: Any, wanted: str) -> tuple[str, int]:
    """(model, its context or 0) in the body of `/v1/models`: the wanted one, or the first. Raises `LookupError`."""
    cards = catalog.get("data") if isinstance(catalog, dict) else None
    named = [card for card in cards or () if isinstance(card, dict) and isinstance(card.get("id"), str)]
    card = next((card for card in named if not wanted or card["id"] == wanted), None)
    if card is None:
        raise LookupError(f"it serves {', '.join(card['id'] for card in named) or 'no model'}")
    length = card.get("max_model_len")
    return card["id"], length if isinstance(length, int) else 0


def _samples(text: str) -> Iterable[tuple[str, str, float]]:
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            yield match[1], match[2] or "", float(match[3])
        except ValueError:
            continue


def _first(values: dict[str, float], names: Iterable[str]) -> float | None:
    return next((values[name] for name in names if name in values), None)


def _whole(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
