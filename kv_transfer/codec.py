"""Codecs: the format of blocks outside the pool, unchanged or in fewer bits where room or bandwidth is scarce.

A codec knows shapes and dtypes, but neither tiers nor digests. Every encoded block has the same number of bytes, so
that a tier is an array of slots. All codecs are torch operations and run on the device of their tensors.

    raw   [elements, as they are]
    exact [see `ExactCodec`]                      bfloat16 alone: the same bits in 12.4 bits an element
    fp8   [e4m3 elements]   [scales]              one scale per head, layer, K or V, and token
    int8  [int8 elements]   [scales]              the same
    int4  [element pairs]   [scales] [centres]    keys: per head, layer and channel; values: per head, layer and token

Scales and centres are bfloat16, which has the range of float32. Elements are quantised with the rounded scales, so that
rounding them costs almost no accuracy.

The lossy codecs keep zeros zero and turn finite numbers up to 3e38 into finite numbers. An infinity or a NaN stays
visible: all elements that share its scale come back as infinity or NaN, and no others.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from tandem.kv_transfer.tiers.base import Block
from tandem.protocol.errors import ConfigError

_PARAMETER = torch.bfloat16
_SMALLEST_NORMAL = 2.0**-126  # a subnormal scale's reciprocal may be infinite
# Blocks are processed in float32 slabs of this size, or one by one if they are larger. On a CPU a slab should fit the
# cache: 32 MiB take up to twice as long.
_SLAB_BYTES = {"cpu": 3 << 20, "cuda": 256 << 20}

# Of the codec `exact`:
_UNIT_ELEMENTS, _ELEMENTS_PER_EXCEPTION = 4096, 64
_ZERO = 15  # the code of exponent 0
_TOO_MANY = 0xFF  # in the place of the number of exceptions


class Codec(ABC):
    """Turns blocks into a fixed number of bytes and back.

    A block is [num_kv_heads, num_layers, 2, block_size, head_dim] in bfloat16 or float32; `n` of them may have any
    strides. A pool is one or more shards, each with some of the heads of every block. Encoded blocks are rows of uint8,
    each contiguous and at any address. Inputs are never changed. `out` is on the device of the input and must not
    overlap it. Calls are stateless: any thread may make them.
    """

    name: str

    @abstractmethod
    def encoded_bytes(self, block_shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of one encoded block."""

    @abstractmethod
    def encode(self, blocks: Tensor, out: Tensor) -> None:
        """Write blocks [n, *block_shape] to out [n, encoded_bytes], uint8."""

    @abstractmethod
    def decode(self, data: Tensor, out: Tensor) -> None:
        """Decode data [n, encoded_bytes], uint8, to out [n, *block_shape], in the shape it was encoded from.

        NOTE: the bytes do not show whether this codec wrote them; the tier's checksum must.
        """

    def holds(self, encoded: Block | Tensor, block_shape: Sequence[int]) -> bool:
        """Whether all blocks fitted into these encoded ones [..., encoded_bytes]. If not, they cannot be decoded."""
        return True

    def gather(self, shards: Sequence[Tensor], block_ids: Tensor, out: Tensor) -> None:
        """Encode blocks `block_ids` [n] of a pool to out [n, encoded_bytes].

        shards: contiguous, each [num_blocks, heads of this shard, ...]

        NOTE: `out` (uint8) must be contiguous and aligned for the pool's dtype, unlike that of `encode`.
        """
        parts = [shard[block_ids.to(shard.device)].to(out.device) for shard in shards]
        self.encode(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), out)

    def scatter(self, data: Tensor, shards: Sequence[Tensor], block_ids: Tensor) -> None:
        """Decode data [n, encoded_bytes], uint8, into blocks `block_ids` [n] of a pool.

        Work that is launched later on the device of `data` sees the blocks of all shards.
        """
        num_heads, dtype = sum(shard.shape[1] for shard in shards), shards[0].dtype
        content = torch.empty(len(block_ids), num_heads, *shards[0].shape[2:], dtype=dtype, device=data.device)
        self.decode(data, content)
        for shard, part in zip(shards, content.split([shard.shape[1] for shard in shards], dim=1), strict=True):  # type: ignore[no-untyped-call]
            shard[block_ids.to(shard.device)] = part.to(shard.device)
            _order_behind(shard.device, data.device)

    def _check(self, blocks: Tensor, data: Tensor) -> None:
        # copy_ would silently broadcast a wrong shape
        expected = (blocks.shape[0], self.encoded_bytes(blocks.shape[1:], blocks.dtype))
        assert data.shape == expected, f"{self.name}: encoded blocks are {tuple(data.shape)}, expected {expected}"
        assert data.dtype == torch.uint8, f"{self.name}: encoded blocks are {data.dtype}, expected uint8"
        assert data.device == blocks.device, f"{self.name}: {data.device} is not {blocks.device}"


class _RawCodec(Codec):
    """Bit for bit."""

    name = "raw"

    def encoded_bytes(self, block_shape: Sequence[int], dtype: torch.dtype) -> int:
        return math.prod(block_shape) * dtype.itemsize

    def encode(self, blocks: Tensor, out: Tensor) -> None:
        self._check(blocks, out)
        out.copy_(_as_bytes(blocks))

    def decode(self, data: Tensor, out: Tensor) -> None:
        self._check(out, data)
        out.copy_(_from_bytes(data, out.dtype).view(out.shape))

    @override
    def gather(self, shards: Sequence[Tensor], block_ids: Tensor, out: Tensor) -> None:
        shards = _movable(shards)
        if len(shards) > 1:
            super().gather(shards, block_ids, out)
            return
        rows = shards[0].flatten(1)
        torch.index_select(rows, 0, block_ids, out=out.view(rows.dtype))  # one pass over memory; encode takes two

    @override
    def scatter(self, data: Tensor, shards: Sequence[Tensor], block_ids: Tensor) -> None:
        shards = _movable(shards)
        if len(shards) > 1:
            super().scatter(data, shards, block_ids)
            return
        shards[0].flatten(1).index_copy_(0, block_ids, _from_bytes(data, shards[0].dtype))


class ExactUnit(NamedTuple):
    """A run of elements that share a base: whole tokens of one head, layer, and K or V."""

    num_elements: int
    num_exceptions: int  # at most

    @classmethod
    def of(cls, block_shape: Sequence[int]) -> ExactUnit:
        """The unit of blocks of this shape."""
        block_size, head_dim = block_shape[-2:]
        fits = [n for n in range(1, block_size + 1) if block_size % n == 0 and n * head_dim <= _UNIT_ELEMENTS]
        num_elements = max(fits, default=1) * head_dim
        return cls(num_elements, min(-(-num_elements // _ELEMENTS_PER_EXCEPTION), _TOO_MANY - 1))

    def num_in(self, block_shape: Sequence[int]) -> int:
        """Units in a block."""
        return math.prod(block_shape) // self.num_elements

    @property
    def sizes(self) -> list[int]:
        """Bytes of each part of an encoded unit."""
        return [1, 1, self.num_elements, -(-self.num_elements // 2), 2 * self.num_exceptions, self.num_exceptions]


class ExactCodec(Codec):
    """Every bit of bfloat16 in 77 % of the bytes: exponents of neighbours differ by little.

    A block is units, one after the other, each of

        [number of exceptions] [base] [signs and mantissas] [pairs of codes] [places] [exponents]

    An element is a byte of its sign and mantissa and a code of four bits: base - exponent, or 15 if the exponent is 0
    (zeros and denormals). The base is the largest exponent of a finite number in the unit. An element with any other
    exponent is an exception: its place takes two bytes, and its exponent one. Code i is in the low bits of byte i in
    the first half of a unit, and above them in the second.

    Units have room for one exception in 64 elements, where KV has one in 2,000. A block that needs more is not held.
    """

    name = "exact"

    def encoded_bytes(self, block_shape: Sequence[int], dtype: torch.dtype) -> int:
        """As `Codec.encoded_bytes`. Raises ConfigError for other types than bfloat16."""
        if dtype is not torch.bfloat16:
            raise ConfigError(f"codec 'exact' is for KV in bfloat16, and this model's is in {dtype}; use raw")
        unit = ExactUnit.of(block_shape)
        return unit.num_in(block_shape) * sum(unit.sizes)

    @override
    def holds(self, encoded: Block | Tensor, block_shape: Sequence[int]) -> bool:
        return bool((encoded[..., :: sum(ExactUnit.of(block_shape).sizes)] != _TOO_MANY).all())

    @override
    def encode(self, blocks: Tensor, out: Tensor) -> None:
        self._check(blocks, out)
        unit = ExactUnit.of(blocks.shape[1:])
        bits = blocks.reshape(len(blocks), unit.num_in(blocks.shape[1:]), unit.num_elements)
        bits = bits.view(torch.int16).int() & 0xFFFF
        exponents = bits >> 7 & 0xFF
        base = exponents.where(exponents < 0xFF, 0).amax(-1, keepdim=True)
        codes = base - exponents
        codes = codes.where((codes >= 0) & (codes < _ZERO), _ZERO)
        exceptions = _exceptions(exponents, (codes == _ZERO) & (exponents != 0), unit)
        num_pairs = unit.num_elements // 2
        pairs = codes[..., : unit.num_elements - num_pairs].clone()
        pairs[..., :num_pairs] |= codes[..., unit.num_elements - num_pairs :] << 4
        parts = (exceptions[0], base, bits >> 8 & 0x80 | bits & 0x7F, pairs, *exceptions[1:])
        out.copy_(torch.cat([part.to(torch.uint8) for part in parts], dim=-1).flatten(1))

    @override
    def decode(self, data: Tensor, out: Tensor) -> None:
        self._check(out, data)
        unit = ExactUnit.of(out.shape[1:])
        units = data.reshape(len(data), unit.num_in(out.shape[1:]), sum(unit.sizes)).int()
        count, base, bits, pairs, places, kept = units.split_with_sizes(unit.sizes, dim=-1)
        codes = torch.cat((pairs & 0xF, pairs >> 4), dim=-1)[..., : unit.num_elements]
        exponents = (base - codes & 0xFF).where(codes != _ZERO, 0)
        places = places[..., 0::2] | places[..., 1::2] << 8
        is_used = (torch.arange(places.shape[-1], device=data.device) < count) & (places < unit.num_elements)
        # Unused places are of one more element behind the others.
        exponents = torch.cat((exponents, torch.zeros_like(base)), dim=-1)
        exponents.scatter_(-1, places.where(is_used, unit.num_elements).long(), kept)
        whole = (bits & 0x80) << 8 | exponents[..., : unit.num_elements] << 7 | bits & 0x7F
        out.copy_(whole.to(torch.int16).view(torch.bfloat16).view(out.shape))


def _exceptions(exponents: Tensor, is_exception: Tensor, unit: ExactUnit) -> tuple[Tensor, Tensor, Tensor]:
    """Each unit's number of exceptions, their places (two bytes each) and exponents: a pair's, then the next one's."""
    half = -(-unit.num_elements // 2)
    elements = torch.arange(unit.num_elements, device=exponents.device)
    order = (2 * (elements % half) + elements // half).where(is_exception, 2 * half)
    first = order.topk(unit.num_exceptions, largest=False).values
    is_used = first < 2 * half
    places = (first // 2 + first % 2 * half).where(is_used, 0)
    kept = exponents.gather(-1, places).where(is_used, 0)
    count = is_exception.sum(-1, keepdim=True)
    count = count.where(count <= unit.num_exceptions, _TOO_MANY)
    return count, torch.stack((places & 0xFF, places >> 8), dim=-1).flatten(-2), kept


class _LossyCodec(Codec):
    """Processes slabs of blocks in one float32 buffer.

    Otherwise each slab's temporaries may be fresh pages from the system, and int8 took four times as long.
    """

    def encoded_bytes(self, block_shape: Sequence[int], dtype: torch.dtype) -> int:
        """As `Codec.encoded_bytes`. Raises ConfigError for KV in 8 bits."""
        if dtype.itemsize == 1:
            raise ConfigError(f"codec {self.name!r} is for KV in bfloat16 or float32, and this is {dtype}; use raw")
        return sum(self._layout(block_shape))

    def encode(self, blocks: Tensor, out: Tensor) -> None:
        self._check(blocks, out)
        for slab, work in _slabs(blocks):
            self._encode(work.copy_(blocks[slab]), out[slab])

    def decode(self, data: Tensor, out: Tensor) -> None:
        self._check(out, data)
        for slab, work in _slabs(out):
            self._decode(data[slab], work)
            out[slab].copy_(work)

    @abstractmethod
    def _encode(self, work: Tensor, out: Tensor) -> None:
        """Encode the blocks in `work`, float32, which may be overwritten."""

    @abstractmethod
    def _decode(self, data: Tensor, work: Tensor) -> None:
        """Decode to `work`, float32."""

    @staticmethod
    @abstractmethod
    def _layout(block_shape: Sequence[int]) -> list[int]:
        """Bytes of each part of an encoded block."""


class _ByteCodec(_LossyCodec):
    """One byte per element, with a symmetric scale for each head's vector of each token."""

    largest: float

    def _encode(self, work: Tensor, out: Tensor) -> None:
        elements, scale_bytes = out.split_with_sizes(self._layout(work.shape[1:]), dim=1)
        scales = _scales(work.amax(-1, keepdim=True), -work.amin(-1, keepdim=True), self.largest)
        self._quantise(work.mul_(_reciprocal(scales)), elements.view(work.shape))
        scale_bytes.copy_(_as_bytes(scales))

    def _decode(self, data: Tensor, work: Tensor) -> None:
        elements, scale_bytes = data.split_with_sizes(self._layout(work.shape[1:]), dim=1)
        self._widen(elements.view(work.shape), work)
        work.mul_(_from_bytes(scale_bytes, _PARAMETER).view(*work.shape[:-1], 1))

    @staticmethod
    def _layout(block_shape: Sequence[int]) -> list[int]:
        """Bytes of elements and scales."""
        return [math.prod(block_shape), math.prod(block_shape[:-1]) * _PARAMETER.itemsize]

    @abstractmethod
    def _quantise(self, scaled: Tensor, elements: Tensor) -> None:
        """Write numbers of magnitude up to `largest` to `elements`, uint8; `scaled` may be overwritten."""

    @abstractmethod
    def _widen(self, elements: Tensor, work: Tensor) -> None:
        """Convert the output of `_quantise` to `work`, float32."""


class _Fp8Codec(_ByteCodec):
    """e4m3: 3 bits of mantissa.

    One scale per head and token has 5 to 20 % less error than one per head and block, for 3 % more bytes.
    """

    name = "fp8"
    largest = 448.0

    def _quantise(self, scaled: Tensor, elements: Tensor) -> None:
        elements.view(torch.float8_e4m3fn).copy_(scaled)

    def _widen(self, elements: Tensor, work: Tensor) -> None:
        # Sign, exponent and mantissa moved to float32's positions are the number times 2^-120, subnormal or not. This
        # is four times as fast as torch's own conversion on a CPU. The shift leaves copies of the sign in the exponent,
        # so the mask is 0x87F00000.
        bits = work.view(torch.int32).copy_(elements.view(torch.int8))
        bits.bitwise_left_shift_(20).bitwise_and_(-0x78100000)
        work.mul_(2.0**120)


class _Int8Codec(_ByteCodec):
    """Equal steps from -127 to 127: half to a third of fp8's error in the same bytes."""

    name = "int8"
    largest = 127.0

    def _quantise(self, scaled: Tensor, elements: Tensor) -> None:
        elements.view(torch.int8).copy_(scaled.round_())

    def _widen(self, elements: Tensor, work: Tensor) -> None:
        work.copy_(elements.view(torch.int8))


class _Int4Codec(_LossyCodec):
    """16 equal steps around a centre, two elements per byte; keys by channel, values by token, as KIVI does.

    Key channels are far from zero in every token: with one scale per token their error is four times as large.
    NOTE: so a key shares its scale with the other slots of its block, including those that hold no token.
    """

    name = "int4"

    def _encode(self, work: Tensor, out: Tensor) -> None:
        regions = out.split_with_sizes(self._layout(work.shape[1:]), dim=1)
        for kind, dim in enumerate(_INT4_SHARED_DIMS):
            elements, scale_bytes, centre_bytes = regions[3 * kind : 3 * kind + 3]
            part = work[:, :, :, kind]
            high, low = part.amax(dim, keepdim=True), part.amin(dim, keepdim=True)
            centres = (high / 2 + low / 2).to(_PARAMETER)
            scales = _scales(high - centres, centres - low, 7.5)
            _pack(part.sub_(centres).mul_(_reciprocal(scales)).add_(7.5).round_(), elements)
            scale_bytes.copy_(_as_bytes(scales))
            centre_bytes.copy_(_as_bytes(centres))

    def _decode(self, data: Tensor, work: Tensor) -> None:
        regions = data.split_with_sizes(self._layout(work.shape[1:]), dim=1)
        for kind, dim in enumerate(_INT4_SHARED_DIMS):
            elements, scale_bytes, centre_bytes = regions[3 * kind : 3 * kind + 3]
            part = work[:, :, :, kind]
            shared = part.select(dim, 0).unsqueeze(dim).shape
            scales = _from_bytes(scale_bytes, _PARAMETER).view(shared)
            centres = _from_bytes(centre_bytes, _PARAMETER).view(shared)
            _unpack(elements, part)
            part.sub_(7.5).mul_(scales).add_(centres)

    @staticmethod
    def _layout(block_shape: Sequence[int]) -> list[int]:
        """Bytes of elements, scales and centres of the keys, then of the values."""
        num_kv_heads, num_layers, _, block_size, head_dim = block_shape
        elements = num_layers * block_size * num_kv_heads * -(-head_dim // 2)
        of_keys = num_layers * num_kv_heads * head_dim * _PARAMETER.itemsize
        of_values = num_layers * block_size * num_kv_heads * _PARAMETER.itemsize
        return [elements, of_keys, of_keys, elements, of_values, of_values]


# The dimension of [..., block_size, head_dim] that shares a scale: for keys, for values.
_INT4_SHARED_DIMS = (-2, -1)


def _pack(nibbles: Tensor, out: Tensor) -> None:
    """Write nibbles [n, ..., D], float32, to out [n, bytes]: the first half of D in the low bits, the rest above it."""
    low, high = nibbles.to(torch.uint8).tensor_split([-(-nibbles.shape[-1] // 2)], dim=-1)
    packed = out.view(low.shape)
    # A NaN may have become any byte; mask it so that it does not reach its neighbour, which may have another scale.
    torch.bitwise_and(low, 15, out=packed)
    packed[..., : high.shape[-1]].bitwise_or_(high.bitwise_left_shift_(4))


def _unpack(data: Tensor, nibbles: Tensor) -> None:
    """Convert the output of `_pack` to nibbles [n, ..., D], float32."""
    low, high = nibbles.tensor_split([-(-nibbles.shape[-1] // 2)], dim=-1)
    packed = data.view(low.shape)
    low.copy_(packed & 15)
    high.copy_(packed[..., : high.shape[-1]] >> 4)


def _slabs(blocks: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the blocks, each with a float32 buffer for them, which the next slice reuses."""
    num_blocks, *block_shape = blocks.shape
    step = max(1, _SLAB_BYTES[blocks.device.type] // (math.prod(block_shape) * torch.float32.itemsize))
    work = torch.empty(min(step, num_blocks), *block_shape, device=blocks.device)
    for start in range(0, num_blocks, step):
        yield slice(start, start + step), work[: num_blocks - start]


def _scales(high: Tensor, low: Tensor, largest: float) -> Tensor:
    """Scales that map the larger of two magnitudes to `largest`.

    NOTE: rounding may make them too small by 1 part in 2^8. Then 127 and 448 still round to themselves, and 7.5 + 7.5
    to 15, so no clamping is needed.
    """
    return torch.maximum(high, low).div_(largest).to(_PARAMETER)


def _reciprocal(scales: Tensor) -> Tensor:
    return scales.float().clamp_min_(_SMALLEST_NORMAL).reciprocal_()


def _order_behind(other: torch.device, device: torch.device) -> None:
    """Make later work on `device` wait for the work launched so far on `other`."""
    if other != device and other.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(torch.cuda.current_stream(other))


def _movable(shards: Sequence[Tensor]) -> Sequence[Tensor]:
    """The shards as bytes if their type has 8 bits: torch does not copy rows of float8 everywhere."""
    return [shard.view(torch.uint8) for shard in shards] if shards[0].itemsize == 1 else shards


def _as_bytes(x: Tensor) -> Tensor:
    """x [n, ...] as uint8 [n, bytes]; a copy only if an item is not contiguous."""
    rows = x.flatten(1)
    return (rows if rows.stride(1) == 1 else rows.contiguous()).view(torch.uint8)


def _from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """data [n, bytes] as [n, bytes / itemsize] of `dtype`; a copy only if it is not aligned for that."""
    offsets = (data.data_ptr(), data.storage_offset(), data.stride(0))
    is_aligned = all(offset % dtype.itemsize == 0 for offset in offsets)
    return (data if is_aligned else data.clone(memory_format=torch.contiguous_format)).view(dtype)


_CODECS: dict[str, Callable[[], Codec]] = {
    codec.name: codec for codec in (_RawCodec, ExactCodec, _Fp8Codec, _Int8Codec, _Int4Codec)
}
CODEC_NAMES = tuple(_CODECS)


def create_codec(name: str) -> Codec:
    """The codec of this name. Raises ConfigError if there is none."""
    if name not in _CODECS:
        raise ConfigError(f"codec={name!r} is not known; use one of: {', '.join(CODEC_NAMES)}")
    return _CODECS[name]()
