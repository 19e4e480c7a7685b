"""The recorder of CUDA graphs, over a fake of torch's calls: in which order it makes them, and how it fails."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tandem.engine.graphs.recorder import CudaGraphRecorder, NotRecordable
from tandem.protocol.errors import ConfigError


class FakeCuda:
    """What is called of torch.cuda, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.sync_mode: Any = 0
        self.capture_error = ""

    def note(self, call: str) -> None:
        self.calls.append(call)

    def graph(self) -> FakeGraph:
        return FakeGraph(self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.note(f"enter {stream.name}")
        yield
        self.note(f"leave {stream.name}")

    def set_sync_debug_mode(self, mode: Any) -> None:
        self.sync_mode = mode


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.note(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def capture_begin(self, *, pool: str, capture_error_mode: str) -> None:
        assert not gc.isenabled()
        self.cuda.note(f"begin in {pool}, {capture_error_mode}")

    def capture_end(self) -> None:
        if self.cuda.capture_error:
            raise RuntimeError(self.cuda.capture_error)
        self.cuda.note("end")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    caller, side = FakeStream(fake, "caller"), FakeStream(fake, "side")
    monkeypatch.setattr("tandem.engine.graphs.recorder._capture_stream", lambda device: side)
    for name, function in {
        "graph_pool_handle": lambda: "pool",
        "current_stream": lambda device: caller,
        "stream": fake.stream,
        "synchronize": lambda device: fake.note("synchronize"),
        "empty_cache": lambda: fake.note("empty cache"),
        "CUDAGraph": fake.graph,
        "get_sync_debug_mode": lambda: fake.sync_mode,
        "set_sync_debug_mode": fake.set_sync_debug_mode,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return fake


def test_work_is_warmed_up_and_rehearsed_on_the_side_before_it_is_captured(cuda: FakeCuda) -> None:
    recorder = CudaGraphRecorder(torch.device("cuda"))
    recorder.record(lambda: cuda.note(f"work, syncs are {cuda.sync_mode}"))
    assert cuda.calls == [
        "side waits for caller",
        "enter side",
        "work, syncs are 0",
        "work, syncs are error",
        "synchronize",
        "empty cache",
        "begin in pool, thread_local",
        "work, syncs are 0",
        "end",
        "leave side",
        "caller waits for side",
    ]
    assert gc.isenabled()


def test_work_that_waits_for_the_device_is_never_captured(cuda: FakeCuda) -> None:
    def work() -> None:
        if cuda.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(NotRecordable, match="called a synchronizing CUDA operation"):
        CudaGraphRecorder(torch.device("cuda")).record(work)
    assert cuda.sync_mode == 0
    assert not [call for call in cuda.calls if call.startswith("begin")]


def test_a_capture_that_fails_refuses_the_start(cuda: FakeCuda) -> None:
    cuda.capture_error = "operation would make the legacy stream depend on a capturing blocking stream"
    with pytest.raises(ConfigError, match=r"legacy stream depend .* start with --cuda-graphs off"):
        CudaGraphRecorder(torch.device("cuda")).record(lambda: None)
    assert gc.isenabled()
