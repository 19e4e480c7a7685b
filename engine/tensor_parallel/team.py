"""Rank 0's side of tensor parallelism: it starts the followers, announces every step to them and watches them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from tandem.engine.attention.interface import AttentionBackend
from tandem.engine.kv_pool import KvPool
from tandem.engine.loader import LoadedModel, load_model
from tandem.engine.model_check import make_checked_backend
from tandem.engine.model_runner import ModelRunner, PackedBatch
from tandem.engine.pool_memory import shard_block_shape
from tandem.engine.tensor_parallel.group import RankGroup, RanksLost
from tandem.engine.tensor_parallel.messages import (
    ComputeStep,
    Connect,
    Load,
    Loaded,
    MapPool,
    Message,
    RankFailed,
    Ready,
    Resync,
)
from tandem.engine.tensor_parallel.shared_pool import allocate_shared
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.fault_boundary import error_of, noted_on_error
from tandem.protocol.python_module import module_command, module_environment

_LOAD_TIMEOUT_S = 600.0
_CHECK_TIMEOUT_S = 300.0
_RESYNC_TIMEOUT_S = 12.0  # a little longer than a follower waits
_SEND_TIMEOUT_S = 60
_EXIT_TIMEOUT_S = 5.0
_NAMING_TIMEOUT_S = 1.0  # for a rank whose connections have broken to be seen to have ended

M = TypeVar("M")


class _Follower:
    """The process of one rank, and the connection to it."""

    def __init__(self, rank: int, store: int) -> None:
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT_S.to_bytes(8, "little") + bytes(8))
        lifeline, self._lifeline = os.pipe()  # the kernel ends the process when our end is closed
        self.rank = rank
        with theirs, open(lifeline, "rb"):
            passed = (theirs.fileno(), store, lifeline)
            self.process = subprocess.Popen(
                module_command("tandem.engine.tensor_parallel.follower", *map(str, passed)),
                pass_fds=passed,
                env=module_environment(),
                start_new_session=True,  # Ctrl-C in a terminal is for rank 0
            )
        self.connection = Connection(ours.detach())

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def check(self) -> None:
        """Raise RanksLost if the process has ended."""
        if (code := self.process.poll()) is not None:
            raise RanksLost(f"{self} has ended with code {code}; its log is beside this worker's")

    def send(self, message: Message) -> None:
        """Raise RanksLost if it does not read."""
        try:
            self.connection.send(message)
        except OSError as exc:
            raise RanksLost(f"{self} cannot be reached: {exc}") from exc

    def receive(self, kind: type[M], timeout_s: float) -> M:
        """Its next message, of this kind. Raises RanksLost."""
        try:
            if not self.connection.poll(timeout_s):
                raise RanksLost(f"{self} said nothing for {timeout_s:.0f} s")
            message: Message = self.connection.recv()
        except (EOFError, OSError) as exc:
            raise RanksLost(f"{self} has ended; its log is beside this worker's") from exc
        if isinstance(message, kind):
            return message
        error = message.error if isinstance(message, RankFailed) else f"it said {type(message).__name__}"
        raise RanksLost(f"{self} failed: {error}")

    def close(self) -> None:
        """End the process: it sees the end of the connection."""
        self.connection.close()
        try:
            self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self._lifeline)


class Team:
    """The followers of one engine. Its methods raise RanksLost once one of them is gone or hangs."""

    can_record_graphs = False  # graphs of one rank would not hold what the others do meanwhile

    def __init__(self, config: EngineConfig, num_threads: int) -> None:
        self.group = RankGroup(0, config.tensor_parallel_size)
        self._store = os.memfd_create("tandem-ranks")  # by it the ranks find each other; it has no name to clean up
        self._followers: list[_Follower] = []
        for rank in range(1, config.tensor_parallel_size):
            self._followers.append(_Follower(rank, self._store))
            self._followers[-1].send(Load(config, rank, num_threads))

    def load(self, config: EngineConfig) -> tuple[LoadedModel, AttentionBackend]:
        """Rank 0's shard of the model and its checked attention, once all have loaded and checked theirs."""
        model, backend = make_checked_backend(load_model(config, self.group, self.connect), config)
        self._await_ready()
        return model, backend

    def connect(self, device: torch.device) -> None:
        """Let the ranks meet once all have loaded their shard. Raises ConfigError if one could not."""
        deadline = time.monotonic() + _LOAD_TIMEOUT_S
        for follower in self._followers:
            try:
                follower.receive(Loaded, max(deadline - time.monotonic(), 0.0))
            except RanksLost as exc:
                raise ConfigError(f"the model could not be loaded: {exc.message}") from exc
        self._send_all(Connect())
        with self.naming():
            self.group.connect(f"/proc/self/fd/{self._store}", device)

    def allocate_pool(self, config: EngineConfig, model: LoadedModel, num_blocks: int) -> KvPool:
        """A pool with a shard for every rank. Raises ConfigError if there is too little memory."""
        shape = (num_blocks, *shard_block_shape(config, model))
        try:
            pool, handles, file = allocate_shared(
                shape, model.kv_dtype, model.device, self.group.size, takes_memory=bool(config.pool_bytes)
            )
        except OSError as exc:
            raise ConfigError(f"the KV pool could not be allocated: {exc.strerror}; lower pool_bytes") from exc
        for follower, handle in zip(self._followers, handles[1:], strict=True):
            follower.send(MapPool(handle, file is not None))
            if file is not None:
                send_handle(follower.connection, file, follower.process.pid)
        if file is not None:
            os.close(file)
        self._await_ready()
        return pool

    def make_runner(self, model: LoadedModel, backend: AttentionBackend, pool: Tensor) -> LeadingRunner:
        """Announces steps to the others and computes rank 0's part of them."""
        return LeadingRunner(model, backend, pool, self)

    def check(self) -> None:
        """Raise RanksLost if a process has ended. It costs a microsecond each."""
        for follower in self._followers:
            follower.check()

    def announce(self, batch: PackedBatch) -> None:
        """Let all compute this batch, with input ids that come by a broadcast."""
        self._send_all(ComputeStep(batch._replace(late_inputs=None)))

    def resync_after(self, error: BaseException) -> None:
        """After a step raised this here: wait until it is over for all, so that the next one begins for all."""
        if isinstance(error, RanksLost | torch.AcceleratorError) or not isinstance(error, Exception):
            return  # there is no next step
        self._send_all(Resync())
        for follower in self._followers:
            follower.receive(Ready, _RESYNC_TIMEOUT_S)

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Name the lost rank in an error of a collective, which only knows that some rank is lost."""
        try:
            yield
        except RanksLost:
            deadline = time.monotonic() + _NAMING_TIMEOUT_S
            while time.monotonic() < deadline:
                self.check()
                time.sleep(0.01)
            raise

    def close(self) -> None:
        """End the followers. Closing twice is fine."""
        self.group.close()
        for follower in self._followers:
            follower.close()
        if self._followers:
            os.close(self._store)
        self._followers = []

    def _await_ready(self) -> None:
        for follower in self._followers:
            follower.receive(Ready, _CHECK_TIMEOUT_S)

    def _send_all(self, message: Message) -> None:
        for follower in self._followers:
            follower.send(message)


class LeadingRunner(ModelRunner):
    """Runs each batch on all ranks.

    The KV that a step writes is complete on every rank once it is complete on this one's stream: after a layer has
    written it, the ranks sum that layer's output, and no rank has the sum before all others have come to it. So a mark
    of this rank's device stands for all of them.
    """

    def __init__(self, model: LoadedModel, backend: AttentionBackend, pool: Tensor, team: Team) -> None:
        super().__init__(model, backend, pool)
        self._team = team

    @override
    @torch.inference_mode()
    def forward(self, batch: PackedBatch, between_layers: Callable[[], None] = lambda: None) -> Tensor | None:
        group, errors, sums_before_attention = self._team.group, list[Exception](), [0]

        def before_attention() -> None:
            # What fails beside the step must not keep this rank from the sums for which the others wait.
            if not errors and (error := error_of(between_layers)) is not None:
                errors.append(error)
            sums_before_attention[0] = group.num_reductions

        self._team.announce(batch)
        with noted_on_error(self._team.resync_after), self._team.naming():
            loaded = self.load(batch)
            self.fill_late_inputs(batch, loaded)
            group.broadcast(loaded.input_ids)
            logits = self.compute(loaded, before_attention)
        assert group.num_reductions > sums_before_attention[0], (
            "no sum follows the last layer's KV: marks prove nothing"
        )
        if errors:
            raise errors[0]
        return logits
