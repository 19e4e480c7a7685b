"""Long contexts on CPUs: keys are summed by splits, which threads share where it pays, and no bit shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.attention.cpu import SPLIT, CpuAttention
from tests.support.attention_case import Case

ROOT = Path(__file__).parents[2]
CPU = ROOT / "engine" / "cpu"
LENGTH = 2 * SPLIT + 40
NUM_HEADS, NUM_KV_HEADS = 32, 16  # four tiles of queries of this many heads are too many items to share contexts
SINKS = torch.linspace(-4, 6, NUM_HEADS)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": SPLIT + 900},  # begins inside a split
    {"window": 50, "softcap": 1.5, "sinks": SINKS},  # of some queries of an item in one split, of some in two
    {"sinks": SINKS},
    {"scale": 60.0},  # one split may outweigh another by more than a float holds
]


def long_case(dtype: torch.dtype) -> tuple[Case, Tensor]:
    """A long and a short sequence, and a pool in which their keys and values are written and all else is NaN."""
    case = Case([LENGTH, 70], num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=8, dtype=dtype)
    pool = case.new_pool(float("nan"))
    case.run(CpuAttention(1), pool, case.whole(), window=1)
    return case, pool


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("edge", [SPLIT, 2 * SPLIT])
def test_no_bit_depends_on_batch_chunks_or_threads(cpu_dtype: torch.dtype, options: dict[str, Any], edge: int) -> None:
    case, pool = long_case(cpu_dtype)
    first, last = edge - 60, edge + 40
    [whole] = case.run(CpuAttention(2), pool, [(0, first, last)], **options)
    [short] = case.run(CpuAttention(2), pool, [(1, 0, 70)], **options)
    spans = [(edge - 1, edge), (edge, edge + 1), (edge + 1, edge + 2), (edge - 3, edge + 2), (edge + 2, last)]
    for num_threads, (start, end) in enumerate(spans):
        expected = whole[start - first : end - first]
        [alone] = case.run(CpuAttention(num_threads % 4 + 1), pool, [(0, start, end)], **options)
        assert torch.equal(alone, expected), f"positions {start} to {end}"
    chunks = [(1, 0, 70), (0, edge - 1, edge + 3), (0, first, last), (0, edge, edge + 1)]
    together = case.run(CpuAttention(3), pool, chunks, **options)
    for out, expected in zip(together, (short, whole[59:63], whole, whole[60:61]), strict=True):
        assert torch.equal(out, expected)


def attend_exactly(
    case: Case,
    start: int,
    *,
    scale: float = 0.3,
    window: int = LENGTH,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the long sequence's queries from `start` on, in float64."""
    q, k, v = (tensors[0].double() for tensors in (case.q, case.k, case.v))
    k, v = (x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q[start:], k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(start, LENGTH)[:, None] - torch.arange(LENGTH)
    scores = scores.masked_fill((distance < 0) | (distance >= window), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, LENGTH - start, 1)], dim=2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=2)[..., :LENGTH], v)


@pytest.mark.parametrize("options", OPTIONS)
def test_merged_splits_agree_with_attention_in_float64(cpu_dtype: torch.dtype, options: dict[str, Any]) -> None:
    case, pool = long_case(cpu_dtype)
    start = 2 * SPLIT - 2
    [actual] = case.run(CpuAttention(2), pool, [(0, start, LENGTH)], **options)
    expected = attend_exactly(case, start, **options)
    error = (actual.double() - expected).norm(dim=2) / expected.norm(dim=2)
    assert float(error.max()) < (2e-4 if cpu_dtype == torch.float32 else 3e-2)


def test_what_is_not_a_number_is_passed_on_to_those_who_see_it_only(cpu_dtype: torch.dtype) -> None:
    case, pool = long_case(cpu_dtype)
    case.v[0][100] = float("nan")
    case.run(CpuAttention(1), pool, [(0, 0, 200)], window=1)
    [all_seen] = case.run(CpuAttention(2), pool, [(0, LENGTH - 2, LENGTH)])
    assert all_seen.isnan().all()
    [windowed] = case.run(CpuAttention(2), pool, [(0, LENGTH - 2, LENGTH)], window=SPLIT + 200)
    assert windowed.isfinite().all()


def test_contexts_that_no_memory_is_left_for_give_the_same_bits() -> None:
    # 24 sequences whose sums need 19 MB: a part of them shares contexts, and the others do not.
    case = Case([SPLIT + 32], num_heads=12, num_kv_heads=1, head_dim=256, dtype=torch.bfloat16)
    pool = case.new_pool(0.0)
    case.run(CpuAttention(2), pool, [(0, 0, SPLIT)], window=1)  # writes the keys and values
    chunk = (0, SPLIT, SPLIT + 32)
    [alone] = case.run(CpuAttention(1), pool, [chunk])
    for out in case.run(CpuAttention(2), pool, [chunk] * 24):
        assert torch.equal(out, alone)


def test_each_item_finds_its_sequence(cpu_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [int(n) for n in torch.randint(1, 150, (40,), generator=generator)]
    case = Case(lengths, num_heads=2, num_kv_heads=2, head_dim=8, dtype=cpu_dtype)
    pool = case.new_pool(float("nan"))
    for i, out in enumerate(case.run(CpuAttention(2), pool, case.whole())):
        [alone] = case.run(CpuAttention(1), pool, [(i, 0, lengths[i])])
        assert torch.equal(out, alone), f"sequence {i}"


Items = Callable[..., tuple[list[int], int]]


@pytest.fixture(scope="module")
def count_items(tmp_path_factory: pytest.TempPathFactory) -> Items:
    """Function (heads, window, *(new tokens, context)) -> items of each phase after the writing one, shared bytes."""
    built = tmp_path_factory.mktemp("items") / "items"
    sources = [str(ROOT / "tests" / "support" / "attention_items.cpp"), str(CPU / "paged_attention.cpp")]
    command = [os.environ.get("CXX", "g++"), "-O0", "-w", "-std=c++17", "-I", str(CPU), *sources, "-o", str(built)]
    subprocess.run(command, check=True, timeout=120)

    def count(heads: tuple[int, int, int], window: int, *sequences: tuple[int, int]) -> tuple[list[int], int]:
        numbers = [*heads, window, *(number for sequence in sequences for number in sequence)]
        done = subprocess.run([str(built), *map(str, numbers)], check=True, capture_output=True, text=True, timeout=60)
        *items, num_bytes = map(int, done.stdout.split())
        return items[1:], num_bytes

    return count


def test_one_long_context_is_work_for_many_threads(count_items: Items) -> None:
    assert count_items((8, 1, 128), 0, (1, 131072))[0] == [32, 1]
    assert count_items((8, 1, 128), 0, (1, 131073))[0] == [33, 1]
    assert count_items((8, 2, 128), 0, (40, 131072), (1, 50))[0] == [2 * 2 * 32 + 2, 4]
    assert count_items((8, 1, 128), 10_000, (1, 131073))[0] == [4, 1], "splits before the window are not items"


def test_other_steps_have_the_items_that_they_had(count_items: Items) -> None:
    assert count_items((9, 3, 64), 0, *[(1, 300)] * 8) == ([24], 0)
    assert count_items((9, 3, 64), 0, (1, SPLIT), (SPLIT, SPLIT), (0, 9000)) == ([3 + 3 * SPLIT // 32], 0)
    assert count_items((9, 3, 64), 128, (1, SPLIT + 64)) == ([3], 0), "a window over an edge is not worth two items"
    assert count_items((9, 3, 64), 0, (2048, 131072)) == ([3 * 64], 0), "a chunk of many tiles is enough work"


def test_memory_for_shared_contexts_is_bounded(count_items: Items) -> None:
    [num_items, num_merges], num_bytes = count_items((64, 8, 128), 0, *[(1, 1_000_000)] * 200)
    assert 0 < num_bytes <= 16 << 20
    assert num_merges == 2 * 8
    assert num_items == 198 * 8 + 2 * 8 * 245
    assert 0 < count_items((64, 8, 128), 0, *[(1, 60_000)] * 64)[1] <= 1 << 20, "each layer keeps sums of its own"
    assert count_items((512, 1, 512), 0, (63 * 32, 1 << 20)) == ([63], 0)


_WITHOUT_MEMORY = f"""
import resource, torch
from tandem.engine.attention.cpu import CpuAttention
from tests.support.attention_case import Case

case = Case([{SPLIT + 32}], num_heads=12, num_kv_heads=1, head_dim=256)
pool = case.new_pool(0.0)
attend = CpuAttention(1)

def prepare(num_sequences):
    query, key, value = (x[0][{SPLIT}:].repeat(num_sequences, 1, 1) for x in (case.q, case.k, case.v))
    context = case.context(pool, [(0, {SPLIT}, {SPLIT + 32})] * num_sequences)
    options = dict(scale=0.3, window=0, softcap=0.0, sinks=None)
    return lambda: attend(1, query, key, value, out[: len(query)], context, **options)

out = torch.zeros(20 * 32, 12, 256)
few, many = prepare(1), prepare(20)
few()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
try:
    many()
except MemoryError as exc:
    print(exc)
few()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_lack_of_memory_is_an_error_of_the_step() -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}  # no large block comes from what was freed
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_MEMORY], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "attention could not allocate its scratch memory\n", "")
