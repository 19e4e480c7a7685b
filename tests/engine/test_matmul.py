"""Packed products: right for every shape, and a row's bits depend on that row alone."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tandem.engine.cpu.kinds import VARIABLE, kernel_kind, kernel_kinds, kernels_of
from tandem.engine.cpu.matmul import PackedWeight, _WeightMemory
from tandem.engine.quantization import quantize
from tandem.protocol.errors import ConfigError
from tandem.runtime import large_pages

SHAPES = [(1, 1), (3, 5), (33, 31), (96, 64), (960, 576), (576, 1536), (49, 1536), (40, 2049)]  # N, K


def make_operands(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x [num_rows, K], weight [N, K], bias [N]"""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
    x, bias = torch.randn(num_rows, shape[1], generator=generator), torch.randn(shape[0], generator=generator)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_agree_with_torch(shape: tuple[int, int], cpu_dtype: torch.dtype) -> None:
    x, weight, bias = make_operands(shape, 150, cpu_dtype)
    packed = PackedWeight(weight)
    tolerance = 1e-5 if cpu_dtype is torch.float32 else 2e-2
    for num_rows in (1, 2, 5, 16, 17, 32, 33, 48, 150):
        expected = nn.functional.linear(x[:num_rows].double(), weight.double(), bias.double()).to(cpu_dtype)
        torch.testing.assert_close(packed.multiply(x[:num_rows], bias), expected, atol=tolerance, rtol=tolerance)
    without_bias = nn.functional.linear(x.double(), weight.double()).to(cpu_dtype)
    torch.testing.assert_close(packed.multiply(x), without_bias, atol=tolerance, rtol=tolerance)


# oneDNN, for one, sums in other orders at 31, 37, 288, 317, 358, 480 and 576 rows of some of these shapes.
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_depends_neither_on_the_other_rows_nor_on_threads(shape: tuple[int, int], cpu_dtype: torch.dtype) -> None:
    x, weight, bias = make_operands(shape, 1300, cpu_dtype)
    packed = PackedWeight(weight)
    whole = packed.multiply(x, bias)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        try:
            for size in (*range(1, 40), 63, 64, 65, 127, 129, 288, 318, 360, 481, 512, 513, 577, 1025):
                for start in {0, 7, 1300 - size}:
                    part = packed.multiply(x[start : start + size], bias)
                    assert torch.equal(part, whole[start : start + size]), f"rows {start} to {start + size}"
        finally:
            torch.set_num_threads(1)


def test_inputs_may_be_strided_or_have_more_axes(cpu_dtype: torch.dtype) -> None:
    x, weight, _ = make_operands((40, 64), 30, cpu_dtype)
    packed = PackedWeight(weight)
    expected = packed.multiply(x)
    wide = torch.cat([x, x], dim=1)
    assert torch.equal(packed.multiply(wide[:, 64:]), expected)
    assert torch.equal(packed.multiply(x.t().contiguous().t()), expected)
    assert torch.equal(packed.multiply(x.view(2, 3, 5, 64)), expected.view(2, 3, 5, 40))
    assert packed.multiply(x[:0]).shape == (0, 40)
    with ThreadPoolExecutor(1) as fresh:  # a thread without scratch memory
        assert fresh.submit(packed.multiply, x[:0]).result().shape == (0, 40)


def test_what_is_not_a_number_stays_in_its_row(cpu_dtype: torch.dtype) -> None:
    x, weight, _ = make_operands((33, 31), 40, cpu_dtype)
    packed = PackedWeight(weight)
    expected = packed.multiply(x)
    x[11] = float("nan")
    x[30] = float("inf")
    actual = packed.multiply(x)
    others = [row for row in range(40) if row not in (11, 30)]
    assert torch.equal(actual[others], expected[others])
    assert actual[11].isnan().all()
    assert not actual[30].isfinite().any()


def test_torchs_and_our_products_alternate() -> None:
    # Both set up the tiles of a CPU with AMX, each in its own way.
    x, weight, _ = make_operands((96, 64), 50, torch.bfloat16)
    packed = PackedWeight(weight)
    ours, torchs = packed.multiply(x), nn.functional.linear(x, weight)
    for num_rows in (50, 1, 17, 33, 50):
        assert torch.equal(packed.multiply(x[:num_rows]), ours[:num_rows])
        torch.testing.assert_close(nn.functional.linear(x[:num_rows], weight), torchs[:num_rows], atol=2e-2, rtol=2e-2)
    assert torch.equal(nn.functional.linear(x, weight), torchs)


def test_kernels_that_this_cpu_does_not_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sse")
    with pytest.raises(ConfigError, match=r"TANDEM_CPU_KERNELS='sse': this CPU has vectors"):
        kernel_kind()


def test_the_kernels_used_are_the_fastest_of_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    cpu = Path("/proc/cpuinfo")
    is_intels = cpu.exists() and "GenuineIntel" in cpu.read_text()  # pairs of bfloat16 are slower there than floats
    assert kernel_kind() == ("vectors" if is_intels and "amx_bf16" not in kernel_kinds() else kernel_kinds()[-1])


def test_blocks_are_told_apart_by_the_kernels_that_computed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert kernels_of(torch.bfloat16).startswith(f"cpu {kernel_kind()} ")
    monkeypatch.setenv(VARIABLE, "vectors")
    assert kernels_of(torch.bfloat16) == kernels_of(torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_weights_are_those_of_their_scales(shape: tuple[int, int], cpu_dtype: torch.dtype) -> None:
    x, weight, bias = make_operands(shape, 150, cpu_dtype)
    steps, scales = quantize(weight, torch.int8)
    assert int(steps.abs().max()) == 127
    actual = PackedWeight(weight, is_int8=True).multiply(x, bias)
    expected = (x.double() @ steps.double().t() * scales + bias).to(cpu_dtype)
    tolerance = 1e-5 if cpu_dtype is torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    assert (steps * scales.unsqueeze(1) - weight.float()).abs().max() <= scales.max() * 0.5001


def test_a_row_of_an_int8_product_depends_only_on_that_row(cpu_dtype: torch.dtype) -> None:
    x, weight, bias = make_operands((96, 200), 70, cpu_dtype)
    packed = PackedWeight(weight, is_int8=True)
    together = packed.multiply(x, bias)
    for size in (1, 2, 5, 13, 16, 33):
        pieces = [packed.multiply(part, bias) for part in x.split(size)]
        assert torch.equal(torch.cat(pieces), together), f"{size} rows"


def test_a_weight_of_zeros_has_an_int8_form() -> None:
    packed = PackedWeight(torch.zeros(3, 8), is_int8=True)
    assert torch.equal(packed.multiply(torch.ones(2, 8)), torch.zeros(2, 3))


def test_weights_of_engines_that_load_at_once_share_a_slab_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, allocate, both = _WeightMemory(), large_pages.allocate, threading.Barrier(2)

    def allocate_together(num_bytes: int) -> mmap.mmap:
        with contextlib.suppress(
            threading.BrokenBarrierError
        ):  # the one that holds the lock waits for nothing: no event tells that the other cannot come
            both.wait(0.5)
        return allocate(num_bytes)

    monkeypatch.setattr(large_pages, "allocate", allocate_together)
    with ThreadPoolExecutor(2) as threads:
        first, second = sorted(one.data_ptr() for one in threads.map(lambda _: memory.take(64, torch.uint8), range(2)))
    assert second - first == 64


def test_weights_larger_than_a_slab_have_one_of_their_own() -> None:
    memory = _WeightMemory()
    small, large, next_small = (memory.take(num, torch.uint8) for num in (100, (64 << 20) + 1, 100))
    assert [len(one) for one in (small, large, next_small)] == [100, (64 << 20) + 1, 100]
    begins = sorted((one.data_ptr(), one.data_ptr() + len(one)) for one in (small, large, next_small))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(begins))
    assert all(begin % 64 == 0 for begin, _ in begins)
