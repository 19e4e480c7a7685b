"""The recorder of CUDA graphs, over a fake of torch's calls: in which order it makes them, and how it fails."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.graphs.recorder import CudaGraphRecorder, NotRecordable, _borrow
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


def test_work_with_cuts_is_captured_in_pieces(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.engine.graphs.recorder._borrow", lambda tensor: f"borrowed {tensor}")
    recorder = CudaGraphRecorder(torch.device("cuda"))
    given: list[Any] = []

    def work() -> None:
        for name in ("first", "second"):
            cuda.note(name)
            given.append(recorder.cut([name]))  # type: ignore[list-item]
        cuda.note("last")

    assert len(recorder.record(work)) == 3
    begin = "begin in pool, thread_local"
    assert cuda.calls[cuda.calls.index(begin) :] == [
        *(begin, "first", "end"),
        *(begin, "second", "end"),
        *(begin, "last", "end"),
        *("leave side", "caller waits for side"),
    ]
    assert given == [None] * 4 + [["borrowed first"], ["borrowed second"]]
    assert recorder.cut([]) is None
    assert recorder.graph_bytes(33) - recorder.graph_bytes(1) == 32 << 18


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_borrowed_tensor_is_the_same_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over numpy's interface, of which that of CUDA is a copy for memory on a device."""

    def as_tensor(memory: Any, device: torch.device) -> torch.Tensor:
        fields = {**memory.__cuda_array_interface__, "version": 3}
        return original(np.asarray(SimpleNamespace(__array_interface__=fields)))

    original = torch.as_tensor
    whole = torch.arange(120, dtype=dtype).view(4, 6, 5)
    heads = whole.transpose(0, 1)[:, 1:3]
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    borrowed = _borrow(heads)
    assert borrowed.dtype is dtype
    assert torch.equal(borrowed, heads)
    borrowed[3] = -1
    assert (heads[3] == -1).all()
    assert borrowed.data_ptr() == heads.data_ptr()


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
    recorder = CudaGraphRecorder(torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"legacy stream depend .* start with --cuda-graphs off"):
        recorder.record(lambda: recorder.cut([]))
    assert gc.isenabled()
    assert recorder.cut([]) is None


def test_memory_that_runs_out_is_told_before_a_capture_and_refuses_the_start_within(cuda: FakeCuda) -> None:
    """Before it, the steps are served without graphs. Within, nothing was freed in time: the cache is empty."""

    def work() -> None:
        if calls_left.pop():
            raise torch.OutOfMemoryError("CUDA out of memory")

    calls_left = [True]
    with pytest.raises(NotRecordable, match="out of memory"):
        CudaGraphRecorder(torch.device("cuda")).record(work)
    assert "empty cache" not in cuda.calls
    calls_left = [True, False, False]
    with pytest.raises(ConfigError, match=r"CUDA out of memory; start with --cuda-graphs off"):
        CudaGraphRecorder(torch.device("cuda")).record(work)
