"""The process group of one link, and the thread that uses it, so that no other thread waits for the peer.

The group has two ranks: NCCL for a pool on a GPU, gloo for one in host memory. It is made without
`init_process_group`, so any number of links can come and go. Both sides carry out the same copies in the same order,
one direction at a time. So one group serves writes and reads, and two sends never block each other.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.kv_transfer.transport.base import is_loopback, pool_shape
from tandem.kv_transfer.transport.shards import byte_pieces
from tandem.protocol.errors import ConfigError, ServingError, TransferError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_DATA_TAG, _UNUSED_TAG = 0, 1
_COMPLETION_POLL_S = 0.0002
SHARD_GAP = 1  # unused piece numbers between two shards, so that no run of neighbouring pieces spans both


class LocalRun(NamedTuple):
    """Pieces `[start, start + num_pieces)` of our pool, all in one shard."""

    start: int
    num_pieces: int


class PairCopy:
    """Our side of one copy: runs to send, or to receive into. The peer has runs of the same lengths."""

    __slots__ = ("is_done", "is_send", "runs")

    def __init__(self, runs: Sequence[LocalRun], *, is_send: bool) -> None:
        self.runs = runs
        self.is_send = is_send
        self.is_done = False


class PairChannel:
    """One side of a link's process group. `rank` is 0 for the side that opened the link and 1 for the other.

    The ranks find each other through `store`; the owner copies its entries to the store of the other side.
    """

    def __init__(
        self, rank: int, shards: Sequence[Tensor], host: str, timeout_s: float, on_change: Callable[[], None]
    ) -> None:
        """`timeout_s` bounds the wait for a live peer that does not take part. The connection reveals a dead peer.

        The thread calls `on_change` when the group is ready or has ended, and when a copy is done.
        """
        self._shards = shards
        self._on_change = on_change
        self._rows: list[Tensor] = []  # the pieces of each shard
        self._rank = rank
        self._host = host
        self.store: Store = dist.HashStore()  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=timeout_s))
        self._timeout_s = timeout_s
        self.is_ready = False
        self.error = ""  # why the group ended; it means nothing after `close`
        self._group: _Group | None = None
        self._is_closed = False
        self._copies: queue.SimpleQueue[PairCopy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-pair", daemon=True)

    def cut(self, pieces: int) -> None:
        """Cut each block into `pieces` pieces; call this first. Raises TransferError if they would not be equal."""
        shape = pool_shape(self._shards)
        if pieces % shape.num_shards or shape.block_bytes % pieces:
            raise TransferError(f"blocks of {shape.block_bytes} bytes cannot be cut into {pieces} pieces")
        self._rows = byte_pieces(self._shards, pieces)

    def holds(self, run: LocalRun) -> bool:
        """Whether one shard of the pool has these pieces."""
        shard, row = divmod(run.start, len(self._rows[0]) + SHARD_GAP)
        in_shard = row + run.num_pieces <= len(self._rows[0])
        return run.start >= 0 and run.num_pieces >= 1 and shard < len(self._rows) and in_shard

    def start(self) -> None:
        """Make the group, as the peer does now, and carry out the submitted copies."""
        self._thread.start()

    def submit(self, runs: Sequence[LocalRun], *, is_send: bool) -> PairCopy:
        """Queue a copy of these runs behind all earlier copies; `is_done` of the result tells when it has ended."""
        copy = PairCopy(runs, is_send=is_send)
        self._copies.put(copy)
        return copy

    def close(self) -> None:
        """Abort the group: nothing is written to our pool after this returns. It takes about a millisecond."""
        self._is_closed = True
        self._copies.put(None)
        if self._group is not None:
            self._group.abort()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end; call this after `close`. A thread that makes its group is left to time out."""
        if self.is_ready:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            group = _make_group(self.store, self._rank, self._host, self._shards[0].device, self._timeout_s)
            # NOTE: this thread sets the group and then reads `_is_closed`. `close` sets `_is_closed` and then reads the
            # group. So one of them sees what the other has set.
            self._group = group
            self.is_ready = True
            self._on_change()
            while not self._is_closed and (copy := self._copies.get()) is not None:
                group.copy(copy, [self._pieces(run) for run in copy.runs])
                copy.is_done = not self._is_closed  # an aborted group may return without an error
                self._on_change()
        except (RuntimeError, OSError, ServingError) as exc:  # what torch, a socket or `_make_group` raises
            self.error = str(exc).partition("\n")[0] or type(exc).__name__
        finally:  # the link is lost, whatever ended this thread
            self.error = self.error or "its thread has ended"
            self._on_change()

    def _pieces(self, run: LocalRun) -> Tensor:
        shard, row = divmod(run.start, len(self._rows[0]) + SHARD_GAP)
        return self._rows[shard][row : row + run.num_pieces]


class _Group(Protocol):
    """The operations of a process group that a link uses."""

    def copy(self, copy: PairCopy, tensors: list[Tensor]) -> None:
        """Send these tensors, or receive into them, and wait for the end. Raises what torch raises."""

    def abort(self) -> None:
        """End `copy` now and receive no more bytes. Another thread calls this."""


def _make_group(store: Store, rank: int, host: str, device: torch.device, timeout_s: float) -> _Group:
    if device.type != "cuda":
        return _GlooGroup(store, rank, host, timeout_s)
    if is_loopback(host):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # otherwise NCCL listens on the first network interface
    return _NcclGroup(store, rank, device, timeout_s)


class _GlooGroup:
    """Gloo over TCP. A send waits for its receive, so the bytes go straight into the pool."""

    def __init__(self, store: Store, rank: int, host: str, timeout_s: float) -> None:
        from torch.distributed import ProcessGroupGloo

        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        self._group: Any = ProcessGroupGloo(store, rank, 2, options)
        self._peer = 1 - rank

    def copy(self, copy: PairCopy, tensors: list[Tensor]) -> None:
        start = self._group.send if copy.is_send else self._group.recv
        for work in [start([tensor], self._peer, _DATA_TAG) for tensor in tensors]:
            work.wait()

    def abort(self) -> None:
        # Gloo has no abort, and destroying the group would wait for pending work. But a wait that times out closes the
        # connection in both directions before it returns, which ends all pending work.
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            self._group.recv([nothing], self._peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


class _NcclGroup:
    """NCCL. All runs of a copy are one group of sends or receives, so one kernel moves them."""

    def __init__(self, store: Store, rank: int, device: torch.device, timeout_s: float) -> None:
        try:
            from torch.distributed import ProcessGroupNCCL
        except ImportError as exc:
            raise ConfigError(
                "transport='nccl' with a pool on a GPU needs a build of torch with NCCL; choose 'nixl'"
            ) from exc
        # By default a lost peer would end this process. Both variables are read when the group is made.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # abort communicators, raise nothing elsewhere
        os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._timeout_s = timeout_s
        self._group: Any = ProcessGroupNCCL(store, rank, 2, options)
        self._group.eager_connect_single_device(device)
        self._peer = 1 - rank
        # A stream of its own: a copy must not wait for a model step that was queued before it.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, copy: PairCopy, tensors: list[Tensor]) -> None:
        start = self._group.send if copy.is_send else self._group.recv
        with torch.cuda.stream(self._stream):
            self._group._start_coalescing()
            for tensor in tensors:
                start([tensor], self._peer, _DATA_TAG)
            work = self._group._end_coalescing()
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():  # `wait` would only make the stream wait
            if time.monotonic() >= deadline:
                raise TimeoutError(f"a copy of {len(tensors)} runs did not end in {self._timeout_s:.0f} s")
            time.sleep(_COMPLETION_POLL_S)
        if (error := work.exception()) is not None:
            raise RuntimeError(f"NCCL: {error}")

    def abort(self) -> None:
        self._group.abort()
