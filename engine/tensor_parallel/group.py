"""One rank's part in the collectives of a tensor parallel model: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.protocol.errors import WorkerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_TIMEOUT = timedelta(seconds=60)  # for the slowest rank to reach a collective: a step's largest product, and a pause


class RanksLost(WorkerError):
    """A rank died, hangs, or is out of step: the worker cannot go on."""


class RankGroup:
    """The ranks of one model, as one of them sees them. Every rank makes the same calls in the same order.

    Collectives return when their result is ordered in the device's stream: on a CPU, when it is complete. They raise
    RanksLost if another rank is gone or does not take part in time.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.num_reductions = 0
        self._group: Any = None
        self._is_cpu = True

    def connect(self, path: str, device: torch.device) -> None:
        """Meet the other ranks, which give the same file. Raises RanksLost if they do not come in time."""
        self._is_cpu = device.type == "cpu"
        with _lost_ranks("meeting the other ranks"):
            store: Store = dist.FileStore(path, self.size)  # type: ignore[attr-defined]
            store.set_timeout(_TIMEOUT)
            self._group = self._make_gloo(store) if self._is_cpu else self._make_nccl(store, device)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, on every rank with the same bits.

        On a CPU the ranks are added in their order. So a token's result does not depend on where in the batch it is.
        """
        self.num_reductions += 1
        if not self._is_cpu:
            x = x.contiguous()
            with _lost_ranks("a sum over ranks"):
                self._group.allreduce([x]).wait()
            return x
        total, *others = self._gather(x.contiguous())
        for other in others:
            total = total + other
        return total

    def all_gather(self, x: Tensor, width: int) -> Tensor:
        """The ranks' parts [..., n] of a tensor [..., width], whose last dimension is cut as torch.chunk does."""
        part = -(-width // self.size)
        padded = torch.nn.functional.pad(x, (0, part - x.shape[-1])).contiguous()
        return torch.cat(self._gather(padded), dim=-1)[..., :width]

    def broadcast(self, x: Tensor) -> None:
        """Give rank 0's tensor to all, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        with _lost_ranks("a broadcast"):
            self._group.broadcast([x], options).wait()

    def close(self) -> None:
        """Leave; ranks that wait for this one get an error."""
        if self._group is not None and not self._is_cpu:
            self._group.abort()
        self._group = None

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self.size)]
        as_bytes = [part.view(-1).view(torch.uint8) for part in (*parts, x)]
        with _lost_ranks("a gathering"):
            self._group.allgather([as_bytes[:-1]], as_bytes[-1:]).wait()
        return parts

    def _make_gloo(self, store: Store) -> Any:
        from torch.distributed import ProcessGroupGloo

        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        options._threads = 1
        return ProcessGroupGloo(store, self.rank, self.size, options)

    def _make_nccl(self, store: Store, device: torch.device) -> Any:
        from torch.distributed import ProcessGroupNCCL

        torch.cuda.set_device(device)
        options = ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        group: Any = ProcessGroupNCCL(store, self.rank, self.size, options)
        group.eager_connect_single_device(device)
        return group


@contextmanager
def _lost_ranks(doing: str) -> Iterator[None]:
    """Translate torch's errors, which all say that a rank is gone or late."""
    try:
        yield
    except RuntimeError as exc:
        raise RanksLost(f"{doing} failed: {str(exc).partition(chr(10))[0]}") from exc
