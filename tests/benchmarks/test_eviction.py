from __future__ import annotations

from benchmarks.eviction import S3FIFO
from tests.kv_transfer.test_eviction import evict, store


def test_s3_fifo_keeps_what_was_used_again_through_a_scan() -> None:
    policy = S3FIFO(20)
    store(policy, "x", "y", "z")
    store(policy, "x", "y", "z")
    for idx in range(100):
        store(policy, idx, -1 - idx)
        evict(policy, len(policy) - 20)
    assert {"x", "y", "z"} <= set(policy)


def test_s3_fifo_puts_a_key_that_returns_after_its_eviction_into_the_main_queue() -> None:
    policy = S3FIFO(10)
    store(policy, "a", "b")
    for idx in range(9):
        store(policy, idx)
    evict(policy, 2)
    assert not {"a", "b"} & set(policy)
    store(policy, "a", "b")
    for idx in range(9, 100):
        store(policy, idx)
        evict(policy, len(policy) - 10)
    assert {"a", "b"} <= set(policy)
