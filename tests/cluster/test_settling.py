"""Sparing the garbage collector what stays for good."""

from __future__ import annotations

import gc

from cluster.settling import settle


def test_later_collections_pass_over_what_is_there_and_still_find_cycles() -> None:
    kept = [[] for _ in range(1000)]
    try:
        settle()
        assert gc.get_freeze_count() > len(kept)
        assert len(gc.get_objects()) < len(kept)
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() > 0
    finally:
        gc.unfreeze()
