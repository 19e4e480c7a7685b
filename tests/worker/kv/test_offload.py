"""Blocks go from the pool to tiers in I/O threads, while the pool goes on: right bytes or none, and nobody waits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.engine.engine import Engine
from tandem.engine.sequence import Sequence as EngineSequence
from tandem.kv_transfer.codec import Codec
from tandem.protocol.config import TierConfig
from tandem.worker.kv.tiered_cache import create_tiers
from tests.support.cluster_harness import BLOCK_BYTES, DEADLINE_S, engine_config, prompt_of
from tests.support.scheduler_listener import FakeListener
from tests.worker.kv.test_tiered_cache import GREEDY, NUM_BLOCKS, Machine, cached_kv

pytestmark = [pytest.mark.cluster, pytest.mark.cpu_engine("I/O threads read the pool of a CPU")]
EVICTED = "evicted before its turn"


class Gate:
    """Holds up a codec's reads of the pool, each in the middle of its block, until it is opened."""

    def __init__(self, codec: Codec) -> None:
        self.is_open = threading.Event()
        self.num_begun = 0
        self._gather = codec.gather
        codec.gather = self._gather_in_two  # type: ignore[method-assign]

    def _gather_in_two(self, shards: Sequence[Tensor], blocks: Tensor, out: Tensor) -> None:
        self._gather(shards, blocks, out)
        first = out[:, : out.shape[1] // 2].clone()
        self.num_begun += 1
        assert self.is_open.wait(DEADLINE_S)
        self._gather(shards, blocks, out)
        out[:, : first.shape[1]] = first


class Offloading:
    """An engine with a tier of host memory behind a gate, and the KV of every block as it was published."""

    def __init__(
        self, model: Path, *, codec: str = "raw", dtype: str = "float32", num_blocks: int = NUM_BLOCKS
    ) -> None:
        config = TierConfig(host_cache_gb=1000 * BLOCK_BYTES / 1e9, host_cache_codec=codec)  # type: ignore[arg-type]
        if dtype == "bfloat16":
            num_blocks //= 2  # that many bytes in float32
        self.engine = Engine(engine_config(model, num_blocks=num_blocks, dtype=dtype), kv_codec=config.codec_identity)
        self.machine = Machine(self.engine, create_tiers(config, self.engine))
        (self.cached,) = self.machine.cache.tiers
        self.gate = Gate(self.cached.codec)
        self.published: dict[bytes, Tensor] = {}
        self.engine.scheduler.listen(FakeListener(when_published=self._note))

    def _note(self, sequence: EngineSequence, first: int, end: int) -> None:
        kv = self.engine.kv.read(sequence.blocks[first:end])
        self.published |= dict(zip(sequence.digests[first:end], kv, strict=True))

    def until_reading(self) -> None:
        """Until a thread has read half of a block."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.gate.num_begun:
            assert time.monotonic() < deadline, "nothing is read"
            self.machine.cache.pump(time.monotonic())
            time.sleep(0.001)

    def settle(self) -> None:
        self.gate.is_open.set()
        self.machine.settle()

    def check(self) -> int:
        """Every stored block is as it was published. Returns how many there are."""
        digests = self.cached.tier.digests()
        for digest in digests:
            data, load = self.cached.begin_load([digest])
            self.machine.run_until(lambda load=load: load.is_done)  # type: ignore[misc]
            assert load.is_complete
            content = torch.empty_like(self.published[digest][None])
            self.cached.codec.decode(data, content)
            assert torch.equal(content[0], self.published[digest]), "other bytes were stored"
        return len(digests)


@pytest.fixture
def offloading(tiny_model: Path) -> Iterator[Offloading]:
    world = Offloading(tiny_model)
    yield world
    world.settle()
    world.machine.close()


def test_a_block_that_is_evicted_while_it_is_read_is_not_stored(offloading: Offloading) -> None:
    rng = random.Random(1)
    machine, tier = offloading.machine, offloading.cached.tier
    lost = machine.serve(prompt_of(rng, 10))
    offloading.until_reading()
    machine.flood_unsettled(rng)  # takes every block of the pool: nothing is held back
    assert offloading.engine.pool.count_cached(lost.digests) == 0
    offloading.settle()
    assert tier.count_present(lost.digests) == 0
    assert tier.stats().num_drops[EVICTED] >= 10
    offloading.check()


def test_a_block_that_comes_back_to_its_place_meanwhile_is_not_trusted(offloading: Offloading) -> None:
    """Half of it was read before it was overwritten, the rest after: the second half may be of anything."""
    rng = random.Random(2)
    machine, pool = offloading.machine, offloading.engine.pool
    first = machine.serve(tokens := prompt_of(rng, 10))
    offloading.until_reading()
    places = [pool.block_of(digest) for digest in first.digests]
    assert all(pool.has_kept(block, pool.num_drops) for block in places if block is not None)
    before = pool.num_drops
    for _ in range(20):
        machine.flood_unsettled(rng)
        again = machine.serve(tokens)
        if pool.block_of(again.digests[0]) == places[0]:
            break
    assert not any(pool.has_kept(block, before) for block in places if block is not None)
    offloading.settle()
    offloading.check()


def test_no_request_waits_for_a_thread_that_hangs(tiny_model: Path) -> None:
    offloading = Offloading(tiny_model, num_blocks=32)
    rng = random.Random(3)
    offloading.machine.serve(prompt_of(rng, 10))
    offloading.until_reading()
    offloading.machine.serve(prompt_of(rng, 30))  # needs nearly all blocks of the pool
    offloading.engine.check_integrity(idle=True)
    offloading.settle()
    offloading.machine.close()


@pytest.mark.parametrize(("codec", "dtype"), [("raw", "float32"), ("exact", "bfloat16")])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_evicted_meanwhile_what_is_stored_is_right(
    seed: int, codec: str, dtype: str, tiny_model: Path
) -> None:
    offloading = Offloading(tiny_model, codec=codec, dtype=dtype)
    rng = random.Random(seed)
    machine, gate = offloading.machine, offloading.gate
    prompts = [prompt_of(rng, rng.randrange(2, 16)) for _ in range(8)]
    for _ in range(20):
        gate.is_open.clear()
        for _ in range(rng.randrange(6)):
            machine.serve(rng.choice(prompts))
        gate.is_open.set()
    offloading.settle()
    assert offloading.check() > 8
    machine.close()


def test_a_backlog_is_bounded_by_the_pool_and_loses_the_oldest(tiny_model: Path) -> None:
    offloading = Offloading(tiny_model)
    rng = random.Random(4)
    machine, tier = offloading.machine, offloading.cached.tier
    sequences = [machine.engine.factory.make_sequence(f"s{idx}", prompt_of(rng, 19), GREEDY) for idx in range(4)]
    for sequence in sequences:  # without a pump: nothing is taken
        machine.engine.add(sequence)
        while sequence.finish_reason is None:
            machine.engine.step()
    assert tier.stats().num_drops == {EVICTED: 4 * 19 - NUM_BLOCKS}
    offloading.settle()
    assert tier.count_present(sequences[-1].digests) == 19
    offloading.check()
    machine.close()


def test_what_an_exact_tier_keeps_is_what_was_computed_and_others_may_use_it(tiny_model: Path) -> None:
    offloading = Offloading(tiny_model, codec="exact", dtype="bfloat16")
    engine, machine = offloading.engine, offloading.machine
    assert engine.namespace == Engine(engine_config(tiny_model, dtype="bfloat16")).namespace
    offloading.gate.is_open.set()
    rng = random.Random(5)
    first = machine.serve(tokens := prompt_of(rng, 10))
    before = cached_kv(engine, first.digests[:10])
    machine.settle()
    machine.flood(rng)
    again = machine.serve(tokens)
    assert again.num_cached_tokens > 0
    assert again.token_ids == first.token_ids
    assert torch.equal(cached_kv(engine, again.digests[:10]), before)
    assert offloading.cached.block_bytes < engine.block_bytes * 0.8
    machine.close()


def test_a_block_that_does_not_fit_is_counted_and_the_pool_keeps_it(tiny_model: Path) -> None:
    offloading = Offloading(tiny_model, codec="exact", dtype="bfloat16")
    engine, machine, tier = offloading.engine, offloading.machine, offloading.cached.tier
    sequence = engine.factory.make_sequence("r", prompt_of(random.Random(6), 10), GREEDY)
    engine.add(sequence)
    while sequence.finish_reason is None:
        engine.step()
    block = engine.pool.block_of(sequence.digests[4])
    assert block is not None
    engine.kv.write([block], torch.full((1, *engine.kv.block_shape), torch.inf, dtype=torch.bfloat16))
    offloading.settle()
    assert tier.count_present(sequence.digests) == 4
    assert tier.stats().num_drops["does not fit its codec"] == 1
    assert engine.pool.count_cached(sequence.digests) == 10
    machine.close()
