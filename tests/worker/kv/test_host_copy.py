from __future__ import annotations

import time

import pytest
import torch

from tandem.engine.device import CudaStream, HostStream
from tandem.worker.kv.host_buffers import CudaPages, HostBuffers, PinnedBuffers
from tandem.worker.kv.host_copy import HostCopy
from tests.support.cluster_harness import DEADLINE_S

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_on_a_cpu_it_is_there_at_once_and_is_not_a_copy() -> None:
    data = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    copy = HostCopy(data, HostStream(), HostBuffers())
    assert copy.is_done
    assert copy.host.data_ptr() == data.data_ptr()
    assert copy.num_bytes == 6


@needs_cuda
def test_on_a_gpu_it_arrives_behind_what_computes_it_and_nobody_waits() -> None:
    device = torch.device("cuda")
    data = torch.zeros(64, 1 << 20, dtype=torch.uint8, device=device)
    torch.cuda._sleep(200_000_000)  # cycles
    data += 7
    buffers = PinnedBuffers(100 << 20, CudaStream(device), CudaPages())
    copy = HostCopy(data, CudaStream(device), buffers)
    assert not copy.is_done
    del data
    other = torch.full((64, 1 << 20), 9, dtype=torch.uint8, device=device)  # would take the freed memory
    deadline = time.monotonic() + DEADLINE_S
    while not copy.is_done:
        assert time.monotonic() < deadline
    assert bool((copy.host == 7).all())
    assert copy.host.is_pinned()
    assert int(other[0, 0]) == 9
    assert buffers.num_free_bytes == 36 << 20
    del copy
    torch.cuda.synchronize()
    assert buffers.num_free_bytes == 100 << 20
    buffers.close()
