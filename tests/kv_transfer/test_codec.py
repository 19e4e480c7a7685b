from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tandem.kv_transfer.codec import _SLAB_BYTES, CODEC_NAMES, Codec, create_codec
from tandem.protocol.errors import ConfigError
from tandem.worker.kv.cpu_codec import CpuExactCodec

SHAPE = (2, 3, 2, 4, 6)  # [num_kv_heads, num_layers, 2, block_size, head_dim]
LOSSY = [name for name in CODEC_NAMES if name not in ("raw", "exact")]
DTYPES = [torch.bfloat16, torch.float32]

CODECS = [*(create_codec(name) for name in CODEC_NAMES), CpuExactCodec()]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=[*CODEC_NAMES, "exact by kernels"])
every_lossy_codec = pytest.mark.parametrize("codec", [create_codec(name) for name in LOSSY], ids=LOSSY)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# `exact` is for bfloat16 alone.
PAIRS = [(codec, dtype) for codec in CODECS for dtype in DTYPES if codec.name != "exact" or dtype is torch.bfloat16]
pair_ids = [f"{type(codec).__name__}-{dtype}" for codec, dtype in PAIRS]
every_codec_and_dtype = pytest.mark.parametrize(("codec", "dtype"), PAIRS, ids=pair_ids)


def make_blocks(
    num_blocks: int = 5,
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    spread: float = 1.0,
) -> Tensor:
    """Random blocks in which some channels are far from zero, as in keys."""
    generator = torch.Generator().manual_seed(seed)
    channels = torch.randn(*shape[:3], 1, shape[4], generator=generator).pow(3) * 10
    return ((torch.randn(num_blocks, *shape, generator=generator) + channels) * spread).to(dtype)


def encode(codec: Codec, blocks: Tensor) -> Tensor:
    data = torch.full((len(blocks), codec.encoded_bytes(blocks.shape[1:], blocks.dtype)), 0xA5, dtype=torch.uint8)
    codec.encode(blocks, data)
    return data


def round_trip(codec: Codec, blocks: Tensor) -> Tensor:
    out = torch.full(blocks.shape, 7.0, dtype=blocks.dtype)
    codec.decode(encode(codec, blocks), out)
    return out


def largest_error(name: str, x: Tensor) -> Tensor:
    """Half a step at each element of float32 blocks, by the codec's description; float64."""
    x = x.double()
    magnitude = x.abs().amax(-1, keepdim=True)
    if name == "int8":
        return (magnitude / 127 / 2).expand_as(x)
    if name == "fp8":  # 4 significant bits; below the smallest normal number, 2^-6, the step is 2^-9
        return torch.maximum(x.abs() * 2**-4, magnitude / 448 * 2**-10)
    bounds = torch.empty_like(x)
    for kind, dim in ((0, -2), (1, -1)):
        high, low = x[..., kind, :, :].amax(dim, keepdim=True), x[..., kind, :, :].amin(dim, keepdim=True)
        bounds[..., kind, :, :] = ((high - low) / 2 + ((high + low) / 2).abs() * 2**-8) / 7.5 / 2
    return bounds


def assert_within_bounds(codec: Codec, blocks: Tensor) -> None:
    decoded = round_trip(codec, blocks)
    x = blocks.float()
    # The scale is rounded to 8 bits, the result to the blocks' dtype, and numbers below float32's normal ones are lost.
    rounding = x.abs().double() * (2**-8 if blocks.dtype is torch.bfloat16 else 2**-20)
    bound = largest_error(codec.name, x) * (1 + 2**-6) + rounding + 2.0**-118
    excess = (decoded.double() - x.double()).abs() - bound
    worst = int(excess.argmax())
    assert excess.max() <= 0, f"{blocks.flatten()[worst]} became {decoded.flatten()[worst]}"


@both_dtypes
def test_raw_keeps_every_bit_of_any_pattern(dtype: torch.dtype) -> None:
    num_bytes = 4 * math.prod(SHAPE) * dtype.itemsize
    patterns = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    blocks = patterns.view(dtype).view(4, *SHAPE)
    assert blocks.isnan().any()
    decoded = round_trip(create_codec("raw"), blocks)
    assert torch.equal(decoded.view(-1).view(torch.uint8), patterns)


@pytest.mark.parametrize("name", LOSSY)
@given(
    num_blocks=st.integers(1, 3),
    shape=st.tuples(
        st.integers(1, 3), st.integers(1, 3), st.just(2), st.sampled_from([1, 2, 16]), st.integers(1, 9)
    ),  # as SHAPE
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-40, 36),
    seed=st.integers(0, 2**20),
)
def test_error_is_at_most_half_a_step(
    name: str, num_blocks: int, shape: tuple[int, ...], dtype: torch.dtype, exponent: int, seed: int
) -> None:
    blocks = make_blocks(num_blocks, shape, dtype, seed=seed)
    blocks *= 10.0**exponent / blocks.abs().max().item()
    assert_within_bounds(create_codec(name), blocks)


@every_lossy_codec
def test_the_largest_element_never_wraps_around(codec: Codec) -> None:
    largest = torch.linspace(1, 4, 4096)[:, None, None, None, None, None]
    blocks = largest * torch.linspace(-1, 1, 5).expand(1, 1, 1, 2, 5, 5)
    assert_within_bounds(codec, blocks.contiguous())


def test_the_layout_of_what_tiers_keep() -> None:
    # One layer, two tokens, one head of three. Tiers outlive processes: a change here needs another codec name.
    keys, values = [[0.0, -16.0, 1.0], [15.0, -16.0, 4.0]], [[127.0, -1.0, 0.0], [63.5, 0.0, 0.0]]
    blocks = torch.tensor([[keys, values]]).view(1, 1, 1, 2, 2, 3)
    one, half, eighth = [0x80, 0x3F], [0x00, 0x3F], [0x01, 0x3E]  # bfloat16, little endian; the last is 16 / 127
    int8 = encode(create_codec("int8"), blocks)[0].tolist()
    assert int8[:6] == [0, 129, 8, 119, 129, 32]
    assert int8[6:12] == [127, 255, 0, 127, 0, 0]
    assert int8[12:] == [*eighth, *eighth, *one, *half]
    fp8 = encode(create_codec("fp8"), blocks)[0].tolist()
    assert fp8[:6] == [0x00, 0xFE, 0x5E, 0x7D, 0xFE, 0x6E]
    int4 = encode(create_codec("int4"), blocks)[0].tolist()
    assert int4[:4] == [0x00, 0x08, 0xFF, 0x08]  # tokens: channels 0 and 2, then 1
    assert int4[4:10] == [*one, 0, 0, 0x4D, 0x3E]  # scales of the three channels: 15 / 15, 0, 3 / 15
    assert int4[10:16] == [0xF0, 0x40, 0x80, 0xC1, 0x20, 0x40]  # centres 7.5, -16, 2.5


def test_every_fp8_code_decodes_to_its_number() -> None:
    codec, shape = create_codec("fp8"), (1, 1, 2, 1, 128)
    codes = torch.arange(256, dtype=torch.uint8)
    scales = torch.tensor([2.0, 2.0], dtype=torch.bfloat16).view(torch.uint8)
    out = torch.empty(1, *shape)
    codec.decode(torch.cat([codes, scales])[None], out)
    numbers = codes.view(torch.float8_e4m3fn).float()
    is_number = ~numbers.isnan()
    assert is_number.sum() == 254
    assert torch.equal(out.flatten()[is_number], 2 * numbers[is_number])


@every_lossy_codec
@both_dtypes
@pytest.mark.parametrize("magnitude", [3e38, 1e30, 1e-30, 1e-37, 1e-38, 1e-39, 1e-45, 0.0])
def test_finite_stays_finite_at_both_ends_of_the_range(codec: Codec, dtype: torch.dtype, magnitude: float) -> None:
    signs = make_blocks(3).sign() * torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(1)).round()
    blocks = (signs * magnitude).to(dtype)
    assert round_trip(codec, blocks).isfinite().all()
    assert_within_bounds(codec, blocks)


@every_lossy_codec
@both_dtypes
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_no_number_shows_in_all_that_shares_its_scale(codec: Codec, dtype: torch.dtype, bad: float) -> None:
    blocks = make_blocks(2, dtype=dtype)
    expected = round_trip(codec, blocks)
    blocks[1, 1, 0, 0, 3, 2] = bad  # a key
    blocks[0, 0, 2, 1, 0, 4] = bad  # a value
    shared = torch.zeros(blocks.shape, dtype=torch.bool)
    if codec.name == "int4":
        shared[1, 1, 0, 0, :, 2] = True
    else:
        shared[1, 1, 0, 0, 3, :] = True
    shared[0, 0, 2, 1, 0, :] = True
    decoded = round_trip(codec, blocks)
    assert not decoded[shared].isfinite().any()
    assert torch.equal(decoded[~shared], expected[~shared])


@every_codec_and_dtype
@pytest.mark.parametrize("layout", ["every second block", "permuted", "every second element"])
def test_strides_of_blocks_do_not_matter(codec: Codec, dtype: torch.dtype, layout: str) -> None:
    blocks = make_blocks(4, dtype=dtype)
    pool = torch.full((8, *SHAPE[:-1], 2 * SHAPE[-1]), -3.0, dtype=dtype)
    strided = {
        "every second block": pool[::2, ..., : SHAPE[-1]],
        "permuted": pool.transpose(2, 4).contiguous().transpose(2, 4)[:4, ..., : SHAPE[-1]],
        "every second element": pool[:4, ..., ::2],
    }[layout]
    strided.copy_(blocks)
    data = encode(codec, strided)
    assert torch.equal(data, encode(codec, blocks))
    assert torch.equal(strided, blocks), "the input was changed"
    strided.fill_(0)
    codec.decode(data, strided)
    assert torch.equal(strided, round_trip(codec, blocks))


@every_codec_and_dtype
@pytest.mark.parametrize(("offset", "gap"), [(0, 0), (1, 0), (3, 5), (4, 8), (2, 1)])
def test_encoded_rows_may_lie_anywhere(codec: Codec, dtype: torch.dtype, offset: int, gap: int) -> None:
    blocks = make_blocks(3, dtype=dtype)
    expected = encode(codec, blocks)
    size = expected.shape[1]
    buffer = torch.full((offset + 3 * (size + gap) + 9,), 0x5A, dtype=torch.uint8)
    rows = buffer.as_strided((3, size), (size + gap, 1), offset)
    codec.encode(blocks, rows)
    assert torch.equal(rows, expected), "some byte was not written, or wrongly"
    pool = torch.full((5, *SHAPE), -3.0, dtype=dtype)
    codec.decode(rows, pool[1:4])
    assert torch.equal(pool[1:4], round_trip(codec, blocks))
    assert (pool[[0, 4]] == -3).all()
    rows.fill_(0x5A)
    assert (buffer == 0x5A).all()


@every_codec
@pytest.mark.parametrize("blocks_of_slab", [0, 1, 3, 7, 8])
def test_a_block_alone_has_the_same_bytes(codec: Codec, blocks_of_slab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = make_blocks(7, dtype=torch.bfloat16)
    monkeypatch.setitem(_SLAB_BYTES, "cpu", blocks_of_slab * math.prod(SHAPE) * 4)
    together = encode(codec, blocks)
    assert torch.equal(together, torch.cat([encode(codec, block[None]) for block in blocks]))
    decoded = round_trip(codec, blocks)
    assert torch.equal(decoded, torch.cat([round_trip(codec, block[None]) for block in blocks]))


@every_codec
def test_no_blocks_need_no_work(codec: Codec) -> None:
    blocks = make_blocks(0, dtype=torch.bfloat16)
    assert encode(codec, blocks).shape == (0, codec.encoded_bytes(SHAPE, torch.bfloat16))
    assert round_trip(codec, blocks).shape == (0, *SHAPE)


@every_codec
def test_buffers_of_another_shape_are_refused(codec: Codec) -> None:
    blocks = make_blocks(1, dtype=torch.bfloat16)
    data = encode(codec, blocks)
    for wrong in (data.expand(2, -1), data[:, :-1], data.view(torch.int8)):
        with pytest.raises(AssertionError, match=codec.name):
            codec.encode(blocks, wrong)
        with pytest.raises(AssertionError, match=codec.name):
            codec.decode(wrong, blocks)


def test_an_unknown_codec_is_a_config_error_that_names_the_known() -> None:
    with pytest.raises(ConfigError, match=r"codec='int3' .*raw, exact, fp8, int8, int4"):
        create_codec("int3")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_codec_and_dtype
def test_a_gpu_decodes_what_a_cpu_encoded_to_the_same_numbers(codec: Codec, dtype: torch.dtype) -> None:
    if isinstance(codec, CpuExactCodec):
        pytest.skip("its kernels are a CPU's")
    blocks = make_blocks(4, dtype=dtype)
    out = torch.empty_like(blocks, device="cuda")
    codec.decode(encode(codec, blocks).cuda(), out)
    torch.testing.assert_close(out.cpu(), round_trip(codec, blocks), rtol=2**-7, atol=0)
    data = torch.empty_like(encode(codec, blocks), device="cuda")
    codec.encode(blocks.cuda(), data)
    decoded = torch.empty_like(blocks)
    codec.decode(data.cpu(), decoded)
    error = (decoded.double() - blocks.double()).abs()
    assert (error <= largest_error(codec.name, blocks.float()) * 1.02 + blocks.abs().double() * 2**-7).all()


@every_codec_and_dtype
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_gather_and_scatter_are_encode_and_decode_of_a_pool(codec: Codec, dtype: torch.dtype, num_shards: int) -> None:
    pool = torch.randn(9, 4, 2, 2, 3, 8).to(dtype)
    shards = [part.contiguous() for part in pool.chunk(num_shards, dim=1)]
    blocks = torch.tensor([7, 0, 4])
    encoded, gathered = (torch.empty(3, codec.encoded_bytes(pool.shape[1:], dtype), dtype=torch.uint8) for _ in "12")
    codec.encode(pool[blocks], encoded)
    codec.gather(shards, blocks, gathered)
    assert torch.equal(gathered, encoded)
    decoded = torch.empty_like(pool[blocks])
    codec.decode(encoded, decoded)
    targets = [torch.zeros_like(shard) for shard in shards]
    codec.scatter(gathered, targets, torch.tensor([1, 8, 3]))
    target = torch.cat(targets, dim=1)
    assert torch.equal(target[[1, 8, 3]], decoded)
    assert not target[[0, 2, 4, 5, 6, 7]].any()


def test_blocks_in_fp8_stay_as_they_are() -> None:
    shards = [make_blocks(6, (2, 2, 2, 4, 8), seed=seed).to(torch.float8_e4m3fn) for seed in (0, 1)]
    codec = create_codec("raw")
    for pool in ([shards[0]], shards):
        targets = [torch.zeros_like(shard) for shard in pool]
        data = torch.empty(3, sum(shard[0].nbytes for shard in pool), dtype=torch.uint8)
        codec.gather(pool, torch.tensor([4, 0, 5]), data)
        codec.scatter(data, targets, torch.tensor([1, 2, 3]))
        for shard, target in zip(pool, targets, strict=True):
            assert torch.equal(target[1:4].view(torch.uint8), shard[[4, 0, 5]].view(torch.uint8))


@pytest.mark.parametrize("name", ["exact", "fp8", "int8", "int4"])
def test_other_codecs_refuse_blocks_in_fp8(name: str) -> None:
    with pytest.raises(ConfigError, match=f"codec '{name}' is for KV in bfloat16.* torch.float8_e4m3fn; use raw"):
        create_codec(name).encoded_bytes((2, 2, 2, 4, 8), torch.float8_e4m3fn)
