"""A rank other than 0: a process that loads its shard of a model and computes the steps that rank 0 announces.

It has no scheduler and no sampler, and talks to the other ranks only. It ends when rank 0's process does, whatever it
is doing then.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import TypeVar

import torch

from tandem.engine.kv_pool import paged_view
from tandem.engine.loader import load_model
from tandem.engine.model_check import make_checked_backend
from tandem.engine.model_runner import ModelRunner
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
from tandem.engine.tensor_parallel.shared_pool import map_shard
from tandem.protocol.errors import ConfigError
from tandem.protocol.fault_boundary import error_of

logger = logging.getLogger(__name__)

RESYNC_TIMEOUT_S = 10.0  # for all ranks to notice that a step failed, if it failed on all

M = TypeVar("M")


def main(connection: Connection, store: str, lifeline: int) -> None:
    """Obey rank 0 until it closes the connection. `store` is the file by which the ranks find each other.

    `lifeline` is a pipe into which only rank 0 could write: it breaks when that process is gone.
    """
    _end_with_rank_0(lifeline)
    error = error_of(_follow, connection, store)
    if error is not None and not isinstance(error, EOFError | ConnectionError):
        # Rank 0 knows more about which rank was lost, and tells the user what to correct.
        if not isinstance(error, RanksLost | ConfigError):
            logger.error("this rank failed", exc_info=error)
        with suppress(OSError):  # rank 0 is gone
            connection.send(RankFailed(f"{type(error).__name__}: {error}"))
    os._exit(0 if error is None else 1)  # at once: other ranks may wait for this one, and there is nothing to clean up


def _follow(connection: Connection, store: str) -> None:
    load = _expect(connection, Load)
    group = RankGroup(load.rank, load.config.tensor_parallel_size)
    try:
        _load_and_serve(connection, store, load, group)
    finally:
        group.close()


def _load_and_serve(connection: Connection, store: str, load: Load, group: RankGroup) -> None:
    def join(device: torch.device) -> None:
        connection.send(Loaded())
        _expect(connection, Connect)
        group.connect(store, device)

    torch.set_num_threads(load.num_threads)
    model, backend = make_checked_backend(load_model(load.config, group, join), load.config)
    connection.send(Ready())
    shared = _expect(connection, MapPool)
    file = recv_handle(connection) if shared.has_file else None
    runner = ModelRunner(model, backend, paged_view(map_shard(shared.handle, file)))
    connection.send(Ready())
    _serve(connection, group, runner)


def _serve(connection: Connection, group: RankGroup, runner: ModelRunner) -> None:
    while True:
        message = connection.recv()
        if isinstance(message, Resync):  # the step that failed there was over here
            connection.send(Ready())
            continue
        error = error_of(_compute, group, runner, message)
        if error is None:
            continue
        if isinstance(error, RanksLost | torch.AcceleratorError):
            raise error
        logger.warning("a step failed: %s", error)
        if not connection.poll(RESYNC_TIMEOUT_S):
            raise error  # it failed here alone
        _expect(connection, Resync)
        connection.send(Ready())


def _compute(group: RankGroup, runner: ModelRunner, step: ComputeStep) -> None:
    batch = runner.load(step.batch)
    group.broadcast(batch.input_ids)
    runner.compute(batch)


def _expect(connection: Connection, kind: type[M]) -> M:
    message: Message = connection.recv()
    if not isinstance(message, kind):
        raise RuntimeError(
            f"rank 0 said {type(message).__name__} instead of {kind.__name__}: the ranks are out of step"
        )
    return message


def _end_with_rank_0(lifeline: int) -> None:
    """Let the kernel kill this process once rank 0's is gone, even if this one is stopped or runs no Python."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it was gone before
        os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    main(Connection(int(sys.argv[1])), f"/proc/self/fd/{sys.argv[2]}", int(sys.argv[3]))
