"""Bandwidth and latency of the KV transports between two processes of this machine, beside a plain memory copy.

Both sides poll at an interval, as workers do between the layers of a model. Contiguous blocks are one run on both
sides; scattered ones are random on both. The memory copy is one thread's, from this process's pool into memory that
both processes share, in turn with the transfers: what a transport reaches of it is the ratio.

Stands behind docs/kv_transfer.md, "NIXL without a GPU".

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
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import arguments, beside, ms, print_table, write_result
from tandem.kv_transfer.transport.base import Transfer, TransferState, Transport
from tandem.kv_transfer.transport.factory import create_transport

_WITH_PORT = "nixl with a port"  # as between machines; without a port as between workers of one machine
_TRANSPORTS = ("nixl", _WITH_PORT, "nccl")
_TIMEOUT_S = 60.0
_WARM_UP_ROUNDS = 3
_REST_S = 0.02  # a busy system gives less time to processes that have just computed


def main() -> None:
    parser = arguments(__doc__)
    parser.option("--megabytes", 64, "per transfer (MiB)", quick=4)
    parser.option("--block-kilobytes", 360, "per block (KiB); 360 is 16 tokens of the default model")
    parser.option("--rounds", 30, "transfers of each kind", quick=3)
    parser.option("--poll-ms", 1.0, "how often both sides poll")
    settings = parser.settings()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        results = {name: measure(name, folder, settings) for name in _TRANSPORTS}
    print_table(
        f"{settings.megabytes} MiB in blocks of {settings.block_kilobytes} KiB between two processes",
        ["transport", "operation", "blocks", "ms", "GB/s", "of a memory copy", "one block ms"],
        [row for name, result in results.items() for row in _rows(name, result)],
        caption=f"medians of {settings.rounds} rounds; both sides poll every {settings.poll_ms} ms",
    )
    write_result("transfer", settings, results)


def measure(name: str, folder: str, settings: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each kind of transfer, and of the memory copy in the same rounds."""
    block_bytes = settings.block_kilobytes << 10
    num_moved = max(1, (settings.megabytes << 20) // block_bytes)
    shared = torch.zeros(num_moved, block_bytes, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    pool = torch.randint(0, 256, (2 * num_moved, block_bytes), dtype=torch.uint8)
    arguments_of_peer = (name, folder, len(pool), block_bytes, settings.poll_ms * 1e-3, shared)
    with (
        beside(_run_peer, *arguments_of_peer) as peer,
        contextlib.closing(_create(name, "p", pool, folder)) as transport,
    ):
        transport.add_peer("d", 1, peer.recv())
        try:
            return _measure_link(transport, pool, shared, settings)
        finally:
            peer.send("stop")
            peer.recv()  # that it has ended


def _create(name: str, worker_id: str, pool: Tensor, folder: str) -> Transport:
    mailbox = "" if name == _WITH_PORT else f"ipc://{folder}/{worker_id}-{name}"
    return create_transport(name.split()[0], worker_id=worker_id, epoch=1, pool=pool, mailbox=mailbox)


def _run_peer(
    connection: Connection, name: str, folder: str, num_blocks: int, block_bytes: int, poll_s: float, shared: Tensor
) -> None:
    torch.set_num_threads(1)
    shared[:, 0].sum()  # maps the pages in this process, too
    transport = _create(name, "d", torch.zeros(num_blocks, block_bytes, dtype=torch.uint8), folder)
    connection.send(transport.local_metadata())
    while not connection.poll(poll_s):
        transport.poll()
    transport.close()
    connection.send("ended")


def _measure_link(transport: Transport, pool: Tensor, shared: Tensor, settings: argparse.Namespace) -> dict[str, Any]:
    num_moved = shared.shape[0]
    rng = random.Random(settings.seed)
    contiguous = list(range(num_moved))
    here, there = (rng.sample(range(2 * num_moved), num_moved) for _ in range(2))
    blocks = {"contiguous": (contiguous, contiguous), "scattered": (here, there), "one": ([0], [0])}
    kinds: dict[str, Callable[[], Transfer]] = {}
    for name, (local, remote) in blocks.items():
        kinds[f"write {name}"] = partial(transport.write_blocks, "d", local, remote)
        kinds[f"read {name}"] = partial(transport.read_blocks, "d", remote, local)
    seconds: dict[str, list[float]] = {kind: [] for kind in ("copy", *kinds)}
    for number in range(settings.rounds + _WARM_UP_ROUNDS):
        took = {"copy": _time_of(lambda: shared.copy_(pool[:num_moved]))}
        for kind, start in kinds.items():
            took[kind] = _time_of(lambda start=start: _finish(transport, start(), settings))  # type: ignore[misc]
        if number >= _WARM_UP_ROUNDS:
            for kind, value in took.items():
                seconds[kind].append(value)
    _check_bytes(transport, pool, here, there, settings)
    # Per round, because other load on the machine changes between rounds.
    of_copy = {kind: [copy / took for copy, took in zip(seconds["copy"], seconds[kind], strict=True)] for kind in kinds}
    return {
        "num_bytes": shared.numel(),
        "seconds": {kind: statistics.median(values) for kind, values in seconds.items()},
        "of_copy": {kind: statistics.median(values) for kind, values in of_copy.items()},
    }


def _finish(transport: Transport, transfer: Transfer, settings: argparse.Namespace) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not transfer.is_settled:
        if time.monotonic() >= deadline:
            raise RuntimeError(f"a transfer did not end in {_TIMEOUT_S:.0f} s")
        time.sleep(settings.poll_ms * 1e-3)
        transport.poll()
    if transfer.state is not TransferState.DONE:
        raise RuntimeError(f"a transfer ended as {transfer.state.value}")


def _check_bytes(
    transport: Transport, pool: Tensor, here: Sequence[int], there: Sequence[int], settings: argparse.Namespace
) -> None:
    """Check that blocks written scattered read back unchanged."""
    expected = pool[here].clone()
    _finish(transport, transport.write_blocks("d", here, there), settings)
    pool[here] = 0
    _finish(transport, transport.read_blocks("d", there, here), settings)
    if not torch.equal(pool[here], expected):
        raise RuntimeError("the bytes that came back are not those that were sent")


def _time_of(action: Callable[[], object]) -> float:
    time.sleep(_REST_S)
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _rows(name: str, result: dict[str, Any]) -> list[list[object]]:
    seconds, num_bytes = result["seconds"], result["num_bytes"]
    copy_s = seconds["copy"]
    rows: list[list[object]] = [[name, "memory copy", "contiguous", ms(copy_s), num_bytes / copy_s / 1e9, 1.0, "-"]]
    for operation in ("write", "read"):
        for blocks in ("contiguous", "scattered"):
            kind = f"{operation} {blocks}"
            one = ms(seconds[f"{operation} one"]) if blocks == "contiguous" else "-"
            rate = num_bytes / seconds[kind] / 1e9
            rows.append([name, operation, blocks, ms(seconds[kind]), rate, result["of_copy"][kind], one])
    return rows


if __name__ == "__main__":
    main()
