"""Parts of other packages: found by name, imported when used, and named when they are broken."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.kv_transfer.eviction.lru import LRU
from tandem.kv_transfer.tiers.kinds import check_spec
from tandem.kv_transfer.transport.factory import create_transport
from tandem.protocol.config import parse_tier
from tandem.protocol.errors import ConfigError
from tandem.protocol.plugins import EVICTION_POLICIES, KV_STORES
from tests.support.packages import install, write_package

STORE = """
from tandem.kv_transfer.eviction.lru import LRU
class Store:
    options = ("zone",)
    @classmethod
    def check(cls, spec, *, is_local):
        if spec.place == "//nowhere":
            raise RuntimeError("no such pool")
def transport(worker_id, epoch, shards, *, host, mailbox):
    if epoch == 0:
        raise OSError("no link")
    return worker_id, epoch, len(shards), host, mailbox
"""


def check(text: str) -> None:
    check_spec(parse_tier(text, eviction="lru"), is_local=True)


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "tandem.kv_stores": {"acme": "acme_kv:Store", "broken": "acme_broken:Store", "gone": "acme_kv:Gone"},
        "tandem.kv_transports": {"acme": "acme_kv:transport"},
        "tandem.eviction_policies": {"acme-lru": "acme_kv:LRU"},
    }
    write_package(tmp_path, "acme-kv", points, acme_kv=STORE, acme_broken="raise OSError('no driver')")
    install(monkeypatch, tmp_path, "acme_kv", "acme_broken")


@pytest.mark.usefixtures("acme")
def test_parts_of_an_installed_package_have_names_like_ours() -> None:
    check("acme://pool?gb=1&zone=b&eviction=acme-lru")
    assert EVICTION_POLICIES.load("acme-lru", "") is LRU
    made: Any = create_transport("acme", worker_id="w", epoch=3, pool=[], host="h", mailbox="m")
    assert made == ("w", 3, 0, "h", "m")


@pytest.mark.usefixtures("acme")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ftp://a?gb=1", r"'ftp' is unknown; choose one of abfs, .*acme, .*broken, .*disk, .*, or install a package"),
        ("broken:1?gb=1", r"'broken' of the package acme-kv cannot be used: OSError\('no driver'\); repair it"),
        ("gone:1?gb=1", r"'gone' of the package acme-kv cannot be used: AttributeError"),
        ("acme://nowhere?gb=1", r"'acme' of the package acme-kv cannot be used: RuntimeError\('no such pool'\)"),
        ("acme://pool?gb=1&size=2", r"size='2' is no option of acme; it takes gb, name, codec, eviction, zone"),
        ("disk:/tmp?gb=1&zone=b", r"zone='b' is no option of disk; it takes gb, name, codec, eviction$"),
        ("disk:?gb=1", r"names no folder"),
        ("host:1GB?eviction=fifo", r"'fifo' is unknown; choose one of acme-lru, hit-density, lru"),
        ("numa:two?gb=1", r"'two' must be the number of a NUMA node"),
    ],
)
def test_what_cannot_be_used_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        check(text)
    assert raised.value.message.startswith(f"tier={text!r}")


@pytest.mark.usefixtures("acme")
def test_a_transport_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match=r"transport='acme': 'acme' of the package acme-kv cannot be used: OSError"):
        create_transport("acme", worker_id="w", epoch=0, pool=[])


def test_a_name_of_two_packages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("one", "two"):
        write_package(tmp_path, package, {"tandem.kv_stores": {"twice": f"{package}:S"}})
    install(monkeypatch, tmp_path)
    with pytest.raises(ConfigError, match="the packages one and two both have a 'twice'; uninstall one of them"):
        KV_STORES.check("twice", "tier='twice:1'")


def test_ours_are_found_without_a_look_at_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.protocol.plugins.entry_points", lambda **_: pytest.fail("it takes milliseconds"))
    for name in KV_STORES.ours:
        KV_STORES.load(name, "")
    assert "tandem.kv_transfer.tiers.numa" in sys.modules
