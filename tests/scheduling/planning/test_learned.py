from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.protocol.errors import ConfigError
from tandem.scheduling.planning.geometry import geometry_of
from tandem.scheduling.planning.hardware import GPUS
from tandem.scheduling.planning.learned import calibrated, learned_from, live_worker
from tandem.scheduling.planning.roofline import plan_worker
from tests.support.published_models import PUBLISHED

URL = "http://x"
STEPS = {"base_s": 5e-3, "prefill_token_s": 3e-5, "attention_s": 1e-9, "decode_seq_s": 3e-5, "kv_token_s": 4e-8}
WORKER: dict[str, Any] = {
    "model": "m",
    "kind": "NVIDIA H200",
    "block_size": 16,
    "block_bytes": 16 * 131_072,
    "num_blocks": 10_000,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 4096,
    "tiers": [
        {"name": "host", "block_s": 1e-4, "num_hits": 9, "ignored": 1},
        {"name": "disk", "block_s": None, "num_hits": 9},
    ],
}


def pools(*, kind: str = "NVIDIA H200", steps: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "costs": {
            "steps": {
                kind: STEPS | {"num_measurements": 900} | (steps or {}),
                "cpu-1": STEPS | {"num_measurements": 3},
            },
            "transfers": {"a -> b": {"latency_s": 1e-3, "byte_s": 1e-10, "num_measurements": 5}},
        },
        "roles": {"prefill": [WORKER | {"kind": kind} | changes], "decode": [WORKER | {"kind": "cpu-1"}]},
    }


def body(content: Any) -> bytes:
    return json.dumps(content).encode()


def test_the_live_worker_is_planned_as_it_is() -> None:
    learned = learned_from(body(pools()), URL)
    worker = live_worker(learned, geometry_of(PUBLISHED["llama-8b"], "m"), URL)
    assert worker.costs._asdict() == STEPS
    assert worker.pool_bytes == 10_000 * 16 * 131_072
    assert (worker.kv_bytes(100), worker.step_tokens, worker.max_num_seqs) == (100 * 131_072, 4096, 64)
    assert worker.tiers["host"].load.bytes_per_s == pytest.approx(16 * 131_072 / 1e-4)
    assert worker.tiers["disk"].load.bytes_per_s == 1e9, "not reached now: the prior"
    assert worker.link == learned.link


def test_what_was_learned_is_kept_for_the_same_and_scaled_to_another_gpu() -> None:
    geometry = geometry_of(PUBLISHED["llama-8b"], "m")
    learned = learned_from(body(pools()), URL)
    assert (learned.gpu_name, learned.num_gpus) == ("h200", 1)
    live = plan_worker(geometry, GPUS["h200"])
    assert calibrated(live, live, learned).costs == pytest.approx(learned.costs)
    other = plan_worker(geometry, GPUS["b200"])
    scaled = calibrated(other, live, learned)
    assert scaled.costs.kv_token_s == pytest.approx(STEPS["kv_token_s"] * 4.8 / 8.0)
    assert scaled.tiers["host"].load.bytes_per_s == pytest.approx(16 * 131_072 / 1e-4)  # both have the same link
    assert scaled.tiers["disk"].load.bytes_per_s == other.tiers["disk"].load.bytes_per_s


def test_kinds_name_their_gpu_and_their_ranks() -> None:
    kinds = {"NVIDIA H100 80GB HBM3 x 4": ("h100", 4), "NVIDIA GB200": ("gb200", 1), "cpu-2": ("", 1)}
    for kind, expected in kinds.items():
        learned = learned_from(body(pools(kind=kind)), URL)
        assert (learned.gpu_name, learned.num_gpus) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "from=http://x: its /v1/pools is not that of this version of Tandem"),
        (b"[" * 100_000, "not that of this version"),
        (body({"engines": []}), "not that of this version"),
        (body(pools(steps={"base_s": -1})), "not that of this version"),
        (body(pools(steps={"kv_token_s": 1e300})), "not that of this version"),
        (body(pools(block_size=0)), "not that of this version"),
        (body(pools(block_bytes="many")), "not that of this version"),
        (body({"costs": {"steps": {}, "transfers": {}}}), "has computed nothing yet; send it load first: tandem bench"),
        (body(pools(steps={"num_measurements": 49})), "learned from 49 steps only, fewer than 50"),
    ],
)
def test_what_cannot_be_learned_from_is_told(content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        learned_from(content, URL)


def test_engines_say_what_they_cost_but_not_how_large_they_are() -> None:
    learned = learned_from(body({"costs": pools()["costs"], "engines": []}), URL)
    with pytest.raises(ConfigError, match="give --gpu"):
        live_worker(learned, geometry_of(PUBLISHED["llama-8b"], "m"), URL)
