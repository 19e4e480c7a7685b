from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import router.digest_memo
from protocol.digest import block_digests, chain_digests
from router.digest_memo import SEGMENT_TOKENS, DigestMemo


@settings(max_examples=100, deadline=None)
@given(
    chats=st.lists(st.tuples(st.sampled_from([b"a" * 16, b"b" * 16]), st.integers(0, 3 * SEGMENT_TOKENS)), max_size=8),
    block_size=st.sampled_from([1, 16, 48, 2 * SEGMENT_TOKENS]),
    max_segments=st.integers(1, 3),
)
def test_equals_hashing_it_all_again(chats: list[tuple[bytes, int]], block_size: int, max_segments: int) -> None:
    memo = DigestMemo(max_segments=max_segments)
    for root, num_tokens in chats:
        token_ids = [token % 977 for token in range(num_tokens)]
        for asked in (token_ids, [*token_ids[:-1], 5]):
            assert memo.digests(root, asked, block_size) == block_digests(root, asked, block_size)
        assert len(memo) <= 2 * max_segments


def test_hashes_a_growing_chat_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashed: list[int] = []

    def counting(parent: bytes, data: bytes, block_bytes: int) -> list[bytes]:
        num_hashed.append(len(data) // block_bytes)
        return chain_digests(parent, data, block_bytes)

    monkeypatch.setattr(router.digest_memo, "chain_digests", counting)
    memo, chat = DigestMemo(), list(range(5 * SEGMENT_TOKENS))
    memo.digests(b"root", chat[: 2 * SEGMENT_TOKENS + 32], 16)
    assert num_hashed == [64, 64, 2]
    memo.digests(b"root", chat[: 3 * SEGMENT_TOKENS + 16], 16)
    assert num_hashed == [64, 64, 2, 64, 1]
    memo.digests(b"other", chat[: 2 * SEGMENT_TOKENS], 16)
    assert num_hashed == [64, 64, 2, 64, 1, 64, 64, 0]


def test_keeps_what_is_asked_for_and_forgets_the_rest() -> None:
    memo = DigestMemo(max_segments=2)
    prompts = [[number] * SEGMENT_TOKENS for number in range(5)]
    kept = memo.digests(b"root", prompts[0], 16)
    for prompt in prompts[1:]:
        memo.digests(b"root", prompt, 16)
        again = memo.digests(b"root", prompts[0], 16)
        assert all(a is b for a, b in zip(again, kept, strict=True)), "hashed again"
    assert len(memo) <= 4
