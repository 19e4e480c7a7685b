"""Blocks that are packed for a link come back bit for bit, or are sent as they are."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tandem.kv_transfer.codec import Codec, create_codec
from tandem.kv_transfer.wire_codec import WireCodec
from tandem.protocol.errors import ConfigError
from tandem.worker.kv.cpu_codec import codec_for

SHAPE = (4, 3, 2, 16, 64)  # [num_kv_heads, num_layers, 2, block_size, head_dim]
NUM_BLOCKS = 64
CODECS = [create_codec("exact"), codec_for("exact", torch.device("cpu"))]


def make_pool(num_shards: int = 1, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(NUM_BLOCKS, *SHAPE, generator=generator).to(torch.bfloat16)
    return [part.contiguous() for part in whole.chunk(num_shards, dim=1)]


def whole(shards: list[Tensor]) -> Tensor:
    """Bits of all blocks."""
    return torch.cat(shards, dim=1).view(torch.int16)


def send(sender: WireCodec, source: list[Tensor], receiver: WireCodec, target: list[Tensor], n: int) -> list[int]:
    """Pack the first n blocks, copy what a transport would, and unpack. Returns the blocks at the receiver."""
    m = sender.num_packed(n)
    spare, granted = list(range(NUM_BLOCKS - m, NUM_BLOCKS)), random.Random(n).sample(range(NUM_BLOCKS), n)
    assert sender.pack(list(range(n)), spare)
    moved = torch.cat(source, dim=1)[spare]
    for shard, part in zip(target, moved.chunk(len(target), dim=1), strict=True):
        shard[granted[:m]] = part
    receiver.unpack(granted)
    return granted


@pytest.mark.parametrize("codec", CODECS, ids=["torch", "kernels"])
@pytest.mark.parametrize(("at_sender", "at_receiver"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_blocks_come_back_bit_for_bit_whatever_the_shards(codec: Codec, at_sender: int, at_receiver: int) -> None:
    for n in (1, 2, 5, 30, 36):
        source, target = make_pool(at_sender), make_pool(at_receiver, seed=1)
        expected, before = whole(source)[:n].clone(), whole(target).clone()
        granted = send(WireCodec(source, codec), source, WireCodec(target, codec), target, n)
        assert torch.equal(whole(target)[granted], expected), f"{n} blocks"
        others = [block for block in range(NUM_BLOCKS) if block not in granted]
        assert torch.equal(whole(target)[others], before[others]), f"{n} blocks: others were changed"
        assert torch.equal(whole(source)[:n], expected), f"{n} blocks: the sender's were changed"


def test_what_does_not_fit_the_codec_is_not_packed_and_packs_again_later() -> None:
    source = make_pool()
    wire = WireCodec(source, CODECS[1])
    kept = source[0][3].clone()
    source[0][3].view(torch.int16).random_(-(1 << 15), 1 << 15, generator=torch.Generator().manual_seed(0))
    n, spare = 5, list(range(40, 40 + wire.num_packed(5)))
    assert not wire.pack(list(range(n)), spare)
    source[0][3] = kept
    assert wire.pack(list(range(n)), spare)


def test_a_write_has_no_bytes_of_earlier_ones() -> None:
    source = make_pool()
    wire = WireCodec(source, CODECS[1])
    assert wire.pack(list(range(30)), list(range(30, 30 + wire.num_packed(30))))
    n = 5
    spare = list(range(60, 60 + wire.num_packed(n)))
    assert wire.pack(list(range(n)), spare)
    num_bytes = n * CODECS[1].encoded_bytes(SHAPE, torch.bfloat16)
    assert not source[0][spare].view(-1).view(torch.uint8)[num_bytes:].any()


@pytest.mark.parametrize("codec", CODECS, ids=["torch", "kernels"])
def test_bytes_that_nobody_packed_change_no_other_block(codec: Codec) -> None:
    target = make_pool()
    target[0].view(torch.int16).random_(-(1 << 15), 1 << 15, generator=torch.Generator().manual_seed(1))
    before = whole(target).clone()
    WireCodec(target, codec).unpack(list(range(10, 30)))
    rest = [*range(10), *range(30, NUM_BLOCKS)]
    assert torch.equal(whole(target)[rest], before[rest])


def test_packing_is_chosen_by_the_speeds() -> None:
    wire = WireCodec(make_pool(), CODECS[1])
    wire.pack_block_s = 1e-3
    n = 40
    saved = n - wire.num_packed(n)
    assert 0.2 < saved / n < 0.23
    pays_from_s = n * (1e-3 + 2e-3) / saved  # of the link, for a block
    assert wire.pays(n, 1.01 * pays_from_s, 2e-3)
    assert not wire.pays(n, 0.99 * pays_from_s, 2e-3)
    assert not wire.pays(n, 0.0, 2e-3), "the link's speed is not known yet"
    assert not wire.pays(4, 1e9, 2e-3), "four blocks are four blocks"
    assert not wire.pays(n, 1e9, float("inf"))
    always = WireCodec(make_pool(), CODECS[1], "exact")
    assert always.pays(n, 0.0, 1.0)
    assert not always.pays(4, 1e9, 0.0)


def test_the_speeds_are_those_of_the_clock() -> None:
    now = iter(range(1000))
    wire = WireCodec(make_pool(), CODECS[1], clock=lambda: float(next(now)))
    assert (wire.pack_block_s, wire.unpack_block_s) == (0.25, 0.25)  # four blocks in a second
    wire.unpack([0])
    assert wire.unpack_block_s == 0.25 + 0.25 * 0.75
    wire.pack([0], [1])
    assert wire.pack_block_s == 0.25 + 0.25 * 0.75


def test_float32_cannot_be_packed() -> None:
    with pytest.raises(ConfigError, match="codec 'exact' is for KV in bfloat16"):
        WireCodec([torch.zeros(4, *SHAPE)], CODECS[1])
