"""Pins on real workers: what they keep through pressure, how they end, and what is brought up for them."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.kv_transfer.tiers.disk import DiskStore
from tandem.protocol.config import TierConfig
from tandem.protocol.digest import EVERYONE, block_digests, root_digest
from tandem.protocol.messages import Pin, Prefetch, Role, TierLoad
from tandem.router.backend import PinRequest
from tandem.worker.kv.pins import WorkerPins
from tandem.worker.kv.tiered_cache import TieredCache, create_tiers
from tandem.worker.loop import Worker
from tests.support.cluster_harness import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    DEADLINE_S,
    Cluster,
    Oracle,
    prompt_of,
    running_cluster,
    wait_for_loads,
)
from tests.support.late_device import LateDevice
from tests.support.waiting import eventually
from tests.worker.kv.test_tiered_cache import GREEDY, Machine, make_engine

pytestmark = pytest.mark.cluster

NUM_BLOCKS = 48
LONG_S = 600.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes faster than anything loads: believe in a slow one, wait for loads, try no others."""
    wait_for_loads(monkeypatch, probes=False)


def chain(worker: Worker, token_ids: list[int]) -> list[bytes]:
    return block_digests(root_digest(worker.card.namespace), token_ids, BLOCK_SIZE)


async def flood(cluster: Cluster, rng: random.Random, num_prompts: int = 6) -> None:
    for _ in range(num_prompts):
        await cluster.generate(prompt_of(rng, 12))
    await cluster.becomes_idle()


async def pin(cluster: Cluster, worker_id: str, message: Pin) -> None:
    await cluster.call(worker_id, lambda: cluster.worker(worker_id).parts.pins.pin(message, time.monotonic()))


async def held(cluster: Cluster, worker_id: str, pin_id: str) -> dict[str, int]:
    report = await cluster.call(worker_id, lambda: cluster.worker(worker_id).parts.pins.report("q", [pin_id]))
    return report.held.get(pin_id, {})


async def tier(cluster: Cluster, worker_id: str, name: str) -> TierLoad:
    loads = await cluster.call(worker_id, cluster.worker(worker_id).parts.cache.loads)
    return next(load for load in loads if load.name == name)


def alone(model: Path, tiers: TierConfig | None = None, **engine: Any) -> Any:
    return running_cluster(model, {"c": Role.COLOCATED}, engine={"num_blocks": NUM_BLOCKS} | engine, tiers=tiers)


async def test_a_pinned_prefix_outlives_pressure_in_the_pool_and_expires(tiny_model: Path, oracle: Oracle) -> None:
    rng = random.Random(1)
    async with alone(tiny_model) as cluster:
        pinned, other = prompt_of(rng, 8), prompt_of(rng, 8)
        worker = cluster.worker("c")
        assert worker.card.max_pinned_blocks == {"pool": NUM_BLOCKS // 4}
        for tokens in (pinned, other):
            await cluster.generate(tokens)
        await pin(cluster, "c", Pin(pin_id="a", digests=chain(worker, pinned), ttl_s=LONG_S))
        await flood(cluster, rng)
        assert await held(cluster, "c", "a") == {"pool": 8}
        again = await cluster.generate(pinned)
        assert (again.token_ids, again.num_cached_tokens) == (oracle.answer(pinned), 8 * BLOCK_SIZE)
        assert (await cluster.generate(other)).num_cached_tokens == 0
        await cluster.becomes_idle()  # a live pin is not a leak
        await pin(cluster, "c", Pin(pin_id="a", digests=chain(worker, pinned), ttl_s=0.05))
        await eventually(lambda: not worker.parts.engine.pool.pinned_digests())
        await flood(cluster, rng)
        assert await held(cluster, "c", "a") == {}
        assert (await cluster.generate(pinned)).num_cached_tokens == 0
        await cluster.becomes_idle()


async def test_a_request_that_needs_the_room_of_pins_gets_it(tiny_model: Path, oracle: Oracle) -> None:
    tiers = TierConfig(pin_share=0.9)
    rng = random.Random(2)
    async with alone(tiny_model, tiers, num_blocks=34) as cluster:
        pinned = prompt_of(rng, 28)
        await cluster.generate(pinned)
        worker = cluster.worker("c")
        await pin(cluster, "c", Pin(pin_id="a", digests=chain(worker, pinned), ttl_s=LONG_S))
        assert await held(cluster, "c", "a") == {"pool": 28}
        large = prompt_of(rng, 30)
        assert (await cluster.generate(large)).token_ids == oracle.answer(large)
        assert (await held(cluster, "c", "a"))["pool"] == 3
        await cluster.becomes_idle()


async def test_with_host_memory_pins_keep_blocks_there_and_not_in_the_pool(tiny_model: Path, oracle: Oracle) -> None:
    tiers = TierConfig(host_cache_gb=60.5 * BLOCK_BYTES / 1e9, eviction_policy="lru")
    rng = random.Random(3)
    async with alone(tiny_model, tiers) as cluster:
        pinned, other = prompt_of(rng, 12), prompt_of(rng, 12)
        worker = cluster.worker("c")
        assert worker.card.max_pinned_blocks == {"host": 15}
        # Before anything of it is cached: the pin waits for it.
        await pin(cluster, "c", Pin(pin_id="a", digests=chain(worker, pinned), ttl_s=LONG_S))
        for tokens in (pinned, other):
            await cluster.generate(tokens)
        await flood(cluster, rng, 8)
        assert await held(cluster, "c", "a") == {"pool": 0, "host": 12}
        assert worker.parts.pins.load().num_blocks == {"host": 12}
        again = await cluster.generate(pinned)
        assert (again.token_ids, again.num_cached_tokens) == (oracle.answer(pinned), 12 * BLOCK_SIZE)
        assert (await cluster.generate(other)).num_cached_tokens == 0
        await cluster.call("c", lambda: worker.parts.pins.unpin("a"))
        await flood(cluster, rng, 8)
        assert (await cluster.generate(pinned)).num_cached_tokens == 0
        await cluster.becomes_idle()
        assert worker.parts.pins.load().num_blocks == {"host": 0}


async def store(model: Path, tiers: TierConfig, tokens: list[int]) -> None:
    """Have a worker that ends then compute this prompt and store it."""
    async with alone(model, tiers) as cluster:
        await cluster.generate(tokens)
        await eventually(lambda: not cluster.worker("c").parts.cache.is_busy)


def hold_disk_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reads from disk wait until the event is set."""
    gate, read = threading.Event(), DiskStore.read

    def wait_and_read(store: DiskStore, *arguments: Any) -> Any:
        assert gate.wait(DEADLINE_S)
        return read(store, *arguments)

    monkeypatch.setattr(DiskStore, "read", wait_and_read)
    return gate


def make_machine(model: Path, tiers: TierConfig) -> Machine:
    engine = make_engine(model)
    return Machine(engine, create_tiers(tiers, engine))


def restarted(model: Path, tiers: TierConfig, *prompts: list[int]) -> Machine:
    """A machine whose tiers have these prompts of an earlier one."""
    former = make_machine(model, tiers)
    for tokens in prompts:
        former.serve(tokens)
        former.settle()
    former.close()
    machine = make_machine(model, tiers)
    machine.settle()
    return machine


def follow(pins: WorkerPins, cache: TieredCache) -> None:
    """Tell the pins which blocks came and went, as a worker's loop does."""
    for place, (stored, removed) in cache.take_events().items():
        pins.changed(place, stored, removed)


def disk_and_host(folder: Path, **more: Any) -> TierConfig:
    size_gb = 500 * BLOCK_BYTES / 1e9
    return TierConfig(host_cache_gb=size_gb, disk_cache_path=str(folder), disk_cache_gb=size_gb, **more)


@pytest.mark.parametrize("host_codec", ["raw", "int8"])
async def test_after_a_restart_a_pin_is_served_from_host(host_codec: str, tiny_model: Path, tmp_path: Path) -> None:
    size = f"gb={500 * BLOCK_BYTES / 1e9}"
    tiers = TierConfig(tier=(f"host:?{size}&codec={host_codec}&name=dram", f"disk:{tmp_path}?{size}&name=ssd"))
    tokens = prompt_of(random.Random(4), 12)
    await store(tiny_model, tiers, tokens)
    async with alone(tiny_model, tiers) as cluster:
        worker = cluster.worker("c")
        pinned = Pin(pin_id="a", digests=chain(worker, tokens), ttl_s=LONG_S, prefetch=Prefetch.HOST)
        await pin(cluster, "c", pinned)
        host = worker.parts.cache.tier("dram")
        await eventually(lambda: host is not None and host.tier.count_present(pinned.digests) == 12)
        assert await held(cluster, "c", "a") == {"pool": 0, "dram": 12, "ssd": 12}
        assert worker.parts.pins.load().num_prefetched == {"dram": 12}
        num_disk_reads = (await tier(cluster, "c", "ssd")).num_hits
        again = await cluster.generate(tokens)
        assert again.num_cached_tokens == 12 * BLOCK_SIZE
        assert (await tier(cluster, "c", "dram")).num_hits == 12
        assert (await tier(cluster, "c", "ssd")).num_hits == num_disk_reads
        await cluster.call("c", lambda: worker.parts.pins.unpin("a"))
        await cluster.becomes_idle()


async def test_no_more_comes_up_than_is_kept(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.kv.prefetch._PIECE_BYTES", 2 * BLOCK_BYTES)  # three pieces
    tiers = disk_and_host(tmp_path)
    tokens = prompt_of(random.Random(11), 12)
    await store(tiny_model, tiers, tokens)
    small = replace(tiers, host_cache_gb=20.5 * BLOCK_BYTES / 1e9)
    async with alone(tiny_model, small) as cluster:
        worker = cluster.worker("c")
        pinned = Pin(pin_id="a", digests=chain(worker, tokens), ttl_s=LONG_S, prefetch=Prefetch.HOST)
        await pin(cluster, "c", pinned)
        await eventually(lambda: worker.parts.pins.load().num_blocks["host"] == 5)
        await eventually(lambda: not worker.parts.cache.is_busy and not worker.parts.pins.is_prefetching)
        assert (await tier(cluster, "c", "host")).num_blocks == 5
        assert (await tier(cluster, "c", "disk")).num_hits == 5
        assert await held(cluster, "c", "a") == {"pool": 0, "host": 5, "disk": 12}
        await cluster.becomes_idle()


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, 16])
async def test_a_pinned_session_is_brought_into_free_blocks_of_the_pool(
    tiny_model: Path, tmp_path: Path, oracle: Oracle, num_blocks: int
) -> None:
    tiers = TierConfig(disk_cache_path=str(tmp_path), disk_cache_gb=500 * BLOCK_BYTES / 1e9)
    tokens = prompt_of(random.Random(6), 12)
    await store(tiny_model, tiers, tokens)
    async with alone(tiny_model, tiers, num_blocks=num_blocks) as cluster:
        worker = cluster.worker("c")
        await eventually(lambda: not worker.parts.cache.is_busy)
        blocker = prompt_of(random.Random(7), 5)
        await cluster.generate(blocker)  # five blocks stay cached and are not to be evicted
        await cluster.becomes_idle()
        num_free = worker.parts.engine.pool.num_free
        pinned = Pin(pin_id="a", digests=chain(worker, tokens), ttl_s=LONG_S, prefetch=Prefetch.POOL)
        await pin(cluster, "c", pinned)
        num_brought = min(12, num_free)
        await eventually(lambda: worker.parts.pins.load().num_prefetched.get("pool") == num_brought)
        assert (await held(cluster, "c", "a"))["pool"] == num_brought
        assert worker.parts.engine.pool.count_cached(chain(worker, blocker)) == 5
        await cluster.becomes_idle()
        if num_brought == 12:
            again = await cluster.generate(tokens)
            assert (again.token_ids, again.num_cached_tokens) == (oracle.answer(tokens), 12 * BLOCK_SIZE)
            await cluster.becomes_idle()


async def test_a_pinned_conversation_survives_with_its_answers(tiny_model: Path, oracle: Oracle) -> None:
    """Through the router, over a pair: what the client sees of pinning."""
    rng = random.Random(8)
    async with running_cluster(tiny_model, engine={"num_blocks": NUM_BLOCKS}) as cluster:
        pins = cluster.flow.cache
        wanted = PinRequest(token_ids=None, cache_scope=EVERYONE, conversation_id="chat", ttl_s=LONG_S)
        asked = await pins.pin(wanted)
        assert (asked.num_blocks, set(asked.held)) == (0, {"p", "d"})
        first = prompt_of(rng, 3)
        request = replace(cluster.request(first, max_tokens=40, ignore_eos=True), conversation_id="chat")
        answer = await cluster.serve(request)
        await flood(cluster, rng)
        (state,) = await pins.pins(None, EVERYONE)
        num_blocks = (len(first) + 39) // BLOCK_SIZE
        assert (state.num_blocks, state.num_tokens) == (num_blocks, num_blocks * BLOCK_SIZE)
        assert state.held == {"p": {"pool": 3}, "d": {"pool": num_blocks}}
        second = [*first, *answer.token_ids, *prompt_of(rng, 1)]
        again = await cluster.serve(replace(cluster.request(second), conversation_id="chat"))
        assert again.token_ids == oracle.answer(second)
        # Of the worker that computes the prompt; it may read the rest from the other one.
        assert again.num_cached_tokens - sum(again.num_loaded_tokens.values()) == 3 * BLOCK_SIZE
        await pins.unpin(state.pin_id, None)
        for worker_id in ("p", "d"):
            worker = cluster.worker(worker_id)
            await eventually(lambda worker=worker: not worker.parts.engine.pool.pinned_digests())
        await cluster.becomes_idle()


def test_a_request_goes_before_a_prefetch(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the disk held up in the middle of a piece, a prompt's own loads begin at once and the piece starts over."""
    tiers = disk_and_host(tmp_path)
    pinned, asked = prompt_of(random.Random(9), 12), prompt_of(random.Random(10), 12)
    machine = restarted(tiny_model, tiers, pinned, asked)
    engine, cache = machine.engine, machine.cache
    pins = WorkerPins(engine, cache, share=0.25)
    gate = hold_disk_reads(monkeypatch)
    digests = block_digests(root_digest(engine.namespace), pinned, BLOCK_SIZE)
    pins.pin(Pin(pin_id="a", digests=digests, ttl_s=LONG_S, prefetch=Prefetch.HOST), now := time.monotonic())
    pins.pump(now)
    assert pins.is_prefetching
    sequence = engine.factory.make_sequence("r", asked, GREEDY)
    engine.add(sequence)
    engine.step()
    assert cache.fetcher.is_loading
    pins.pump(now)
    assert not pins.is_prefetching
    pins.pump(now)
    assert not pins.is_prefetching, "it began again while the prompt waited"
    gate.set()
    machine.run_until(lambda: sequence.finish_reason is not None)
    assert sequence.num_cached_tokens > 0

    def is_up() -> bool:
        pins.pump(now)
        follow(pins, cache)
        return pins.load().num_blocks["host"] == 12

    machine.run_until(is_up)
    pins.unpin("a")
    pins.check_integrity(idle=True)
    machine.close()


@pytest.mark.cpu_engine("the late device computes on one")
@pytest.mark.parametrize("target", [Prefetch.POOL, Prefetch.HOST])
def test_a_prefetched_pin_is_used_once_the_device_has_it(tiny_model: Path, tmp_path: Path, target: Prefetch) -> None:
    tiers = replace(disk_and_host(tmp_path), disk_cache_codec="int8")
    tokens = prompt_of(random.Random(13), 6)
    restarted(tiny_model, tiers, tokens).close()
    engine = make_engine(tiny_model)
    device = LateDevice(engine, 0, share_done=0.0)
    cache = (machine := Machine(engine, create_tiers(tiers, engine))).cache
    machine.settle()
    for cached in cache.tiers:
        device.make_late(cached.codec)
    host, stream = cache.tier("host"), device.stream
    assert host is not None
    digests = block_digests(root_digest(engine.namespace), tokens, BLOCK_SIZE)
    pins = WorkerPins(engine, cache, share=0.25)
    pins.pin(Pin(pin_id="a", digests=digests, ttl_s=LONG_S, prefetch=target), now := time.monotonic())

    def pump() -> bool:
        pins.pump(now)
        machine.cache.pump(now)
        if target is Prefetch.HOST and not stream.num_late and pins.is_prefetching:
            stream.launch(lambda: None)  # a step
        return stream.num_late > 0

    machine.run_until(pump)
    for _ in range(50):
        pump()
        assert not any(digest in engine.pool for digest in digests)
        assert target is Prefetch.POOL or not any(digest in host.tier for digest in digests)

    def is_up() -> bool:
        stream.flush()
        pump()
        place = engine.pool if target is Prefetch.POOL else host.tier
        return all(digest in place for digest in digests)

    machine.run_until(is_up)
    pins.unpin("a")
    machine.run_until(lambda: not pins.is_prefetching)
    machine.close()


def test_what_is_under_way_for_a_chain_that_changed_is_given_up(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = disk_and_host(tmp_path)
    tokens = prompt_of(random.Random(12), 6)
    machine = restarted(tiny_model, tiers, tokens)
    engine, cache = machine.engine, machine.cache
    pins = WorkerPins(engine, cache, share=0.25)
    digests = block_digests(root_digest(engine.namespace), tokens, BLOCK_SIZE)
    gate = hold_disk_reads(monkeypatch)
    now = time.monotonic()
    pins.pin(Pin(pin_id="a", digests=digests, ttl_s=LONG_S, prefetch=Prefetch.HOST), now)
    pins.pump(now)
    pins.pin(Pin(pin_id="a", digests=digests[:2], ttl_s=LONG_S, prefetch=Prefetch.HOST), now)
    gate.set()

    def is_up() -> bool:
        pins.pump(now)
        cache.take_events()
        pins.check_integrity()
        return pins.load().num_blocks["host"] == 2

    machine.run_until(is_up)
    machine.settle()
    assert len(cache.tiers[0].tier.digests()) == 2
    pins.unpin("a")
    pins.check_integrity(idle=True)
    machine.close()
