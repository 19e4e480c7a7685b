"""Bandwidth and latency of the KV transports between two processes of this machine, beside a plain memory copy.

Both sides poll every millisecond, as workers do between the layers of a model. By default blocks are as large as 16
tokens of the default model. Contiguous blocks are one run on both sides; scattered ones are random on both. The memory
copy is one thread's, from this process's pool into memory that both processes share (on a GPU, within this process), in
turn with the transfers: what a transport reaches of it is the ratio.

Stands behind the transports' figures in docs/benchmarks.md.

    python -m benchmarks.transfer
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from operator import truediv
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import arguments, beside, print_rows, write_result
from tandem.kv_transfer.transport.base import Transfer, TransferState, Transport
from tandem.kv_transfer.transport.factory import create_transport

_POLL_S = 1e-3
_TIMEOUT_S = 60.0
_WARM_UP_ROUNDS = 3
_REST_S = 0.02  # a busy system gives less time to processes that have just computed


def main() -> None:
    parser = arguments(__doc__, model=False)
    parser.option("--megabytes", 64, "per transfer (MiB)", quick=4)
    parser.option("--rounds", 30, "transfers of each kind", quick=3)
    parser.option("--block-kib", 360)
    parser.option("--device", "cpu", "where both pools are")
    parser.option("--transports", ["nixl", "nccl"])
    settings = parser.settings()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        rows = [row for name in settings.transports for row in measure(name, folder, settings)]
    title = f"{settings.megabytes} MiB in blocks of {settings.block_kib} KiB between two processes"
    print_rows(title, rows, f"medians of {settings.rounds} rounds; both sides poll every ms")
    write_result("transfer", settings, rows)


def measure(name: str, folder: str, settings: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each kind of transfer, and for the memory copy in the same rounds."""
    block_bytes = settings.block_kib << 10
    num_moved = max(1, (settings.megabytes << 20) // block_bytes)
    pool = torch.randint(0, 256, (2 * num_moved, block_bytes), dtype=torch.uint8, device=settings.device)
    shared = torch.zeros_like(pool[:num_moved])
    if not shared.is_cuda:
        shared.share_memory_()  # type: ignore[no-untyped-call]
    with (
        beside(_run_peer, name, folder, tuple(pool.shape), settings.device, shared.cpu()) as peer,
        contextlib.closing(_create(name, "p", pool, folder)) as transport,
    ):
        transport.add_peer("d", 1, peer.recv())
        try:
            return _rows(name, shared, _measure_link(transport, pool, shared, settings))
        finally:
            peer.send("stop")
            peer.recv()  # that it has ended


def _create(name: str, worker_id: str, pool: Tensor, folder: str) -> Transport:
    return create_transport(name, worker_id=worker_id, epoch=1, pool=pool, mailbox=f"ipc://{folder}/{worker_id}-{name}")


def _run_peer(
    connection: Connection, name: str, folder: str, shape: tuple[int, int], device: str, shared: Tensor
) -> None:
    torch.set_num_threads(1)
    shared[:, 0].sum()  # maps the pages in this process, too
    transport = _create(name, "d", torch.zeros(shape, dtype=torch.uint8, device=device), folder)
    connection.send(transport.local_metadata())
    while not connection.poll(_POLL_S):
        transport.poll()
    transport.close()
    connection.send("ended")


def _measure_link(
    transport: Transport, pool: Tensor, shared: Tensor, settings: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of each round, by kind of transfer."""
    num_moved = shared.shape[0]
    rng = random.Random(settings.seed)
    contiguous = list(range(num_moved))
    here, there = (rng.sample(range(2 * num_moved), num_moved) for _ in range(2))
    blocks = {"contiguous": (contiguous, contiguous), "scattered": (here, there), "one block": ([0], [0])}
    kinds: dict[str, Callable[[], object]] = {"memory copy": lambda: _copy(pool[:num_moved], shared)}
    for name, (local, remote) in blocks.items():
        kinds[f"write {name}"] = partial(_move, transport, transport.write_blocks, local, remote)
        kinds[f"read {name}"] = partial(_move, transport, transport.read_blocks, remote, local)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(settings.rounds + _WARM_UP_ROUNDS):
        for kind, action in kinds.items():
            seconds[kind].append(_time_of(action))
    _check_bytes(transport, pool, here, there)
    return {kind: values[_WARM_UP_ROUNDS:] for kind, values in seconds.items()}


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
    if target.is_cuda:
        torch.cuda.synchronize()


def _move(transport: Transport, start: Callable[..., Transfer], source: Sequence[int], target: Sequence[int]) -> None:
    """Start a transfer with the peer, and wait for its end."""
    transfer, deadline = start("d", source, target), time.monotonic() + _TIMEOUT_S
    while not transfer.is_settled:
        if time.monotonic() >= deadline:
            raise RuntimeError(f"a transfer did not end in {_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)
        transport.poll()
    if transfer.state is not TransferState.DONE:
        raise RuntimeError(f"a transfer ended as {transfer.state.value}")


def _check_bytes(transport: Transport, pool: Tensor, here: Sequence[int], there: Sequence[int]) -> None:
    """Check that blocks written scattered read back unchanged."""
    expected = pool[here].clone()
    _move(transport, transport.write_blocks, here, there)
    pool[here] = 0
    _move(transport, transport.read_blocks, there, here)
    if not torch.equal(pool[here], expected):
        raise RuntimeError("the bytes that came back are not those that were sent")


def _time_of(action: Callable[[], object]) -> float:
    time.sleep(_REST_S)
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _rows(name: str, moved: Tensor, seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Medians; rates over that of a copy are of each round, because other load on the machine changes between them."""
    rows = []
    for kind, values in seconds.items():
        num_moved = moved[0].nbytes if kind.endswith("one block") else moved.nbytes
        took_s, of_copy = statistics.median(values), statistics.median(map(truediv, seconds["memory copy"], values))
        row: dict[str, Any] = {"transport": name, "operation": kind, "ms": 1e3 * took_s}
        rows.append(row | {"GB/s": num_moved / took_s / 1e9, "of a memory copy": of_copy * num_moved / moved.nbytes})
    return rows


if __name__ == "__main__":
    main()
