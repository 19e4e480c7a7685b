"""Routing strategies by name: which worker of a pool each of them prefers. Placement decides what is left open.

    kv            the most prompt tokens in its pool
    prefix        highest rendezvous hash with the beginning of the prompt
    session       highest rendezvous hash with the tenant and its session
    round-robin   booked longest ago
    least-loaded  fewest uncomputed prompt tokens

Among equals, and for a request that has no prefix or session, the least loaded worker wins. Workers over the bound of
load are passed over (Mirrokni, Thorup, Zadimoghaddam: Consistent Hashing with Bounded Loads), so no strategy can pile
all requests of one prompt onto one worker. Rendezvous hashing moves only the sessions of a worker that leaves (Thaler,
Ravishankar: Using Name-Based Mappings to Increase Hit Rates).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b

import numpy as np

from tandem.protocol.routing import KV, LEAST_LOADED, PREFIX, ROUND_ROBIN, SESSION
from tandem.scheduling.cost_model import Mask, Vector
from tandem.scheduling.request import PlacementRequest
from tandem.scheduling.workers.worker_table import WorkerTable

MAX_LOAD = 1.25  # of the mean of the pool, the request included
PREFIX_TOKENS = 256  # beginning of a prompt that decides by `prefix`


class Preferences:
    """What every strategy prefers for one request. A worker is a row of the table."""

    def __init__(
        self,
        request: PlacementRequest,
        table: WorkerTable,
        hit_tokens: Vector,
        digests: Sequence[bytes],
        block_size: int,
    ) -> None:
        """`hit_tokens`: prompt tokens in each worker's pool. `digests`: of the prompt's blocks of this size."""
        self._request = request
        self._table = table
        self._hit_tokens = hit_tokens
        self._digests = digests
        self._block_size = block_size
        self._load_tokens = table.uncomputed_tokens + table.booked_kv_tokens

    def rows(self, strategy: str, *pools: Mask) -> list[int]:
        """The worker of each of these pools that the strategy prefers. No pool may be empty."""
        scores = _SCORES[strategy](self)
        return [self._row(strategy, scores, pool) for pool in pools]

    def rank(self, strategy: str, row: int) -> tuple[float, float]:
        """How much the strategy likes a worker, to compare the choices from several pools: the highest wins."""
        return _SCORES[strategy](self).item(row), -self._load_tokens.item(row)

    def _row(self, strategy: str, scores: Vector, pool: Mask) -> int:
        row = self._highest(scores, pool)
        if strategy == LEAST_LOADED:
            return row
        own_tokens = self._request.num_prompt_tokens + self._request.expected_output_tokens
        most = MAX_LOAD * (float(np.dot(self._load_tokens, pool)) + own_tokens) / np.count_nonzero(pool)
        if self._load_tokens.item(row) <= most:
            return row
        return self._highest(scores, pool & (self._load_tokens <= most))  # at least the one with the least load

    def _highest(self, scores: Vector, pool: Mask) -> int:
        """The worker with the highest score; among equals the one with the least load, then the first."""
        scores = np.where(pool, scores, -math.inf)
        equals = (scores == scores.item(scores.argmax())).nonzero()[0]
        return int(equals[0] if len(equals) == 1 else equals[self._load_tokens[equals].argmin()])

    def _by_kv(self) -> Vector:
        return self._hit_tokens

    def _by_prefix(self) -> Vector:
        if not self._digests:
            return self._table.zeros
        num_blocks = min(max(PREFIX_TOKENS // self._block_size, 1), len(self._digests))
        return self._rendezvous(self._digests[num_blocks - 1])  # a digest depends on all blocks before it

    def _by_session(self) -> Vector:
        service_class = self._request.service_class
        if not service_class.session:
            return self._table.zeros
        return self._rendezvous(blake2b(f"{service_class.tenant}\n{service_class.session}".encode()).digest())

    def _by_turn(self) -> Vector:
        return -self._table.last_booking

    def _by_load(self) -> Vector:
        return -self._table.uncomputed_tokens

    def _rendezvous(self, key: bytes) -> Vector:
        """A pseudo-random number for each worker, which depends on the key and the worker's id alone."""
        mixed = self._table.id_hashes ^ np.uint64(int.from_bytes(key[:8], "little"))
        mixed *= np.uint64(0xFF51AFD7ED558CCD)  # as MurmurHash3 mixes its last bits
        mixed ^= mixed >> np.uint64(33)
        mixed *= np.uint64(0xC4CEB9FE1A85EC53)
        return mixed.astype(np.float64)


_SCORES: Mapping[str, Callable[[Preferences], Vector]] = {
    KV: Preferences._by_kv,
    PREFIX: Preferences._by_prefix,
    SESSION: Preferences._by_session,
    ROUND_ROBIN: Preferences._by_turn,
    LEAST_LOADED: Preferences._by_load,
}
