from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.cpu.kinds import VARIABLE, kernel_kinds
from tandem.engine.engine import Engine
from tandem.engine.graphs import recorder
from tandem.engine.graphs.capture import MakeRecorder
from tandem.protocol.config import EngineConfig
from tests.support.architectures import SERVED, WRAPPERS, save_model
from tests.support.device import DEVICE
from tests.support.plain_pack import check_packing
from tests.support.tiny_llama import save_tiny_text_model

BuildEngine = Callable[..., Engine]


@pytest.fixture(
    params=[("vectors", torch.float32), *((kind, torch.bfloat16) for kind in ("vectors", "avx512_bf16", "amx_bf16"))],
    ids=lambda param: f"{param[0]}-{str(param[1]).removeprefix('torch.')}",
)
def cpu_dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """An element type, with each kind of kernels that computes it."""
    kind, dtype = request.param
    if kind not in kernel_kinds():
        pytest.skip(f"this CPU has no {kind}")
    monkeypatch.setenv(VARIABLE, kind)
    return dtype  # type: ignore[no-any-return]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # Tiny models gain nothing from more, and idle OpenMP threads spin. test_attention.py asks for two where it matters.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of an architecture's model, which is written once per session."""
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = save_model(tmp_path_factory.mktemp("model") / "model", {**SERVED, **WRAPPERS}[name])
        return folders[name]

    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a context of 512 tokens."""
    return save_tiny_text_model(tmp_path_factory.mktemp("text"), max_model_len=512)


@pytest.fixture(scope="session")
def build_engine(model_folder: Callable[[str], Path]) -> BuildEngine:
    """Makes an engine on `DEVICE` whose pool has exactly `num_blocks`. None: many, which takes half the time.

    Each batch that it packs is compared with what its chunks say.
    """
    block_bytes: dict[tuple[object, ...], int] = {}

    def build(
        name: str = "llama",
        *,
        num_blocks: int | None = 200,
        dtype: str = "float32",
        make_recorder: MakeRecorder = recorder.make_recorder,
        **settings: Any,
    ) -> Engine:
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "model": str(model_folder(name)), **settings}
        device = DEVICE if make_recorder is recorder.make_recorder else "cpu"  # those of tests record a CPU's work
        large = EngineConfig(dtype=dtype, device=device, pool_bytes=64 << 20, **options)
        if num_blocks is None:
            return check_packing(Engine(large, make_recorder=make_recorder))
        kind = (name, dtype, settings.get("block_size"), settings.get("kv_cache_dtype"))
        if kind not in block_bytes:  # a model tells its geometry once it is loaded
            block_bytes[kind] = Engine(replace(large, tensor_parallel_size=1)).block_bytes
        config = replace(large, pool_bytes=block_bytes[kind] * num_blocks)
        return check_packing(Engine(config, make_recorder=make_recorder))

    return build
