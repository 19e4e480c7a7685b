from __future__ import annotations

import pytest

from tests.support.cluster_harness import BLOCK_BYTES


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a tiny model are tiny: without this all blocks of a prompt are loaded at once."""
    monkeypatch.setattr("tandem.worker.kv.fetcher._PIECE_BYTES", 4 * BLOCK_BYTES)
