"""The lending side of reads between workers: blocks of this worker's pool that must stay as they are for a while.

`tandem.worker.kv.peer_read` describes the protocol and why it is safe.

A read moves a prefix. If both copies stayed equally long, pools would hold half as many prefixes. So the lender's copy
is evicted first once its room is needed; until then it can still be found. A block with another chain after it keeps
its place in the order of eviction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.device import Mark
from tandem.engine.engine import Engine
from tandem.kv_transfer.links import PeerLinks
from tandem.kv_transfer.tiers.tier import TierRead
from tandem.kv_transfer.transport.checksum import block_checksums
from tandem.protocol.config import TransferConfig
from tandem.protocol.messages import PeerAddress, ReadDone, ReadGrant, ReadRequest, WorkerEpoch
from tandem.worker.kv.cached_tier import CachedTier

_LONGER = 1.01  # multiplies the reader's ttl: the rates of two clocks may differ by a hundredth
_MAX_LENT_SHARE = 0.25  # share of the pool that readers may keep from eviction at one time


class _ReadKey(NamedTuple):
    reader: WorkerEpoch
    read_id: int


@dataclass(eq=False, slots=True)
class _Loan:
    """Blocks kept for one reader. While `host_read` is set, those from `num_resident` on are not loaded yet."""

    reader: PeerAddress
    digests: list[bytes]
    parent: bytes | None
    blocks: list[int]
    deadline: float
    ttl_s: float
    num_resident: int
    host_read: TierRead | None = None
    placed: Mark | None = None  # recorded after the copy of the loaded blocks into the pool
    data: Tensor = field(default_factory=lambda: torch.empty(0))


class PeerLender:
    """All loans of this worker's blocks. `num_lent_blocks` counts blocks since the start."""

    def __init__(self, engine: Engine, host_tier: CachedTier | None, links: PeerLinks, config: TransferConfig) -> None:
        self._engine = engine
        self._host_tier = host_tier
        self._links = links
        self._config = config
        self._loans: dict[_ReadKey, _Loan] = {}
        self.num_lent_blocks = 0

    @property
    def num_open(self) -> int:
        """Readers for which blocks are kept."""
        return len(self._loans)

    @property
    def deadlines(self) -> list[float]:
        """When each loan ends."""
        return [loan.deadline for loan in self._loans.values()]

    def requested(self, message: ReadRequest, now: float) -> None:
        """Take references on the leading blocks of the chain that are here, and grant them once all are in the pool.

        `now` was read after the request was received.
        """
        key = _ReadKey(message.sender.process, message.read_id)
        if key in self._loans:
            return
        pool = self._engine.pool
        room = max(int(pool.num_blocks * _MAX_LENT_SHARE) - sum(len(loan.blocks) for loan in self._loans.values()), 0)
        digests = message.digests[:room]
        blocks = pool.acquire_cached(digests)
        ttl_s = _LONGER * message.ttl_s
        loan = _Loan(message.sender, digests, message.parent, blocks, now + ttl_s, ttl_s, len(blocks))
        self._loans[key] = loan
        if not self._begin_loading(loan):
            self._grant(key, loan, now)

    def done(self, message: ReadDone) -> None:
        """Let go. If the reader has a copy now, the next turn finds that one, so ours is evicted first."""
        loan = self._let_go(_ReadKey(message.sender.process, message.read_id))
        if loan is not None and message.copied:
            self._engine.pool.demote(message.copied)

    def peer_lost(self, peer: WorkerEpoch) -> None:
        """Let go of what this reader had: its process is dead."""
        for key in [key for key in self._loans if key.reader == peer]:
            self._let_go(key)

    def pump(self, now: float) -> None:
        """Grant what has been loaded from the host tier, and let go of what is out of time."""
        for key, loan in list(self._loans.items()):
            if loan.host_read is not None and loan.host_read.is_done:
                self._place(loan)
            if loan.placed is not None and self._engine.stream.is_done(loan.placed):
                self._publish(loan)
                self._grant(key, loan, now)
            elif now >= loan.deadline:
                self._let_go(key)

    def check_integrity(self, *, idle: bool = False) -> None:
        """With `idle`, raise AssertionError if anything is lent."""
        assert not (idle and self._loans), f"blocks are lent to {len(self._loans)} readers"

    def _grant(self, key: _ReadKey, loan: _Loan, now: float) -> None:
        loan.deadline = now + loan.ttl_s
        is_checked = self._config.checksums == "all"
        grant = ReadGrant(
            sender=self._links.me,
            read_id=key.read_id,
            block_ids=loan.blocks,
            checksums=block_checksums(self._engine.kv.shards, loan.blocks) if is_checked else [],
        )
        self._links.send(key.reader, grant)
        self.num_lent_blocks += len(loan.blocks)

    def _let_go(self, key: _ReadKey) -> _Loan | None:
        loan = self._loans.pop(key, None)
        if loan is None:
            return None
        if loan.host_read is not None:
            loan.host_read.abandon()
        self._engine.pool.release(loan.blocks)
        return loan

    def _begin_loading(self, loan: _Loan) -> bool:
        """Load blocks that only the host tier has into the pool. Returns False if there are none, or no room."""
        tier, pool = self._host_tier, self._engine.pool
        missing = loan.digests[len(loan.blocks) :]
        num_blocks = 0 if tier is None else tier.tier.count_present(missing)
        num_blocks = min(num_blocks, self._engine.scheduler.admission.num_spare_blocks)
        fresh = pool.try_allocate(num_blocks) if num_blocks > 0 else None
        if tier is None or fresh is None:
            return False
        loan.data, loan.host_read = tier.begin_load(missing[:num_blocks])
        loan.blocks = [*loan.blocks, *fresh]
        return True

    def _place(self, loan: _Loan) -> None:
        """Copy the blocks that were loaded into the pool and free the others."""
        assert loan.host_read is not None
        assert self._host_tier is not None
        engine, num_loaded = self._engine, loan.host_read.num_loaded
        end = loan.num_resident + num_loaded
        engine.pool.release(loan.blocks[end:])
        loan.blocks = loan.blocks[:end]
        fresh = loan.blocks[loan.num_resident :]
        self._host_tier.decode_into(engine.kv, fresh, loan.data[:num_loaded])
        loan.host_read, loan.data, loan.placed = None, torch.empty(0), engine.stream.record()

    def _publish(self, loan: _Loan) -> None:
        fresh = loan.blocks[loan.num_resident :]
        self._engine.pool.publish_chain(fresh, loan.digests, loan.num_resident, loan.parent)
        loan.placed = None
