"""What a tier is, as one text: what is understood, and what is refused by name, value and remedy."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.config import TierConfig, parse_tier
from tandem.protocol.errors import ConfigError


def fields(text: str) -> tuple[Any, ...]:
    spec = parse_tier(text, eviction="lru")
    assert spec.setting == f"tier={text!r}"
    return spec.scheme, spec.place, spec.gb, spec.name, spec.codec, spec.eviction, spec.options


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:64GB", ("host", "", 64.0, "host", "raw", "lru", {})),
        ("host:0.5", ("host", "", 0.5, "host", "raw", "lru", {})),
        ("host:?gb=2&name=dram", ("host", "", 2.0, "dram", "raw", "lru", {})),
        ("numa:2?gb=256", ("numa", "2", 256.0, "numa", "raw", "lru", {})),
        ("dax:/dev/dax0.0?gb=512&name=cxl", ("dax", "/dev/dax0.0", 512.0, "cxl", "raw", "lru", {})),
        ("disk:/ssd/kv?gb=2000&codec=int8", ("disk", "/ssd/kv", 2000.0, "disk", "int8", "lru", {})),
        ("disk:/a b:c?gb=1&eviction=hit-density", ("disk", "/a b:c", 1.0, "disk", "raw", "hit-density", {})),
        ("s3://bucket/prefix?gb=9", ("s3", "//bucket/prefix", 9.0, "object", "raw", "lru", {})),
        ("file:///kv?gb=1&name=nfs", ("file", "///kv", 1.0, "nfs", "raw", "lru", {})),
        ("acme://pool?gb=9000&zone=a%26b", ("acme", "//pool", 9000.0, "acme", "raw", "lru", {"zone": "a&b"})),
    ],
)
def test_a_text_says_what_a_tier_is(text: str, expected: tuple[Any, ...]) -> None:
    assert fields(text) == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["/ssd/kv"], "tier: '/ssd/kv' must be a kind of store, its place and options"),
        (["host:1GB\n"], "must be a kind of store"),
        (["disk:/" + "x" * 600 + "?gb=1"], "must be a kind of store"),
        ([":4"], "tier=':4' must begin with a kind of store, such as host:64GB"),
        (["S3://b?gb=1"], "must begin with a kind of store"),
        (["disk:/kv"], "tier='disk:/kv' has no size: say how many GB it may hold, as gb=64"),
        (["host:"], "tier='host:' has no size"),
        (["disk:/kv?gb="], "has no size"),
        (["host:64XB"], "tier='host:64XB' must be host memory with one size, such as host:64GB"),
        (["host:4GB?gb=5"], "must be host memory with one size"),
        (["host:1.2.3"], "gb='1.2.3' must be a number of GB above 0 and at most 1000000"),
        *(
            ([f"disk:/kv?gb={size}"], f"gb='{size}' must be a number of GB")
            for size in ("0", "-1", "nan", "inf", "1e7", "x")
        ),
        (["disk:/kv?gb"], "'gb' must be options such as gb=64&codec=int8"),
        (["disk:/kv?gb=1&gb=2"], "has an option twice; leave one out"),
        (["disk:/kv?gb=1&codec=zip"], "tier='disk:/kv?gb=1&codec=zip': codec='zip' must be one of raw, "),
        (["disk:/kv?gb=1&name=a/b"], "name='a/b' must be at most 32 letters, digits"),
        *(
            ([f"disk:/kv?gb=1&name={name}"], f"name='{name}' must be")
            for name in ("pool", "peer", "computed", "x" * 33)
        ),
        (
            ["disk:/a?gb=1", "disk:/b?gb=1"],
            "tier='disk:/a?gb=1' and tier='disk:/b?gb=1' are both named 'disk'; give one",
        ),
        (
            ["s3://a?gb=1", "gs://a?gb=1"],
            "are both named 'object'; give one of them another name, such as &name=object2",
        ),
    ],
)
def test_a_wrong_tier_is_named_with_its_value_and_the_remedy(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        TierConfig(tier=tuple(texts))


@given(st.text(max_size=40) | st.from_regex(r"(host|disk|s3):[^?]{0,9}\?(gb|name|codec)=.{0,9}", fullmatch=True))
def test_any_text_is_a_tier_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert TierConfig(tier=(text,)).specs[0].gb > 0


def test_short_forms_are_the_same_tiers() -> None:
    short = TierConfig(
        host_cache_gb=2.0,
        host_cache_codec="int8",
        disk_cache_path="/kv",
        disk_cache_gb=3.0,
        object_cache_url="s3://b/p",
        object_cache_gb=4.0,
        object_cache_codec="fp8",
        tier=("numa:1?gb=1",),
    )
    texts = ("host:2GB?codec=int8", "numa:1?gb=1", "disk:/kv?gb=3", "s3://b/p?gb=4&codec=fp8")
    alike = [replace(spec, setting="") for spec in TierConfig(tier=texts).specs]
    assert [replace(spec, setting="") for spec in short.specs] == alike
    assert short.codec_identity == "fp8+int8"
    with pytest.raises(ConfigError, match=r"host_cache_gb=1 and tier='host:1GB' are both named 'host'"):
        TierConfig(host_cache_gb=1.0, tier=("host:1GB",))


def test_only_memory_is_not_sealed() -> None:
    assert not TierConfig(tier=("host:1GB", "numa:0?gb=1", "dax:/dev/dax0.0?gb=1")).is_sealed
    assert TierConfig(tier=("acme://pool?gb=1",), kv_encryption="on").is_sealed
    assert TierConfig().specs == ()
