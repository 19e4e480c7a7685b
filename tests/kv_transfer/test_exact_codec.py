"""The codec `exact`: the same bits or no block at all, from torch operations and from the kernels of a CPU alike."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tandem.engine.engine import Engine
from tandem.kv_transfer.codec import ExactCodec, ExactUnit, create_codec
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tandem.worker.kv.cpu_codec import CpuExactCodec, codec_for
from tests.engine.test_engine import generate, make_prompt
from tests.support.architectures import SERVED, save_model

TORCH, KERNELS = ExactCodec(), CpuExactCodec()
SHAPE = (2, 3, 2, 16, 64)  # [num_kv_heads, num_layers, 2, block_size, head_dim]
NUM_EXCEPTIONS = 16  # of a unit of 1,024 elements
SHAPES = st.tuples(
    st.integers(1, 2), st.integers(1, 2), st.just(2), st.sampled_from([1, 2, 3, 16]), st.integers(1, 130)
)
FAMILIES = ["llama", "qwen3", "gemma3", "phi3", "mixtral", "deepseek_v3"]


def encode(codec: ExactCodec, blocks: Tensor) -> Tensor:
    data = torch.full((len(blocks), codec.encoded_bytes(blocks.shape[1:], blocks.dtype)), 0xA5, dtype=torch.uint8)
    codec.encode(blocks, data)
    return data


def bits_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16)


def from_bits(bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    return bits.to(torch.int16).view(torch.bfloat16).view(-1, *shape)


def held(blocks: Tensor) -> list[bool]:
    """Encode and decode, by both; which blocks are held. Those must come back bit for bit."""
    data = encode(TORCH, blocks)
    assert torch.equal(encode(KERNELS, blocks), data), "the kernels write other bytes"
    is_held = [TORCH.holds(row, blocks.shape[1:]) for row in data.numpy()]
    for codec in (TORCH, KERNELS):
        decoded = torch.zeros_like(blocks)
        codec.decode(data, decoded)
        assert torch.equal(bits_of(decoded)[is_held], bits_of(blocks)[is_held])
    return is_held


def fits(blocks: Tensor) -> list[bool]:
    """Which blocks should be held, by the definition: few exponents out of the 15 below each unit's base, but zero."""
    unit = ExactUnit.of(blocks.shape[1:])
    exponents = (bits_of(blocks).int() >> 7 & 0xFF).view(len(blocks), -1, unit.num_elements)
    base = exponents.where(exponents < 255, 0).amax(-1, keepdim=True)
    is_exception = (exponents > base) | ((exponents != 0) & (exponents < base - 14))
    return (is_exception.sum(-1) <= unit.num_exceptions).all(-1).tolist()  # type: ignore[no-any-return]


@given(
    shape=SHAPES,
    base=st.integers(0, 255),
    spread=st.integers(0, 40),
    share_of_others=st.sampled_from([0.0, 0.01, 0.03, 1.0]),
    seed=st.integers(0, 2**20),
)
def test_every_bit_comes_back_or_the_block_is_not_held(
    shape: tuple[int, ...], base: int, spread: int, share_of_others: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = (3, math.prod(shape))
    near = (base - torch.randint(0, spread + 1, size, generator=generator)).clamp(0, 255)
    anything = torch.randint(0, 256, size, generator=generator)
    exponents = near.where(torch.rand(size, generator=generator) >= share_of_others, anything)
    sign_and_mantissa = torch.randint(0, 1 << 16, size, generator=generator) & 0x807F
    blocks = from_bits(sign_and_mantissa | exponents << 7, shape)
    assert held(blocks) == fits(blocks)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x807F, 0x8000, 0x0000, 0x7F7F])
def test_numbers_at_the_edges_stay_as_they_are(bits: int) -> None:
    """Infinities, NaNs, denormals, zeros of both signs. Beside the largest number, others do not fit."""
    blocks = torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    bits_of(blocks).view(-1)[[0, 511, 512, 1023, 2000]] = from_bits(torch.tensor(bits), ()).view(torch.int16)
    assert held(blocks) == [bits != 0x7F7F]
    assert held(from_bits(torch.full((1, math.prod(SHAPE)), bits), SHAPE)) == [(bits & 0x7F80) != 0x7F80]


def test_a_block_is_held_up_to_the_last_exception() -> None:
    blocks = torch.ones(3, *SHAPE, dtype=torch.bfloat16)
    for number, block in enumerate(blocks, NUM_EXCEPTIONS - 1):
        block[1, 2, 0].view(-1)[torch.randperm(1024, generator=torch.Generator().manual_seed(number))[:number]] = 2e-5
    assert held(blocks) == [True, True, False]


@given(shape=SHAPES, seed=st.integers(0, 2**20), shared=st.sampled_from([None, 0, 15, 16, 254, 255]))
def test_any_bytes_decode_to_some_numbers_and_touch_nothing_else(
    shape: tuple[int, ...], seed: int, shared: int | None
) -> None:
    num_bytes = TORCH.encoded_bytes(shape, torch.bfloat16)
    data = torch.randint(0, 256, (2, num_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    unit = ExactUnit.of(shape)
    if shared is not None:
        data[:, :: sum(unit.sizes)] = shared  # the number of exceptions
    pools = [torch.full((4, *shape), -3.0, dtype=torch.bfloat16) for _ in range(2)]
    KERNELS.scatter(data, pools[:1], torch.tensor([2, 1]))
    KERNELS.decode(data, pools[1][1:3])
    assert torch.equal(bits_of(pools[0][[2, 1]]), bits_of(pools[1][1:3]))
    for pool in pools:
        assert (pool[[0, 3]] == -3).all()
    TORCH.decode(data, pools[1][1:3])
    TORCH.holds(data[0].numpy(), shape)


@pytest.mark.parametrize("blocks", [[4], [-1], [0, 1]])
def test_ids_that_are_no_blocks_of_the_pool_are_refused(blocks: list[int]) -> None:
    pool = torch.zeros(4, *SHAPE, dtype=torch.bfloat16)
    data = torch.zeros(1, TORCH.encoded_bytes(SHAPE, torch.bfloat16), dtype=torch.uint8)
    for call in (KERNELS.gather, lambda shards, ids, row: KERNELS.scatter(row, shards, ids)):
        with pytest.raises(AssertionError, match="block"):
            call([pool], torch.tensor(blocks), data)


@pytest.mark.parametrize(
    "shape", [(3, 30, 2, 16, 64), (8, 28, 2, 16, 128), (2, 26, 2, 16, 256), (1, 27, 2, 64, 576), (4, 2, 2, 16, 80)]
)
def test_blocks_of_ordinary_shapes_shrink_by_more_than_a_fifth(shape: tuple[int, ...]) -> None:
    assert 2 * math.prod(shape) / TORCH.encoded_bytes(shape, torch.bfloat16) >= 1.28


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=rf"'exact' is for KV in bfloat16, and this model's is in {dtype}; use raw"):
        codec_for("exact", torch.device("cpu")).encoded_bytes(SHAPE, dtype)


def test_a_cpu_has_kernels_for_it_and_nothing_else_changes() -> None:
    assert isinstance(codec_for("exact", torch.device("cpu")), CpuExactCodec)
    assert type(codec_for("exact", torch.device("cuda"))) is ExactCodec
    assert type(codec_for("int8", torch.device("cpu"))) is type(create_codec("int8"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kv_of_a_family_is_held(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", SERVED[family])
    engine = Engine(EngineConfig(model=str(folder), dtype="bfloat16", device="cpu", pool_bytes=8 << 20, max_num_seqs=2))
    generate(engine, [make_prompt(300)], max_tokens=30)
    blocks = engine.kv.read(list(engine.pool._index.block_of.values()))
    assert len(blocks) >= 20
    assert all(held(blocks))
    engine.close()
