from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tandem.engine.engine import Engine
from tandem.engine.pool_memory import default_pool_bytes
from tandem.protocol.config import EngineConfig

GIB = 1 << 30


@pytest.mark.parametrize(
    ("kind", "free_gib", "total_gib", "pool_gib"),
    [
        ("cpu", 5, 8, 0.5),  # a laptop
        ("cpu", 12, 16, 1.0),
        ("cpu", 1, 16, 0.25),  # others have taken most of it
        ("cpu", 20, 32, 2.0),
        ("cpu", 200, 256, 2.0),
        ("cuda", 70, 80, 63.0),
    ],
)
def test_a_pool_that_nobody_sized_leaves_room_on_a_laptop(
    kind: str, free_gib: int, total_gib: int, pool_gib: float
) -> None:
    assert default_pool_bytes(kind, free_gib * GIB, total_gib * GIB) == int(pool_gib * GIB)


def test_a_pool_of_the_default_size_takes_memory_as_it_fills(model_folder: Callable[[str], Path]) -> None:
    process = psutil.Process()
    config = EngineConfig(model=str(model_folder("llama")), dtype="float32", device="cpu")
    before = process.memory_info().rss
    engine = Engine(config)
    pool_bytes = engine.kv.numel() * engine.kv.element_size()
    assert pool_bytes > 100e6, "large enough to see it"
    assert process.memory_info().rss - before < pool_bytes / 2
    before = process.memory_info().rss
    engine.kv[: engine.kv.shape[0] // 2].fill_(1.0)
    assert process.memory_info().rss - before > pool_bytes / 4


def test_a_worker_keeps_no_mapped_weight_files(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama")
    engine = Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu", pool_bytes=4 << 20))
    assert engine.pool.num_blocks
    assert str(folder) not in Path("/proc/self/maps").read_text()
