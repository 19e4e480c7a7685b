"""Copies of KV that a router wants here too, in case an answer's worker dies or is left: read, never computed.

A copy reads the blocks of a chain that are not here yet, from the front, so whatever has come is useful however the
copy ends. Copies take no room that a sequence is expected to need (`PeerRead`). Each ends with its lease at the latest.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.engine import Engine
from tandem.protocol.messages import CopyKv
from tandem.worker.kv.peer_read import PeerPiece, PeerRead
from tandem.worker.kv.peer_reader import PeerReader

_PIECE_BYTES = 12 << 20  # per read: a few ms from memory


@dataclass(eq=False, slots=True)
class _Copy:
    digests: list[bytes]
    held: list[int]  # the leading blocks of the chain, which stay in the pool until the copy ends
    read: PeerRead
    piece: PeerPiece | None = None


class KvCopies:
    """All copies that are being read. `num_blocks` counts blocks read since the start."""

    def __init__(self, engine: Engine, reader: PeerReader) -> None:
        self.num_blocks = 0
        self._pool = engine.pool
        self._piece_blocks = max(_PIECE_BYTES // engine.block_bytes, 1)
        self._reader = reader
        self._copies: dict[str, _Copy] = {}  # by request
        self._complete: list[str] = []  # requests for which nothing was missing

    def accept(self, request: CopyKv, now: float) -> None:
        """Begin to read the blocks that are missing here."""
        held = self._pool.acquire_cached(request.digests)
        if len(held) == len(request.digests):
            self._pool.release(held)
            self._complete.append(request.request_id)
            return
        read = self._reader.copy(request.source, request.digests, len(held), now)
        self._copies[request.request_id] = _Copy(request.digests, held, read)

    def cancel(self, request_id: str) -> None:
        """Stop a copy. What has come stays in the cache."""
        copy = self._copies.pop(request_id, None)
        if copy is not None:
            self._end(copy)

    def pump(self, now: float) -> list[str]:
        """Put what was read in place and request more. Returns the requests that are done."""
        ended = [request_id for request_id, copy in self._copies.items() if not self._goes_on(copy, now)]
        for request_id in ended:
            self.cancel(request_id)
        complete, self._complete = self._complete, []
        return complete + ended

    def check_integrity(self, *, idle: bool = False) -> None:
        """With `idle`, raise AssertionError if anything is being copied."""
        assert not (idle and self._copies), f"{len(self._copies)} copies are being read"

    def _goes_on(self, copy: _Copy, now: float) -> bool:
        read, piece = copy.read, copy.piece
        if piece is not None and not piece.is_done:
            return True
        if piece is not None:
            copy.piece = None
            piece.learn()
            if not piece.is_complete:
                return False
            self._keep(copy, piece)
        first, is_granted = len(copy.held), read.block_ids is not None
        if read.is_failed or first == len(copy.digests) or (is_granted and first >= read.end_block):
            return False
        if is_granted:
            copy.piece = read.begin(first, min(first + self._piece_blocks, read.end_block), now)
        return True

    def _keep(self, copy: _Copy, piece: PeerPiece) -> None:
        blocks = piece.take()
        self._pool.publish_chain(blocks, copy.digests, len(copy.held))
        copy.held += blocks
        self.num_blocks += len(blocks)

    def _end(self, copy: _Copy) -> None:
        if copy.piece is not None:
            copy.piece.drop()
        copy.read.close()
        self._pool.release(copy.held)
