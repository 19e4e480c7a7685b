"""The codec `exact` on a CPU, by kernels: as torch operations it takes fifty times as long there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from tandem.engine.cpu import exact
from tandem.kv_transfer.codec import Codec, ExactCodec, ExactUnit, create_codec


class CpuExactCodec(ExactCodec):
    """The same bytes. Needs the compiler that all CPU kernels need."""

    @override
    def encode(self, blocks: Tensor, out: Tensor) -> None:
        self._check(blocks, out)
        exact.pack(blocks.contiguous(), None, out, *ExactUnit.of(blocks.shape[1:]))

    @override
    def decode(self, data: Tensor, out: Tensor) -> None:
        self._check(out, data)
        blocks = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype)
        exact.unpack(blocks, None, data, *ExactUnit.of(out.shape[1:]))
        if blocks is not out:
            out.copy_(blocks)

    @override
    def gather(self, shards: Sequence[Tensor], block_ids: Tensor, out: Tensor) -> None:
        if len(shards) > 1:
            super().gather(shards, block_ids, out)
            return
        exact.pack(shards[0], block_ids, out, *ExactUnit.of(shards[0].shape[1:]))

    @override
    def scatter(self, data: Tensor, shards: Sequence[Tensor], block_ids: Tensor) -> None:
        if len(shards) > 1:
            super().scatter(data, shards, block_ids)
            return
        exact.unpack(shards[0], block_ids, data, *ExactUnit.of(shards[0].shape[1:]))


def codec_for(name: str, device: torch.device) -> Codec:
    """The codec of this name for KV on a device. Raises ConfigError if there is none."""
    return CpuExactCodec() if name == "exact" and device.type == "cpu" else create_codec(name)
