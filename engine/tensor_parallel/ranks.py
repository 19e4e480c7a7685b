"""The ranks of an engine: its own process alone, or a team. The engine chooses once and asks them alike."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.kv_pool import KvPool
from tandem.engine.loader import LoadedModel, load_model
from tandem.engine.model_check import make_checked_backend
from tandem.engine.model_runner import ModelRunner
from tandem.engine.pool_memory import allocate_pool
from tandem.engine.tensor_parallel.team import Team
from tandem.protocol.config import EngineConfig


class Ranks(Protocol):
    """Load the model on every rank, share the pool among them, and run steps on all of them."""

    can_record_graphs: bool

    def load(self, config: EngineConfig) -> tuple[LoadedModel, AttentionBackend]:
        """This rank's part of the model and its checked attention, once every rank has its own.

        Raises ConfigError if a rank cannot load the model.
        """

    def allocate_pool(self, config: EngineConfig, model: LoadedModel, num_blocks: int) -> KvPool:
        """A pool of `num_blocks` with a shard for every rank. Raises ConfigError if there is too little memory."""

    def make_runner(self, model: LoadedModel, backend: AttentionBackend, pool: Tensor) -> ModelRunner:
        """What computes steps on every rank; `pool` is the view of this rank's shard."""

    def check(self) -> None:
        """Raise RanksLost if the process of another rank has ended."""

    def close(self) -> None:
        """End the processes of the other ranks. Closing twice is fine."""


class SingleRank:
    """The only rank of its engine."""

    can_record_graphs = True

    def load(self, config: EngineConfig) -> tuple[LoadedModel, AttentionBackend]:
        """The model and its checked attention."""
        return make_checked_backend(load_model(config), config)

    def allocate_pool(self, config: EngineConfig, model: LoadedModel, num_blocks: int) -> KvPool:
        """A pool of one shard."""
        return allocate_pool(config, model, num_blocks)

    def make_runner(self, model: LoadedModel, backend: AttentionBackend, pool: Tensor) -> ModelRunner:
        """What computes steps in this process."""
        return ModelRunner(model, backend, pool)

    def check(self) -> None:
        """There is no other process."""

    def close(self) -> None:
        """There is no other process."""


def make_ranks(config: EngineConfig, num_threads: int) -> Ranks:
    """The ranks of this configuration. A team's processes begin to load, with `num_threads` each."""
    return Team(config, num_threads) if config.tensor_parallel_size > 1 else SingleRank()
