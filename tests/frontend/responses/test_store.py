from __future__ import annotations

import pytest

from tandem.frontend.response_store import MAX_AGE_S, LocalResponses, ResponseNotFound, StoredResponse


def response(name: str, tenant: str = "a", num_bytes: int = 100) -> StoredResponse:
    return StoredResponse(name, tenant, b"{}", b"x" * num_bytes, "c")


async def test_the_oldest_responses_are_forgotten() -> None:
    store = LocalResponses(max_bytes=1000)
    for i in range(50):
        await store.put(response(str(i)))
        assert store.num_bytes <= 1000
    store.check_integrity()
    assert store.num_bytes > 0
    assert await store.get("49", "a", "p") == response("49")
    with pytest.raises(ResponseNotFound):
        await store.get("0", "a", "p")


async def test_a_response_larger_than_the_store_is_not_kept() -> None:
    store = LocalResponses(max_bytes=50)
    await store.put(response("1"))
    assert not store.response_ids
    assert store.num_bytes == 0


async def test_responses_end_with_their_day() -> None:
    now = 0.0
    store = LocalResponses(clock=lambda: now)
    await store.put(response("1"))
    now = MAX_AGE_S + 1
    with pytest.raises(ResponseNotFound):
        await store.get("1", "a", "p")
    await store.put(response("2"))
    assert store.response_ids == ["2"]


async def test_a_tenant_that_stores_much_costs_others_nothing() -> None:
    store = LocalResponses(max_bytes=10_000)
    for i in range(5):
        await store.put(response(f"b{i}", tenant="b"))
    for i in range(300):
        await store.put(response(f"a{i}", num_bytes=100 * (i % 7 + 1)))
    assert [name for name in store.response_ids if name.startswith("b")] == [f"b{i}" for i in range(5)]
    assert "a299" in store.response_ids
    store.check_integrity()
    assert store.num_bytes <= 10_000
    for name in store.response_ids:
        await store.delete(name, name[0], "p")
    store.check_integrity()
    assert not store.response_ids
    assert store.num_bytes == 0
