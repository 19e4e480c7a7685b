"""Copies of tensors to host memory that do not wait for a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tandem.engine.device import DeviceStream, Mark
from tandem.worker.kv.host_buffers import HostBuffers


class HostCopy:
    """A copy in host memory of `data` [n, bytes], which work of this stream computes. On a CPU it is `data` itself.

    On a GPU it is copied into pinned memory on a side stream, after the kernels that compute `data`. The next step does
    not wait for it.
    """

    def __init__(self, data: Tensor, stream: DeviceStream, buffers: HostBuffers) -> None:
        self.num_bytes = data.numel() * data.element_size()
        self._stream = stream
        self._host, self._arrival = _begin_copy(data, buffers) if data.is_cuda else (data, stream.record())

    @property
    def is_done(self) -> bool:
        """Whether all bytes have arrived."""
        return self._stream.is_done(self._arrival)

    @property
    def host(self) -> Tensor:
        """The copy, once it is done."""
        assert self.is_done
        return self._host


def _begin_copy(data: Tensor, buffers: HostBuffers) -> tuple[Tensor, Mark]:
    stream = _side_stream(data.device)
    stream.wait_stream(torch.cuda.current_stream(data.device))
    host = buffers.take(*data.shape)
    with torch.cuda.stream(stream):
        host.copy_(data, non_blocking=True)
        data.record_stream(stream)  # the allocator does not reuse its memory before the copy has read it
        arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrival.record(stream)
    return host, arrival


@functools.lru_cache(maxsize=16)
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
