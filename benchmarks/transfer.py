"""Bandwidth and latency of the KV transports between two processes of this machine, beside a plain memory copy.

Both sides wait as workers do. By default blocks are as large as 16 tokens of the default model. Contiguous blocks are
one run on both sides; scattered ones are random on both, or on one. Those of a handoff are a prompt's in two pools that
have been full for a while. The memory copy is one thread's, from this process's pool into memory that both processes
share (on a GPU, within this process), in turn with the transfers: what a transport reaches of it is the ratio. A write
is noticed when the other process has its notification, so the time until then includes its bytes.

Stands behind the transports' figures in docs/benchmarks.md.

    python -m benchmarks.transfer
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from operator import truediv
from typing import Any, NamedTuple

import torch
import zmq
from torch import Tensor
from zmq.constants import PollEvent

from benchmarks.common import arguments, beside, print_rows, write_result
from tandem.engine.block_pool import BlockPool
from tandem.kv_transfer.transport.base import Transfer, TransferState, Transport, block_runs
from tandem.kv_transfer.transport.factory import create_transport
from tandem.worker import loop
from tests.support.used_pools import UsedPools

_TIMEOUT_S = 60.0
_WARM_UP_ROUNDS = 3
_NUM_COUNTED = 100
_NUM_EARLIER = 600  # handoffs after which all blocks of the pools have been evicted several times
_REST_S = 0.02  # a busy system gives less time to processes that have just computed


_CHATS: dict[str, Any] = {"num_blocks": 4096, "num_seqs": 16, "prompt_tokens": range(500, 3000), "answer_tokens": 200}
_LONG: dict[str, Any] = {"num_seqs": 3, "prompt_tokens": range(8000, 14000)}
_USES = {
    "16 chats": _CHATS,
    "16 chats, answers of 30": _CHATS | {"answer_tokens": 30},
    "3 long prompts": _CHATS | _LONG,
    "16 chats, never full": _CHATS | {"num_blocks": 200_000},
}
WITH_PORT = "nixl-port"  # NIXL as between machines and on GPUs


class Blocks(NamedTuple):
    """A transfer's blocks in both pools."""

    local: Sequence[int]
    remote: Sequence[int]


def main() -> None:
    parser = arguments(__doc__, model=False)
    parser.option("--megabytes", 64, "per transfer (MiB)", quick=4)
    parser.option("--rounds", 30, "transfers of each kind", quick=3)
    parser.option("--block-kib", 360)
    parser.option("--device", "cpu", "where both pools are")
    parser.option("--transports", ["nixl", WITH_PORT, "nccl"])
    settings = parser.settings()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        rows = [row for name in settings.transports for row in measure(name, folder, settings)]
    title = f"{settings.megabytes} MiB in blocks of {settings.block_kib} KiB between two processes"
    print_rows(title, rows, f"medians of {settings.rounds} rounds")
    handoffs = _handoff_rows(settings)
    print_rows(f"Descriptors of a handoff, {_NUM_COUNTED} prompts after {_NUM_EARLIER}", handoffs, "means")
    write_result("transfer", settings, {"transfers": rows, "handoffs": handoffs})


def _handoff_rows(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """How many descriptors a prompt takes between two pools that have been in use for a while."""
    rows = []
    for name, use in _USES.items():
        pools = UsedPools(BlockPool, **use, seed=settings.seed)
        pairs = list(itertools.islice(pools.handoffs(), _NUM_EARLIER, _NUM_EARLIER + _NUM_COUNTED))
        runs = {
            "descriptors": [block_runs(*pair) for pair in pairs],
            "runs at the sender": [block_runs(local, local) for local, _ in pairs],
            "at the receiver": [block_runs(remote, remote) for _, remote in pairs],
        }
        means = {what: statistics.mean(map(len, counted)) for what, counted in runs.items()}
        rows.append({"pools": name, "blocks": statistics.mean(len(local) for local, _ in pairs), **means})
    return rows


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
            blocks = _blocks(num_moved, settings.seed)
            return _rows(
                name, blocks, block_bytes, _measure_link(_Link(transport, peer), pool, shared, blocks, settings)
            )
        finally:
            peer.send("stop")
            peer.recv()  # that it has ended


def _create(name: str, worker_id: str, pool: Tensor, folder: str) -> Transport:
    mailbox = "" if name == WITH_PORT else f"ipc://{folder}/{worker_id}-{name}"
    return create_transport(name.split("-")[0], worker_id=worker_id, epoch=1, pool=pool, mailbox=mailbox)


def _run_peer(
    connection: Connection, name: str, folder: str, shape: tuple[int, int], device: str, shared: Tensor
) -> None:
    torch.set_num_threads(1)
    shared[:, 0].sum()  # maps the pages in this process, too
    transport = _create(name, "d", torch.zeros(shape, dtype=torch.uint8, device=device), folder)
    connection.send(transport.local_metadata())
    wait = _Wait(transport, connection)
    while True:
        wait()
        for _ in transport.poll():
            connection.send(time.monotonic())
        if connection.poll():
            if connection.recv() == "stop":
                break
            wait.begun()
    transport.close()
    connection.send("ended")


class _Wait:
    """Waits for a transport, and for a connection, as a worker's loop does."""

    def __init__(self, transport: Transport, *connections: Connection) -> None:
        self._transport = transport
        self._quick_until = 0.0
        self._poller = zmq.Poller()
        for one in (*connections, transport.waker):
            if one is not None:
                self._poller.register(one, PollEvent.POLLIN)

    def begun(self) -> None:
        """A write has begun."""
        self._quick_until = time.monotonic() + loop._QUICK_FOR_S

    def __call__(self) -> None:
        if self._transport.waker is None and time.monotonic() < self._quick_until:
            time.sleep(loop._QUICK_POLL_S)
        else:
            self._poller.poll(loop._TRANSFER_POLL_MS)


class _Link:
    """This process's end of the link to the peer."""

    def __init__(self, transport: Transport, peer: Connection) -> None:
        self._transport = transport
        self._peer = peer
        self._wait = _Wait(transport)

    def write(self, local: Sequence[int], remote: Sequence[int]) -> None:
        """Write these blocks, and wait for the end."""
        transfer = self._transport.write_blocks("d", local, remote, b"written")
        if self._transport.waker is None:
            self._peer.send("begun")
        self._wait.begun()
        self._finish(transfer)

    def read(self, local: Sequence[int], remote: Sequence[int]) -> None:
        """Read these blocks, and wait for the end."""
        self._finish(self._transport.read_blocks("d", remote, local))

    def noticed_at(self) -> float:
        """When the peer had the notification of a write: `time.monotonic()`, which all processes of a machine share."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._peer.poll():
            _check(time.monotonic() < deadline, f"no notification came in {_TIMEOUT_S:.0f} s")
            self._wait()
            self._transport.poll()
        return float(self._peer.recv())

    def _finish(self, transfer: Transfer) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not transfer.is_settled:
            _check(time.monotonic() < deadline, f"a transfer did not end in {_TIMEOUT_S:.0f} s")
            self._wait()
            self._transport.poll()
        _check(transfer.state is TransferState.DONE, f"a transfer ended as {transfer.state.value}")


def _blocks(num_moved: int, seed: int) -> dict[str, Blocks]:
    """The blocks of each kind of transfer, out of pools of twice as many as are moved."""
    rng = random.Random(seed)
    here, there = (rng.sample(range(2 * num_moved), num_moved) for _ in range(2))
    contiguous = range(num_moved)
    return {
        "contiguous": Blocks(contiguous, contiguous),
        "scattered": Blocks(here, there),
        "scattered here": Blocks(here, contiguous),
        "scattered there": Blocks(contiguous, there),
        "of a handoff": _handoff(num_moved, seed),
        "one block": Blocks([0], [0]),
    }


def _handoff(num_moved: int, seed: int) -> Blocks:
    """A prompt's blocks, of pools of twice as many blocks as are moved, in which four sequences decode."""
    lengths = range(2 * num_moved, 4 * num_moved)  # in tokens: an eighth to a quarter of the blocks that are moved
    pools = UsedPools(BlockPool, num_blocks=2 * num_moved, prompt_tokens=lengths, seed=seed)
    return Blocks(*next(itertools.islice(pools.handoffs(), _NUM_EARLIER, None)))


def _measure_link(
    link: _Link, pool: Tensor, shared: Tensor, blocks: dict[str, Blocks], settings: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of each round, by kind of transfer; and until the other side had noticed it, for writes."""
    seconds = defaultdict[str, list[float]](list)
    for _ in range(settings.rounds + _WARM_UP_ROUNDS):
        began = _rest()
        _copy(pool[: len(shared)], shared)
        seconds["memory copy"].append(time.monotonic() - began)
        for name, (local, remote) in blocks.items():
            began = _rest()
            link.write(local, remote)
            seconds[f"write {name}"].append(time.monotonic() - began)
            seconds[f"notice {name}"].append(link.noticed_at() - began)
            began = _rest()
            link.read(local, remote)
            seconds[f"read {name}"].append(time.monotonic() - began)
    _check_bytes(link, pool, *blocks["scattered"])
    return {kind: values[_WARM_UP_ROUNDS:] for kind, values in seconds.items()}


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
    if target.is_cuda:
        torch.cuda.synchronize()


def _check_bytes(link: _Link, pool: Tensor, here: Sequence[int], there: Sequence[int]) -> None:
    """Check that blocks written scattered read back unchanged."""
    expected = pool[here].clone()
    link.write(here, there)
    pool[here] = 0
    link.read(here, there)
    _check(torch.equal(pool[here], expected), "the bytes that came back are not those that were sent")


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RuntimeError(otherwise)


def _rest() -> float:
    """Returns the time after it."""
    time.sleep(_REST_S)
    return time.monotonic()


def _rows(
    name: str, blocks: dict[str, Blocks], block_bytes: int, seconds: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """Medians; rates over that of a copy are of each round, because other load on the machine changes between them."""
    copies, copied = seconds["memory copy"], len(blocks["contiguous"].local) * block_bytes
    rows = []
    for kind, (local, remote) in blocks.items():
        num_bytes, of_copied = len(local) * block_bytes, len(local) * block_bytes / copied
        for verb in ("write", "read"):
            took, noticed = seconds[f"{verb} {kind}"], seconds[f"notice {kind}"] if verb == "write" else [math.nan]
            row = _row(name, f"{verb} {kind}", took, num_bytes)
            row |= {"of a copy": of_copied * statistics.median(map(truediv, copies, took))}
            row |= {"blocks": len(local), "descriptors": len(block_runs(local, remote))}
            rows.append(row | {"noticed ms": 1e3 * statistics.median(noticed)})
    return [*rows, _row(name, "memory copy", copies, copied)]


def _row(name: str, operation: str, took: list[float], num_bytes: int) -> dict[str, Any]:
    took_s = statistics.median(took)
    return {"transport": name, "operation": operation, "ms": 1e3 * took_s, "GB/s": num_bytes / took_s / 1e9}


if __name__ == "__main__":
    main()
