"""What a prompt's KV can be loaded from: the contract that tiers and peers share, and what their loads cost."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tandem.engine.sequence import Sequence as EngineSequence
from tandem.kv_transfer.fetch_planner import FetchSource

__all__ = ["KvSource", "LoadCost", "LoadPrior", "OpenSource", "Piece"]

_MIN_BLOCK_S = 1e-7


class LoadPrior(NamedTuple):
    """What a load is thought to cost before one was measured."""

    latency_s: float
    bytes_per_s: float


class LoadCost:
    """Latency and seconds per block of loads from one source, learned.

    Means of logarithms: a source's speed jumps by factors when others begin or cease to use it, and each load halves
    the distance, up or down.
    """

    def __init__(self, prior: LoadPrior, block_bytes: int) -> None:
        self.latency_s = prior.latency_s
        self.block_s = block_bytes / prior.bytes_per_s
        self.probed_at = -math.inf  # when a source that is not worth using was last tried

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Learn from a load, without its latency."""
        self.block_s = math.sqrt(self.block_s * max(seconds / num_blocks, _MIN_BLOCK_S))

    def observe_latency(self, seconds: float) -> None:
        """Learn what it took until a load began."""
        self.latency_s = math.sqrt(self.latency_s * max(seconds, _MIN_BLOCK_S))

    def observe_at_least(self, num_blocks: int, seconds: float) -> None:
        """Learn from a load that was given up: it would have taken longer than this, nobody knows how much.

        Twice the last estimate at least, or a prompt of which too much is expected of computing would go on losing.
        """
        self.block_s = max(2 * self.block_s, seconds / num_blocks)


class Piece(abc.ABC):
    """Blocks [first_block, end_block) of one prompt on their way. Whoever asked for it places or drops it, once."""

    kind: str  # of its source

    def __init__(self, first_block: int, end_block: int, begun_at: float) -> None:
        self.first_block = first_block
        self.end_block = end_block
        self.begun_at = begun_at

    @property
    def num_blocks(self) -> int:
        """Blocks asked for."""
        return self.end_block - self.first_block

    @property
    @abc.abstractmethod
    def is_done(self) -> bool:
        """Whether nothing more will arrive."""

    @property
    @abc.abstractmethod
    def is_complete(self) -> bool:
        """Whether it is done and all of it arrived, as it was when it was kept."""

    @abc.abstractmethod
    def learn(self) -> None:
        """Teach the source's cost what a piece that is done has cost."""

    @abc.abstractmethod
    def learn_late(self, now: float) -> None:
        """Teach the source's cost that a piece that is not done was not worth waiting for."""

    @abc.abstractmethod
    def place(self, sequence: EngineSequence, first_block: int, kv: Tensor) -> int:
        """Put blocks [first_block, end_block) of a complete piece into the sequence's; the bytes copied for it."""

    @abc.abstractmethod
    def drop(self) -> None:
        """Let go of it, done or not."""


class OpenSource(abc.ABC):
    """One prompt's use of a source. Its `end_block` is what it is known to have, not more than it was opened for."""

    kind: str
    end_block: int

    @abc.abstractmethod
    def begin(self, first_block: int, end_block: int, now: float) -> Piece:
        """Ask for some of the blocks it was opened for."""

    def close(self) -> None:  # noqa: B027  (a tier has nothing to let go of)
        """Nothing more will be asked for."""


class KvSource(abc.ABC):
    """A tier, or a peer that has blocks of a prompt."""

    name: str
    kind: str  # peers are one kind
    cost: LoadCost

    @abc.abstractmethod
    def look_up(self, first_block: int, digests: Sequence[bytes]) -> FetchSource:
        """What it has of a chain from `first_block` on, for the planner."""

    @abc.abstractmethod
    def open(self, digests: Sequence[bytes], first_block: int, end_block: int, now: float) -> OpenSource:
        """Begin to load blocks [first_block, end_block) of a chain, which are there by its word."""
