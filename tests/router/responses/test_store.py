from __future__ import annotations

import pytest

from tandem.router.openai.schema import ChatMessage
from tandem.router.responses.store import MAX_AGE_S, ResponseNotFound, ResponseStore

MESSAGES = [ChatMessage(role="user", content="x" * 100)]


def test_the_oldest_responses_are_forgotten() -> None:
    store = ResponseStore(max_bytes=1000)
    for i in range(50):
        store.put("a", {"id": str(i)}, MESSAGES, "c")
        assert store._num_bytes <= 1000
    assert store._num_bytes == sum(one.num_bytes for one in store._responses.values()) > 0
    assert store.get("49", "a", param="p").conversation() == MESSAGES
    with pytest.raises(ResponseNotFound):
        store.get("0", "a", param="p")


def test_a_response_larger_than_the_store_is_not_kept() -> None:
    store = ResponseStore(max_bytes=50)
    store.put("a", {"id": "1"}, MESSAGES, "c")
    assert not store._responses
    assert store._num_bytes == 0


def test_responses_end_with_their_day() -> None:
    now = 0.0
    store = ResponseStore(clock=lambda: now)
    store.put("a", {"id": "1"}, MESSAGES, "c")
    now = MAX_AGE_S + 1
    with pytest.raises(ResponseNotFound):
        store.get("1", "a", param="p")
    store.put("a", {"id": "2"}, MESSAGES, "c")
    assert list(store._responses) == ["2"]
