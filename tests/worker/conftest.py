from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.engine import model_check
from tandem.engine.attention.reference import ReferenceAttention
from tandem.kv_transfer.transport.in_process import InProcessHub
from tandem.protocol.messages import Role
from tandem.worker.loop import Worker
from tests.support.cluster_harness import RunningWorker, wait_for_loads, worker_config
from tests.support.tiny_llama import save_tiny_text_model


@pytest.fixture
def plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain attention in the place of Triton's kernels, whose interpreter is slow and for one thread only."""
    monkeypatch.setattr(ReferenceAttention, "long_context", 128)  # enough for the check at start
    monkeypatch.setattr(model_check, "make_backend", lambda *_: ReferenceAttention())


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_loads(monkeypatch)


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_text_model(tmp_path_factory.mktemp("text") / "tiny")


@pytest.fixture
def worker(tiny_model: Path) -> Iterator[Worker]:
    running = RunningWorker(Worker(worker_config(tiny_model, "w", Role.COLOCATED), hub=InProcessHub()))
    yield running.worker
    running.stop()
    running.worker.stop()
    assert running.failure is None
