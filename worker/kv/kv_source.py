"""Sources of a prompt's KV: the contract that tiers and peers share."""

from __future__ import annotations

import abc
import sys
from collections.abc import Sequence

from tandem.engine.kv_pool import KvPool
from tandem.engine.sequence import Sequence as EngineSequence
from tandem.kv_transfer.fetch_planner import FetchSource
from tandem.scheduling.load_cost import LoadCost

PIECES_IN_FLIGHT = 4  # of one prompt


class Piece(abc.ABC):
    """Blocks [first_block, end_block) of one prompt that are being loaded. Its owner places or drops it, once."""

    kind: str  # of its source

    def __init__(self, first_block: int, end_block: int, begun_at: float) -> None:
        self.first_block = first_block
        self.end_block = end_block
        self.begun_at = begun_at

    @property
    def num_blocks(self) -> int:
        """Blocks requested."""
        return self.end_block - self.first_block

    @property
    @abc.abstractmethod
    def is_done(self) -> bool:
        """Whether nothing more will arrive."""

    @property
    @abc.abstractmethod
    def is_complete(self) -> bool:
        """Whether it is done and all its blocks arrived undamaged."""

    @abc.abstractmethod
    def learn(self) -> None:
        """Let the source's cost learn from this piece, which is done."""

    @abc.abstractmethod
    def learn_late(self, now: float) -> None:
        """Let the source's cost learn that this piece, which is not done, was too slow."""

    @abc.abstractmethod
    def place(self, sequence: EngineSequence, first_block: int, kv: KvPool) -> int:
        """Put blocks [first_block, end_block) of a complete piece in place in the sequence; the bytes copied for it."""

    @abc.abstractmethod
    def drop(self) -> None:
        """Release the piece, done or not."""


class OpenSource(abc.ABC):
    """One prompt's use of a source."""

    kind: str
    most_blocks = sys.maxsize  # of a piece

    @property
    def end_block(self) -> int | None:
        """Where what it has was found to end, if that is before the end of what it was opened for."""
        return None

    @abc.abstractmethod
    def begin(self, first_block: int, end_block: int, now: float) -> Piece:
        """Request some of the blocks it was opened for: the last ones first."""

    def close(self) -> None:  # noqa: B027  (a tier has nothing to release)
        """Request no more pieces."""


class KvSource(abc.ABC):
    """A tier, or a peer that has blocks of a prompt."""

    name: str
    kind: str  # peers are one kind
    cost: LoadCost

    @abc.abstractmethod
    def look_up(self, first_block: int, digests: Sequence[bytes]) -> FetchSource:
        """How much of a chain the source has from `first_block` on, for the planner. No I/O."""

    @abc.abstractmethod
    def open(self, digests: Sequence[bytes], first_block: int, end_block: int, now: float) -> OpenSource:
        """Prepare to load blocks [first_block, end_block) of a chain, which `look_up` has found."""
