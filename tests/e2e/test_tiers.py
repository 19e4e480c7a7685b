"""`tandem serve --tier` with a store of another package: its hits are in the usage of answers, under its own name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.packages import write_package
from tests.support.server import HTTP, REPOSITORY, started
from tests.support.waiting import until
from tests.worker.kv.test_store_package import STORE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


def used(url: str, text: str) -> dict[str, Any]:
    body = {"prompt": text * 400, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    answer = HTTP.post(f"{url}/v1/completions", json=body).json()
    details: dict[str, Any] = answer["usage"]["prompt_tokens_details"] | {"text": answer["choices"][0]["text"]}
    return details


def test_hits_of_a_foreign_store_are_in_the_usage(text_model: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    write_package(packages, "acme-kv", {"tandem.kv_stores": {"acme": "acme_kv:AcmeStore"}}, acme_kv=STORE)
    flags = ("--colocated", "--pool-bytes=1000000", "--tier=acme://pool?gb=1&name=far&eviction=lru")
    with started(text_model, tmp_path, *flags, env={"PYTHONPATH": f"{packages}:{REPOSITORY}"}) as server:
        server.wait_ready()
        first = used(server.url, "a")

        def comes_back() -> bool:
            for other in "bcdefg":  # the pool forgets it
                used(server.url, other)
            again = used(server.url, "a")
            assert again["text"] == first["text"]
            return bool(again["cached_tokens_by_tier"].get("far"))

        until(comes_back, 60, lambda: server.output)
        # Heartbeats tell it.
        until(lambda: any(tier["num_hits"] for tier in server.worker("colocated")["tiers"]), 30, lambda: server.output)
        assert [tier["name"] for tier in server.worker("colocated")["tiers"]] == ["far"]
        assert 'tier="far"' in HTTP.get(f"{server.url}/metrics").text
        assert server.stop() == 0
        assert "Traceback" not in server.output
