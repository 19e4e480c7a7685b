"""Cost of a routing decision: digests, placement, block events and memory, without workers or network.

Prompts share prefixes with what several workers hold, and every worker has some load. The index is filled up to each
size with blocks of other prompts, each held by a prefill and a decode worker, as block events of all workers in turn.
A decision is timed from token ids to placement; how much of it is hashing is shown, and whether that was done in C.

Stands behind README's "a decision takes 0.2 ms".

    python -m benchmarks.decisions
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import psutil

from benchmarks.common import arguments, console, print_rows, ratio, write_result
from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import IS_COMPILED, block_digests, join_digests
from tandem.protocol.messages import BlockEvents, Role
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.request import CommonDigests, PlacementRequest
from tandem.scheduling.workers.bookings import Booking
from tandem.scheduling.workers.load import RequestLoad
from tandem.scheduling.workers.registry import Registry
from tests.support.builders import add_ready, make_card

_BLOCK_SIZE = 16
_EVENT_BLOCKS = 32  # per message: a chunk of 512 tokens
_NUM_PROMPTS = 20
_NUM_ROUNDS = 5
_ROOT = b"root" * 4
_AIM_US = 200
_HASHED_IN = "C" if IS_COMPILED else "Python"


def main() -> None:
    parser = arguments(__doc__, model=False)
    parser.option("--workers", [8, 64, 512], quick=[8, 64])
    parser.option("--lengths", [1024, 8192, 65_536], "of prompts", quick=[1024, 8192])
    parser.option("--sizes", [100_000, 1_000_000, 10_000_000], "blocks in the index", quick=[10_000, 20_000])
    settings = parser.settings()
    rows = [row for num in settings.workers for row in measure(num, settings.lengths, settings.sizes, settings.seed)]
    title = f"A decision in us, median of {_NUM_ROUNDS * _NUM_PROMPTS} (hashing the prompt in {_HASHED_IN}, included)"
    print_rows(title, rows, f"aims: {_AIM_US} us at 64 workers and 8,192 tokens; 500,000 events/s")
    write_result("decisions", settings, rows)


class _Seconds(NamedTuple):
    decision: float
    hashing: float  # of it


class _Router:
    """The state of a router, without its sockets."""

    def __init__(self, num_workers: int, rng: random.Random) -> None:
        self.rng = rng
        self.registry, self.index, costs = Registry(), PrefixIndex(), CostModel()
        self.placer = Placer(self.registry, self.index, costs, RouterConfig())
        self._sequence = [0] * num_workers
        for number in range(num_workers):
            worker_id, role = f"w{number}", Role.PREFILL if number % 2 else Role.DECODE
            add_ready(self.registry, make_card(worker_id, role, max_model_len=1 << 20, num_blocks=100_000))
            self.index.add_worker(worker_id, 1)
            for _ in range(rng.randrange(4)):
                self.registry.reserve(RequestLoad(worker_id, worker_id, rng.randrange(4000), 0, 4000))

    def store(self, number: int, digests: list[bytes]) -> None:
        """Publish these blocks as held by a worker."""
        self._sequence[number] += 1
        run = join_digests(digests)
        events = BlockEvents(worker_id=f"w{number}", epoch=1, sequence=self._sequence[number], stored=run, removed=b"")
        assert not self.index.apply(events)

    def fill(self, num_blocks: int) -> tuple[int, float]:
        """Apply events until the index has that many blocks; returns the blocks applied and the seconds taken."""
        num_applied, seconds = 0, 0.0
        num_workers = len(self._sequence)
        while len(self.index) < num_blocks:
            batch = [
                [self.rng.randbytes(16) for _ in range(_EVENT_BLOCKS)]
                for _ in range(min(1000, (num_blocks - len(self.index)) // _EVENT_BLOCKS + 1))
            ]
            started = time.perf_counter()
            for idx, digests in enumerate(batch):
                self.store(2 * idx % num_workers, digests)
                self.store((2 * idx + 1) % num_workers, digests)
            seconds += time.perf_counter() - started
            num_applied += 2 * len(batch) * _EVENT_BLOCKS
        return num_applied, seconds

    def book(self) -> Booking:
        """Book a request on two workers."""
        prefill, decode = (f"w{self.rng.randrange(len(self._sequence))}" for _ in range(2))
        return self.registry.reserve(RequestLoad(prefill, decode, 1000, 0, 1000))

    def decide(self, token_ids: list[int]) -> _Seconds:
        """From token ids to a placement."""
        started = time.perf_counter()
        digests = block_digests(_ROOT, token_ids, _BLOCK_SIZE)
        hashed = time.perf_counter()
        request = PlacementRequest(
            num_prompt_tokens=len(token_ids), expected_output_tokens=128, digests=CommonDigests(digests)
        )
        self.placer.place(request, 1e6)
        return _Seconds(time.perf_counter() - started, hashed - started)


def measure(num_workers: int, lengths: Sequence[int], sizes: Sequence[int], seed: int) -> Iterator[dict[str, Any]]:
    """Decision times for each length of prompt, with the index at each size."""
    rng = random.Random(seed)
    router = _Router(num_workers, rng)
    prompts = {length: list(_prompts(router, length, num_workers)) for length in lengths}
    for size in sizes:
        gc.collect()
        before, before_bytes = len(router.index), psutil.Process().memory_info().rss
        num_applied, seconds = router.fill(size)
        gc.collect()
        num_bytes = psutil.Process().memory_info().rss - before_bytes
        row: dict[str, Any] = {"workers": num_workers, "blocks": f"{len(router.index):,}"}
        for length, token_lists in prompts.items():
            timed = zip(*_times(router, token_lists), strict=True)
            decision_us, hashing_us = (1e6 * statistics.median(seconds) for seconds in timed)
            row[f"{length:,} tokens"] = f"{decision_us:.0f} ({hashing_us:.0f})"
        row["events/s"] = f"{ratio(num_applied, seconds):,.0f}"
        console.print(f"[dim]measured {num_workers} workers, {len(router.index):,} blocks[/]")
        yield row | {"bytes per block": num_bytes / max(len(router.index) - before, 1)}


def _prompts(router: _Router, length: int, num_workers: int) -> Iterator[list[int]]:
    """Prompts whose prefixes a few workers hold."""
    for _ in range(_NUM_PROMPTS):
        token_ids = [router.rng.randrange(100_000) for _ in range(length)]
        chain = block_digests(_ROOT, token_ids, _BLOCK_SIZE)
        for number in router.rng.sample(range(num_workers), 4):
            router.store(number, chain[: router.rng.randrange(1, len(chain))])
        yield token_ids


def _times(router: _Router, prompts: list[list[int]]) -> Iterator[_Seconds]:
    """Time the decisions for these prompts."""
    for _ in range(_NUM_ROUNDS):
        for token_ids in prompts:
            booking = router.book()  # something always changed since the last decision
            yield router.decide(token_ids)
            booking.release()


if __name__ == "__main__":
    main()
