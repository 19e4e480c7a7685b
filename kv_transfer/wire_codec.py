"""KV in fewer bytes between two workers: the blocks of a write are packed by a lossless codec into fewer blocks.

    sender                                                    receiver
    n blocks of the prompt ── encode ──► m spare blocks of its pool
                                         m spare blocks ── one write ──► the first m of the n granted blocks
                                                                         n granted blocks ◄── decode ── their bytes

The encoded blocks lie end to end, so they fill m = n x (ratio of the codec) whole blocks. A transport moves blocks as
always, and the receiver needs no room but that of its lease.

Packing costs time on both sides, which only a slow link gives back. `auto` packs a write if

    (n - m) x link seconds a block > n x (encoding seconds a block + decoding seconds a block)

Each speed is measured: encoding by the sender, decoding by the receiver, which reports its own when the link opens. The
link's speed is that of its fastest recent write, because a short write also contains latency.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from tandem.kv_transfer.codec import Codec
from tandem.kv_transfer.transport.beside_steps import beside_steps

WireSetting = Literal["auto", "exact"]

_TRIAL_BLOCKS = 4  # that are packed at the start, to know the speed
_SHARE_OF_NEWS = 0.25  # of a measurement in the learned speed


class WireCodec:
    """Packs and unpacks blocks of one pool. A GPU does so beside the launched steps, and the call waits for it.

    `pack_block_s` and `unpack_block_s` are the learned seconds for a block.
    """

    def __init__(
        self,
        shards: Sequence[Tensor],
        codec: Codec,
        setting: WireSetting = "auto",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`shards` are of the pool. Raises ConfigError if the codec cannot take its blocks."""
        self.name = codec.name
        self.setting = setting
        self._codec = codec
        self._shards = shards
        self._rows = [shard.flatten(1).view(torch.uint8) for shard in shards]  # [num_blocks, bytes of the part]
        self._device = shards[0].device
        self._block_shape = (sum(shard.shape[1] for shard in shards), *shards[0].shape[2:])
        self._block_bytes = sum(rows.shape[1] for rows in self._rows)
        self._encoded_bytes = codec.encoded_bytes(self._block_shape, shards[0].dtype)
        self._clock = clock
        self._buffer = torch.empty(0, dtype=torch.uint8)  # on the pool's device, for one write
        self.pack_block_s, self.unpack_block_s = self._try_out(shards[0].dtype)

    def num_packed(self, num_blocks: int) -> int:
        """How many blocks `num_blocks` need once they are packed."""
        return -(-num_blocks * self._encoded_bytes // self._block_bytes)

    def pays(self, num_blocks: int, link_block_s: float, unpack_block_s: float) -> bool:
        """Whether to pack a write, given the link's and the receiver's seconds for a block."""
        num_saved = num_blocks - self.num_packed(num_blocks)
        if num_saved <= 0:
            return False
        return self.setting == "exact" or num_saved * link_block_s > num_blocks * (self.pack_block_s + unpack_block_s)

    def pack(self, block_ids: Sequence[int], spare_ids: Sequence[int]) -> bool:
        """Pack blocks into `num_packed` other ones. Returns False if one of them does not fit the codec."""
        began, num_blocks = self._clock(), len(block_ids)
        assert len(spare_ids) == self.num_packed(num_blocks), f"{len(spare_ids)} spare blocks for {num_blocks}"
        with beside_steps(self._device):
            packed = self._packed(len(spare_ids))
            encoded = self._encoded(packed, num_blocks)
            self._codec.gather(self._shards, torch.tensor(block_ids, device=self._device), encoded)
            packed.view(-1)[encoded.numel() :] = 0
            fits = self._codec.holds(encoded, self._block_shape)
            for rows, part in zip(self._rows, self._parts(packed), strict=True):
                rows[torch.tensor(spare_ids, device=rows.device)] = part.to(rows.device)
        self.pack_block_s = self._learned(self.pack_block_s, began, num_blocks)
        return fits

    def unpack(self, block_ids: Sequence[int]) -> None:
        """Unpack into these blocks what the first `num_packed` of them hold. Bytes that are not packed give some KV."""
        began, num_blocks = self._clock(), len(block_ids)
        with beside_steps(self._device):
            packed_ids = torch.tensor(block_ids[: self.num_packed(num_blocks)])
            packed = self._packed(len(packed_ids))
            for rows, part in zip(self._rows, self._parts(packed), strict=True):
                part.copy_(rows[packed_ids.to(rows.device)])
            ids = torch.tensor(block_ids, device=self._device)
            self._codec.scatter(self._encoded(packed, num_blocks), self._shards, ids)
        self.unpack_block_s = self._learned(self.unpack_block_s, began, num_blocks)

    def _learned(self, block_s: float, began: float, num_blocks: int) -> float:
        return block_s + _SHARE_OF_NEWS * ((self._clock() - began) / num_blocks - block_s)

    def _packed(self, num_blocks: int) -> Tensor:
        """Memory of so many blocks, [num_blocks, block_bytes]; the next call gives the same."""
        if len(self._buffer) < num_blocks * self._block_bytes:
            self._buffer = torch.empty(num_blocks * self._block_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer[: num_blocks * self._block_bytes].view(num_blocks, self._block_bytes)

    def _encoded(self, packed: Tensor, num_blocks: int) -> Tensor:
        """The encoded blocks, which lie end to end: [num_blocks, encoded_bytes]."""
        return packed.view(-1)[: num_blocks * self._encoded_bytes].view(num_blocks, self._encoded_bytes)

    def _parts(self, packed: Tensor) -> Sequence[Tensor]:
        """What each shard has of the packed blocks."""
        return packed.split([rows.shape[1] for rows in self._rows], dim=1)  # type: ignore[no-untyped-call,no-any-return]

    def _try_out(self, dtype: torch.dtype) -> tuple[float, float]:
        """Seconds for a block to encode and to decode."""
        blocks = torch.randn(_TRIAL_BLOCKS, *self._block_shape, device=self._device).to(dtype)
        encoded = self._encoded(self._packed(_TRIAL_BLOCKS), _TRIAL_BLOCKS)

        def block_s(run: Callable[[Tensor, Tensor], None], source: Tensor, target: Tensor) -> float:
            began = self._clock()
            with beside_steps(self._device):
                run(source, target)
            return (self._clock() - began) / _TRIAL_BLOCKS

        # The first call may load kernels.
        pack_block_s = min(block_s(self._codec.encode, blocks, encoded) for _ in range(2))
        unpack_block_s = min(block_s(self._codec.decode, encoded, blocks) for _ in range(2))
        return pack_block_s, unpack_block_s
