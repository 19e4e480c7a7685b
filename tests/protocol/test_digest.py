from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.digest import (
    DIGEST_BYTES,
    EVERYONE,
    block_digests,
    cache_scope,
    extend_digests,
    join_digests,
    namespace_digest,
    root_digest,
    split_digests,
)

SIZE = 4
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=5 * SIZE)
text = st.text(max_size=6)


def make_namespace(**changes: object) -> bytes:
    fields = {"model_revision": "m", "kv_dtype": "bfloat16", "codec": "raw", "attention": "a", "kernels": "k"}
    return namespace_digest(**{"block_size": 16, **fields, **changes})  # type: ignore[arg-type]


def test_digests_are_stable_across_versions() -> None:
    # A change here silently empties every cache and tier that outlives a process, so it must be on purpose.
    root = root_digest(make_namespace(), cache_salt="tenant", lora="l@1")
    assert root.hex() == "de6f11de7eb4c0aff62c1fa5362d23d9"
    assert [digest.hex() for digest in block_digests(root, list(range(10)), SIZE)] == [
        "bb7f32bc1e7fd64c12a4a4b826184431",
        "d178caf717aa28131446472243807888",
    ]


@given(tokens, tokens)
def test_chains_agree_exactly_as_far_as_the_blocks_do(left: list[int], right: list[int]) -> None:
    a, b = block_digests(b"root", left, SIZE), block_digests(b"root", right, SIZE)
    for i in range(max(len(a), len(b))):
        end = (i + 1) * SIZE
        is_shared = len(left) >= end and len(right) >= end and left[:end] == right[:end]
        assert (a[i : i + 1] == b[i : i + 1]) is is_shared


@given(tokens, st.integers(0, 5 * SIZE))
def test_extending_step_by_step_equals_at_once(token_ids: list[int], cut: int) -> None:
    digests = block_digests(b"root", token_ids[:cut], SIZE)
    extend_digests(digests, b"root", token_ids, SIZE)
    assert digests == block_digests(b"root", token_ids, SIZE)


def test_namespace_depends_on_every_field() -> None:
    others = {"model_revision": "n", "kv_dtype": "float32", "codec": "fp8", "block_size": 32}
    others |= {"attention": "b", "kernels": "l"}
    found = [make_namespace(), *(make_namespace(**{name: value}) for name, value in others.items())]
    assert len(set(found)) == 7


@given(st.tuples(text, text), st.tuples(text, text))
def test_no_value_can_imitate_a_neighbouring_field(left: tuple[str, str], right: tuple[str, str]) -> None:
    # A tenant and an adapter whose joined names are equal must not share a root.
    a, b = (root_digest(b"n" * 16, cache_salt=salt, lora=lora) for salt, lora in (left, right))
    assert (a == b) is (left == right)
    c, d = (make_namespace(model_revision=x, attention=y) for x, y in (left, right))
    assert (c == d) is (left == right)


tenant_names = st.none() | st.sampled_from(["", "a", "ab"]) | text


@given(st.tuples(text, tenant_names), st.tuples(text, tenant_names))
def test_a_scope_is_of_one_salt_and_tenant(left: tuple[str, str | None], right: tuple[str, str | None]) -> None:
    assert (cache_scope(*left) == cache_scope(*right)) is (left == right)


def test_no_salt_is_the_name_of_a_scope() -> None:
    """A client that knows a tenant's name can compute its scope, which as a salt must be like any other."""
    scopes = {cache_scope(salt, tenant) for salt in ("", "s") for tenant in (None, "", "a")}
    assert len(scopes) == 6
    assert cache_scope("") == EVERYONE
    assert not scopes & {cache_scope(scope, tenant) for scope in scopes - {EVERYONE} for tenant in (None, "", "a", "b")}


@pytest.mark.parametrize(
    "salt",
    [
        "tenant\6\0\0\0search",
        "\n\0\0\0cache_salt\0\0\0\0\6\0\0\0tenant\6\0\0\0search",
        "s\6\0\0\0tenant\6\0\0\0search",
        "search\0s",
        "é\ud7ff\U0010ffff",
    ],
)
def test_crafted_bytes_in_a_salt_are_part_of_the_salt(salt: str) -> None:
    victims = {cache_scope(own, "search") for own in ("", "s")}
    assert not victims & {cache_scope(salt, tenant) for tenant in (None, "", "a", "searc")}


def test_tenants_and_namespaces_do_not_share_blocks() -> None:
    roots = [
        root_digest(make_namespace()),
        root_digest(make_namespace(), cache_salt="a"),
        root_digest(make_namespace(), lora="a"),
        root_digest(make_namespace(model_revision="n")),
        make_namespace(),
    ]
    chains = [block_digests(root, list(range(2 * SIZE)), SIZE) for root in roots]
    assert len({digest for chain in chains for digest in chain}) == 2 * len(roots)


def test_without_the_compiled_module_digests_are_the_same() -> None:
    code = (
        "import sys; sys.modules['tandem.protocol._digest'] = None\n"
        "from tandem.protocol.digest import IS_COMPILED, block_digests\n"
        "print((IS_COMPILED, block_digests(b'root', range(100), 16)))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert ast.literal_eval(result.stdout) == (False, block_digests(b"root", range(100), 16))


@given(st.lists(st.binary(min_size=DIGEST_BYTES, max_size=DIGEST_BYTES), max_size=5))
def test_joined_digests_are_split_as_they_were(digests: list[bytes]) -> None:
    run = join_digests(digests)
    assert split_digests(run) == digests
    with pytest.raises(ValueError, match=f"{len(run) + 1} bytes are not digests of 16 bytes"):
        split_digests(run + b"x")
