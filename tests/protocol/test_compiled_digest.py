"""protocol/_digest.c gives the same digests as the Python code in protocol/digest.py."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tandem.protocol.digest import DIGEST_BYTES, TOKEN_BYTES, python_chain_digests, python_token_bytes

compiled = pytest.importorskip("tandem.protocol._digest", reason="not built here: no C compiler or Python headers")

CHAINS = pytest.mark.parametrize("chain_digests", [compiled.chain_digests, python_chain_digests])
TOKENS = pytest.mark.parametrize("token_bytes", [compiled.token_bytes, python_token_bytes])


def by_hashlib(parent: bytes, data: bytes, block_bytes: int) -> list[bytes]:
    """The definition."""
    digests = []
    for start in range(0, len(data), block_bytes):
        message = parent + data[start : start + block_bytes]
        parent = hashlib.blake2b(message, person=b"tandem.block.v2", digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
    return digests


@pytest.mark.parametrize("seed", range(4))
def test_chains_are_those_of_hashlib_and_of_python(seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(1000):
        parent_bytes = rng.choice([0, DIGEST_BYTES, DIGEST_BYTES, rng.randrange(300)])
        block_bytes = rng.choice([64, rng.randrange(1, 300)])
        parent, data = rng.randbytes(parent_bytes), rng.randbytes(block_bytes * rng.randrange(6))
        expected = by_hashlib(parent, data, block_bytes)
        assert compiled.chain_digests(parent, data, block_bytes) == expected
        assert python_chain_digests(parent, data, block_bytes) == expected


@pytest.mark.parametrize("message_bytes", [17, 127, 128, 129, 255, 256, 257, 8192])
def test_messages_around_whole_chunks_of_the_hash(message_bytes: int) -> None:
    data = random.Random(message_bytes).randbytes(3 * (message_bytes - DIGEST_BYTES))
    parent, block_bytes = b"p" * DIGEST_BYTES, message_bytes - DIGEST_BYTES
    assert compiled.chain_digests(parent, data, block_bytes) == by_hashlib(parent, data, block_bytes)


@pytest.mark.parametrize("num_tokens", [8192, 8193, 40_000])  # above 8,192 the GIL is released meanwhile
def test_long_prompts(num_tokens: int) -> None:
    data = random.Random(num_tokens).randbytes(num_tokens * TOKEN_BYTES)
    assert compiled.chain_digests(b"root", data, TOKEN_BYTES) == by_hashlib(b"root", data, TOKEN_BYTES)


@TOKENS
@pytest.mark.parametrize("kind", [list, tuple, lambda ids: array("Q", ids)])
def test_tokens_are_four_bytes_each(
    token_bytes: Callable[[Sequence[int]], bytes], kind: Callable[[list[int]], Sequence[int]]
) -> None:
    edges = [0, 1, 255, 2**15 - 1, 2**15, 2**30 - 1, 2**30, 2**31, 2**32 - 1]
    rng = random.Random(0)
    for token_ids in ([], edges, [rng.randrange(2 ** rng.randrange(33)) for _ in range(5000)]):
        assert token_bytes(kind(token_ids)) == b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)


@TOKENS
def test_tokens_may_be_a_range_or_their_own_kind_of_int(token_bytes: Callable[[Sequence[int]], bytes]) -> None:
    class Token(int):
        pass

    assert token_bytes(range(300)) == array("I", range(300)).tobytes()
    assert token_bytes([Token(7), True]) == bytes([7, 0, 0, 0, 1, 0, 0, 0])


@TOKENS
@pytest.mark.parametrize("wrong", [-1, -(2**30), 2**32, 2**64, -(2**64)])
def test_a_token_that_does_not_fit_is_refused(token_bytes: Callable[[Any], bytes], wrong: int) -> None:
    with pytest.raises(OverflowError):
        token_bytes([5, wrong, 6])


@TOKENS
@pytest.mark.parametrize("wrong", [[1.5], ["a"], [None], "ab", 7, None])
def test_values_that_are_not_tokens_are_refused(token_bytes: Callable[[Any], bytes], wrong: object) -> None:
    with pytest.raises(TypeError):
        token_bytes(wrong)


@CHAINS
@pytest.mark.parametrize(("num_bytes", "block_bytes"), [(0, 0), (8, 0), (8, -4), (8, 3), (3, 8)])
def test_data_must_be_whole_blocks(chain_digests: Callable[..., object], num_bytes: int, block_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"{num_bytes} bytes are not blocks of {block_bytes}"):
        chain_digests(b"parent", bytes(num_bytes), block_bytes)


@pytest.mark.parametrize(
    "arguments", [(), (b"p",), (b"p", b"d"), (b"p", b"d", 1, 1), ("p", b"d", 1), (b"p", b"d", 1.0)]
)
def test_wrong_arguments_are_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        compiled.chain_digests(*arguments)


def test_no_references_leak() -> None:
    parent, data, ids, wrong = b"p" * 16, bytes(4000), list(range(1000, 2000)), [1000, -1]

    def use_all() -> None:
        compiled.chain_digests(parent, data, 40)
        compiled.token_bytes(ids)
        compiled.token_bytes(range(1000))
        with pytest.raises(OverflowError):
            compiled.token_bytes(wrong)
        with pytest.raises(ValueError):
            compiled.chain_digests(parent, data, 64)
        with pytest.raises(TypeError):
            compiled.chain_digests(parent, "data", 64)

    held = [parent, data, ids, ids[0], wrong]
    use_all()
    references = [sys.getrefcount(thing) for thing in held]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(200):
            use_all()
        growth = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert [sys.getrefcount(thing) for thing in held] == references
    assert growth < 100_000, f"{growth} bytes in 200 rounds; one list of digests is 5 KB"


def test_other_threads_run_while_a_long_prompt_is_hashed() -> None:
    data, order = bytes(1 << 24), []

    def hash_it() -> None:
        has_begun.set()
        compiled.chain_digests(b"root", data, 1 << 12)
        order.append("hashed")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # no thread is forced to release the GIL
    try:
        for _ in range(20):  # the system may wake us too late, but not each time
            has_begun, thread = threading.Event(), threading.Thread(target=hash_it)
            order.clear()
            thread.start()
            has_begun.wait(60)
            order.append("ran")
            thread.join(60)
            if order == ["ran", "hashed"]:
                return
    finally:
        sys.setswitchinterval(interval)
    pytest.fail("the interpreter was never let go")
