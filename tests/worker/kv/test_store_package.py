"""A store of another package: built as a wheel, installed by pip, and used by an engine's tiers."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tandem.protocol.config import TierConfig
from tandem.testing.store_contract import StoreContract
from tandem.worker.kv.tier_check import check_tiers
from tandem.worker.kv.tiered_cache import create_tiers
from tests.support.cluster_harness import BLOCK_BYTES, BLOCK_SIZE, prompt_of
from tests.support.packages import install
from tests.support.wheel import pip
from tests.worker.kv.test_tiered_cache import Machine, make_engine

PROJECT = """
[project]
name = "acme-kv"
version = "1"
[project.entry-points."tandem.kv_stores"]
acme = "acme_kv:AcmeStore"
"""
STORE = """
from threading import Event
from tandem.kv_transfer.tiers.base import BlockStore, StoreFailure

ANSWERS = {"good": "data", "raises": "1 / 0", "short": "data[:-1]", "other": "data ^ 1", "hangs": "GO.wait() and data"}
GO = Event()

class AcmeStore(BlockStore):
    options = ("mood",)

    def __init__(self, settings):
        super().__init__(settings.block_bytes)
        self.blocks, self.mood = {}, settings.spec.options.get("mood", "good")

    def read(self, name, scratch):
        data = self.blocks.get(name, StoreFailure.ABSENT)
        return eval(ANSWERS[self.mood])

    def write(self, name, data):
        self.blocks.setdefault(name, data)

    def delete(self, name):
        self.blocks.pop(name, None)

    def scan(self):
        return list(self.blocks)
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the wheel."""
    folder = tmp_path_factory.mktemp("acme")
    (folder / "source").mkdir()
    (folder / "source" / "pyproject.toml").write_text(PROJECT)
    (folder / "source" / "acme_kv.py").write_text(STORE)
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(folder / "source"))
    (wheel,) = folder.glob("*.whl")
    pip("install", "--no-deps", "--no-index", "--target", str(folder / "packages"), str(wheel))
    return folder / "packages"


@pytest.fixture(autouse=True)
def _installed(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, packages, "acme_kv")


class TestAcme(StoreContract):
    spec = "acme://pool?gb=1"


@pytest.mark.cluster
@pytest.mark.parametrize("mood", ["good", "raises", "short", "other", "hangs"])
def test_it_serves_hits_and_never_anything_wrong(mood: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.kv.fetcher._LATE_FACTOR", 2.0 if mood == "hangs" else 1e6)
    spec = f"acme://pool?gb={1000 * BLOCK_BYTES / 1e9}&name=far&mood={mood}"
    config = TierConfig(tier=(spec,), kv_key_file=key_file(tiny_model.parent))
    check_tiers(config, is_local=True)
    rng, engine = random.Random(23), make_engine(tiny_model)
    machine = Machine(engine, create_tiers(config, engine))
    first = machine.serve(prompt := prompt_of(rng, 20))
    machine.settle()
    machine.flood(rng)
    again = machine.serve(prompt)
    assert again.token_ids == first.token_ids
    record, (tier,) = machine.cache.fetcher.records[-1], machine.cache.loads()
    assert record.outcome == {"good": "loaded", "hangs": "overtaken"}.get(mood, "failed")
    assert [load.source for load in record.loads] == ["far"]
    if mood == "good":
        assert again.num_cached_tokens == tier.num_hits * BLOCK_SIZE >= 15 * BLOCK_SIZE
    else:
        assert (again.num_cached_tokens, tier.num_hits) == (0, 0)
        assert tier.num_misses.keys() <= {{"raises": "unreachable"}.get(mood, "corrupt"), "abandoned"}
    sys.modules["acme_kv"].GO.set()
    machine.close()


def key_file(folder: Path) -> str:
    path = folder / "kv-key"
    path.write_bytes(bytes(32))
    path.chmod(0o600)
    return str(path)
