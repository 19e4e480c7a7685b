"""Cost of a tier that is slower than computing, for a prompt whose KV is in it.

One engine with the real model and one tier of host memory whose reads are throttled, in this process. First the tier is
fast; then, from one prompt to the next, it delivers blocks at the given share of the speed at which they are computed;
then it is fast again. TTFT of each prompt over that of computing it.

    python -m benchmarks.throttled_tier
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import Any

from benchmarks.common import arguments, ms, print_table, ratio, write_result
from tandem.cluster.model_store import resolve_model
from tandem.engine.engine import Engine
from tandem.kv_transfer.codec import create_codec
from tandem.kv_transfer.eviction import create_policy
from tandem.kv_transfer.tiers import MemoryStore, Tier
from tandem.protocol.config import EngineConfig
from tandem.protocol.sampling import SamplingParams
from tandem.scheduling.cost_model import CostModel
from tandem.worker.kv.cached_tier import CachedTier
from tandem.worker.kv.kv_source import LoadPrior
from tandem.worker.kv.tiered_cache import TieredCache
from tests.support.throttled_store import ThrottledStore

_TOKEN_IDS = range(1000, 4000)
_AIM = 1.1


class Bench:
    """An engine and its throttled tier, stepped by hand."""

    def __init__(self, settings: argparse.Namespace) -> None:
        num_tokens = settings.prompt_tokens
        folder = str(resolve_model(settings.model, report=print))
        block_bytes = 23_040 * 16  # of the default model; the pool need not be exact
        pool_bytes = int(1.3 * num_tokens / 16 * block_bytes)
        self.engine = Engine(EngineConfig(model=folder, pool_bytes=pool_bytes, max_num_batched_tokens=256))
        codec = create_codec("raw")
        num_blocks = 4 * num_tokens // 16
        self.store = ThrottledStore(MemoryStore(self.engine.block_bytes, num_blocks))
        tier = Tier("throttled", self.store, create_policy("lru", num_blocks), capacity_blocks=num_blocks)
        prior = LoadPrior(50e-6, 10e9)
        self.tier = CachedTier(tier, codec, self.engine.block_bytes, num_threads=1, prior=prior)
        self.cache = TieredCache(self.engine, [self.tier], CostModel().steps("cpu"))
        self.engine.scheduler.listen(self.cache)
        self._num_requests = 0

    def ttft_s(self, prompt: list[int]) -> float:
        """Seconds until the first token."""
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        sequence = self.engine.make_sequence(f"r{self._num_requests}", prompt, sampling)
        begun = time.perf_counter()
        self.engine.add(sequence)
        while sequence.finish_reason is None:
            self.turn()
        return time.perf_counter() - begun

    def turn(self) -> None:
        """One iteration of a worker's loop."""
        self.cache.pump(time.monotonic())
        for result in self.engine.step():
            self.cache.after_step(result.stats)

    def stores_through(self) -> None:
        """Wait until all offloads are done, unthrottled."""
        while self.cache.is_busy:
            self.turn()


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=6, help="of each speed")
    parser.add_argument("--speeds", type=float, nargs="+", default=[0.5, 0.1], help="of the tier over computing")
    settings = parser.parse_args()
    if settings.quick:
        settings.prompt_tokens, settings.requests = 500, 3
    bench = Bench(settings)
    rng = random.Random(settings.seed)
    prompts = [rng.choices(_TOKEN_IDS, k=settings.prompt_tokens) for _ in range(2)]
    computed = [bench.ttft_s(rng.choices(_TOKEN_IDS, k=settings.prompt_tokens)) for _ in range(4)][1:]
    for prompt in prompts:
        bench.ttft_s(prompt)
    recompute_s = statistics.median(computed)
    phases = {"fast": float("inf")}
    for speed in settings.speeds:
        phases |= {f"{speed} of computing": speed, f"fast again, after {speed}": float("inf")}
    results: dict[str, Any] = {"recompute_s": recompute_s, "computed_s": computed, "phases": {}}
    for name, speed in phases.items():
        results["phases"][name] = _phase(bench, prompts, speed, recompute_s, settings)
    _show(results)
    write_result("throttled_tier", settings, results)
    worst = max(max(phase["ttfts_s"]) for phase in results["phases"].values())
    return int(worst > _AIM * recompute_s and not settings.quick)


def _phase(
    bench: Bench, prompts: list[list[int]], speed: float, recompute_s: float, settings: argparse.Namespace
) -> dict[str, Any]:
    ttfts, outcomes = [], []
    for idx in range(settings.requests):
        bench.store.bytes_per_s = float("inf")
        bench.stores_through()
        num_blocks = settings.prompt_tokens // 16
        bench.store.bytes_per_s = speed * num_blocks * bench.engine.block_bytes / recompute_s
        ttfts.append(bench.ttft_s(prompts[idx % len(prompts)]))  # the other prompt has evicted it from the pool
        outcomes.append(bench.cache.fetcher.records[-1].outcome)
    return {"ttfts_s": ttfts, "outcomes": outcomes}


def _show(results: dict[str, Any]) -> None:
    recompute_s = results["recompute_s"]
    rows: list[list[object]] = [["(computed)", ms(recompute_s), "-", "-", ""]]
    for name, phase in results["phases"].items():
        ttfts = phase["ttfts_s"]
        rows.append(
            [
                name,
                ms(statistics.median(ttfts)),
                f"{ratio(ttfts[0], recompute_s):.2f}",
                f"{ratio(max(ttfts), recompute_s):.2f}",
                " ".join(phase["outcomes"]),
            ]
        )
    print_table(
        "A prompt whose KV is in a throttled tier",
        ["tier's speed", "TTFT p50 ms", "first / computing", "worst / computing", "what became of the loads"],
        rows,
        caption=f"aim: worst / computing at most {_AIM}",
    )


if __name__ == "__main__":
    sys.exit(main())
