"""Draws in Triton, on a GPU or under Triton's interpreter (see tests/conftest.py)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tandem.engine.sampling.draw import philox

triton: Any = pytest.importorskip("triton", reason="Triton is for Linux")
tl: Any = pytest.importorskip("triton.language")

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
NUM = 64


@triton.jit  # type: ignore[untyped-decorator]
def draw_words(seeds: Any, positions: Any, out: Any, num: tl.constexpr) -> None:
    rows = tl.arange(0, num)
    position = tl.load(positions + rows)
    zero = tl.zeros_like(position).to(tl.uint32)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    first, second, _, _ = tl.philox(tl.load(seeds + rows), low, high, zero, zero)
    tl.store(out + rows, first.to(tl.int64))
    tl.store(out + num + rows, second.to(tl.int64))


def test_triton_gives_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds, positions = torch.randint(0, (1 << 63) - 1, (2, NUM), generator=generator)
    out = torch.zeros(2, NUM, dtype=torch.int64, device=DEVICE)
    draw_words[(1,)](seeds.to(DEVICE), positions.to(DEVICE), out, NUM)
    zero, word = torch.zeros_like(seeds), 0xFFFFFFFF
    counter, key = (positions & word, positions >> 32, zero, zero), (seeds & word, seeds >> 32)
    assert out.cpu().tolist() == torch.stack(philox(counter, key)[:2]).tolist()
