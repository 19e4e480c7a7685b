from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tandem.engine.engine import Engine
from tandem.engine.pool_memory import default_cpu_pool_bytes, default_gpu_pool_bytes
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free_gib", "total_gib", "pool_gib"),
    [
        (5, 8, 0.5),  # a laptop
        (12, 16, 1.0),
        (1, 16, 0.25),  # others have taken most of it
        (20, 32, 2.0),
        (200, 256, 2.0),
    ],
)
def test_a_pool_that_nobody_sized_leaves_room_on_a_laptop(free_gib: int, total_gib: int, pool_gib: float) -> None:
    assert default_cpu_pool_bytes(free_gib * GIB, total_gib * GIB) == int(pool_gib * GIB)


@pytest.mark.parametrize(
    ("share", "used_gib", "free_gib", "pool_gib"),
    [
        (0.9, 16, 64, 56.0),  # alone on a GPU of 80 GiB: 72, less the weights
        (0.45, 16, 64, 20.0),  # the first of two
        (0.45, 16, 24, 20.0),  # the second, whose neighbour has taken its share
        (0.9, 16, 40, 36.0),  # another program has taken 24
    ],
)
def test_workers_of_one_gpu_take_their_share_of_it(share: float, used_gib: int, free_gib: int, pool_gib: float) -> None:
    found = default_gpu_pool_bytes(share, used_gib * GIB, free_gib * GIB, 80 * GIB)
    assert found == pytest.approx(pool_gib * GIB, abs=1)


def test_a_gpu_without_room_for_a_pool_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"gpu_memory_share=0\.3 of a GPU with 85\.9 GB leaves no room .* fewer workers"
    ):
        default_gpu_pool_bytes(0.3, 30 * GIB, 50 * GIB, 80 * GIB)


def test_a_pool_of_the_default_size_takes_memory_as_it_fills(model_folder: Callable[[str], Path]) -> None:
    process = psutil.Process()
    config = EngineConfig(model=str(model_folder("llama")), dtype="float32", device="cpu")
    before = process.memory_info().rss
    engine = Engine(config)
    pool_bytes = engine.kv.num_blocks * engine.kv.block_bytes
    assert pool_bytes > 100e6, "large enough to see it"
    assert process.memory_info().rss - before < pool_bytes / 2
    before = process.memory_info().rss
    engine.kv.shards[0][: engine.kv.num_blocks // 2].fill_(1.0)
    assert process.memory_info().rss - before > pool_bytes / 4


def test_a_worker_keeps_no_mapped_weight_files(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama")
    engine = Engine(EngineConfig(model=str(folder), dtype="float32", device="cpu", pool_bytes=4 << 20))
    assert engine.pool.num_blocks
    assert str(folder) not in Path("/proc/self/maps").read_text()
