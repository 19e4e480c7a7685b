"""Messages between rank 0 and a follower, over a socket pair that only they have."""

from __future__ import annotations

from typing import NamedTuple

from tandem.engine.model_runner import PackedBatch
from tandem.engine.tensor_parallel.shared_pool import ShardHandle
from tandem.protocol.config import EngineConfig


class Load(NamedTuple):
    """To a follower: load your shard."""

    config: EngineConfig
    rank: int
    num_threads: int


class Loaded(NamedTuple):
    """From a follower: its weights are loaded."""


class Connect(NamedTuple):
    """To a follower: meet the other ranks, then measure and check the model with them."""


class MapPool(NamedTuple):
    """To a follower: its shard of the pool. The file that holds it follows, if there is one."""

    handle: ShardHandle
    has_file: bool


class ComputeStep(NamedTuple):
    """To a follower: compute this batch. Its input ids follow as a broadcast, in the order of rank 0's device.

    So the ranks' work on a step comes behind everything that rank 0 has launched before it: its copies into the pool,
    and the sampling of tokens with which this step computes.
    """

    batch: PackedBatch


class Resync(NamedTuple):
    """To a follower: the latest step raised here. Say when it is over for you too."""


class Ready(NamedTuple):
    """From a follower: it waits for the next step."""


class RankFailed(NamedTuple):
    """From a follower: it cannot go on, and ends."""

    error: str


Message = Load | Loaded | Connect | MapPool | ComputeStep | Resync | Ready | RankFailed
