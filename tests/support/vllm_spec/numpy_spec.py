"""vLLM's tiered offloading on CPUs: its own scheduler side, with a worker that copies blocks by numpy.

vLLM 0.32 copies with CUDA only, and refuses other devices (`kv_offload/cpu/spec.py`). A server that has this folder in
its PYTHONPATH uses it with `spec_name` NumpySpec and `spec_module_path` numpy_spec.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class NumpyWorker(OffloadingWorker):
    """Copies at once. Chunks are blocks of one group of layers."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._pool = [cache.tensor.numpy() for cache in caches.tensors]
        self._host = [region.create_next_worker_view(cache.page_size_bytes).numpy() for cache in caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._pool, src_spec.block_ids, self._host, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._host, src_spec.block_ids, self._pool, dst_spec.block_ids)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Do nothing: a job is complete when it was submitted."""

    def _copy(self, job_id: int, source: list[Any], source_ids: Any, target: list[Any], target_ids: Any) -> bool:
        assert len(source_ids) == len(target_ids), "a chunk is a block"
        began_s = time.perf_counter()
        for source_pages, target_pages in zip(source, target, strict=True):
            target_pages[target_ids] = source_pages[source_ids]
        num_bytes = len(source_ids) * int(np.sum([pages.shape[1] for pages in source]))
        self._finished.append(TransferResult(job_id, True, num_bytes, time.perf_counter() - began_s))
        return True


class NumpySpec(TieringOffloadingSpec):
    def get_manager(self) -> OffloadingManager:
        is_first, manager = self._manager is None, super().get_manager()
        region = self._scheduler_mmap
        if is_first and region is not None:
            assert not region._creator, "the worker has mapped it already"
            Path(region.mmap_path).unlink()  # otherwise it stays for ever when the server is killed
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = NumpyWorker(kv_caches, region)
        return self._worker
