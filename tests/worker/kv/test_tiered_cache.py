"""One engine with tiers below its pool: the same tokens, less computing, and never slower for long."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.engine import Engine
from tandem.engine.sequence import Sequence
from tandem.kv_transfer.codec import create_codec
from tandem.kv_transfer.eviction import POLICIES
from tandem.kv_transfer.tiers.memory import MemoryStore
from tandem.kv_transfer.tiers.tier import Tier
from tandem.protocol.config import TierConfig
from tandem.protocol.load_prior import LoadPrior
from tandem.protocol.sampling import SamplingParams
from tandem.scheduling.cost_model import CostModel
from tandem.worker.kv.cached_tier import CachedTier
from tandem.worker.kv.host_copy import HostCopy
from tandem.worker.kv.tiered_cache import TieredCache, create_tiers
from tests.support.answers import Expects
from tests.support.cluster_harness import BLOCK_BYTES, BLOCK_SIZE, DEADLINE_S, engine_config, prompt_of
from tests.support.late_device import LateDevice
from tests.support.scheduler_listener import FakeListener
from tests.support.store_world import NUMA_NODES
from tests.support.throttled_store import ThrottledStore
from tests.support.waiting import until

pytestmark = pytest.mark.cluster

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
NUM_BLOCKS = 40


class Machine:
    """An engine and its tiers, stepped by hand.

    Unless it `learns`, the cost model does not learn from steps: it keeps assuming a model of 135 M parameters, at
    a ms per token, where the tiny one computes faster than most tiers load.
    """

    def __init__(
        self, engine: Engine, tiers: list[CachedTier], *, learns: bool = False, config: TierConfig = TierConfig()
    ) -> None:
        self.engine = engine
        self._learns = learns
        self.cache = TieredCache(engine, tiers, CostModel().steps("cpu-1"), config=config)
        engine.scheduler.listen(self.cache)
        self._num_requests = 0

    def serve(self, token_ids: list[int]) -> Sequence:
        """Generate; the finished sequence."""
        self._num_requests += 1
        sequence = self.engine.factory.make_sequence(f"r{self._num_requests}", token_ids, GREEDY)
        self.engine.add(sequence)
        self.run_until(lambda: sequence.finish_reason is not None)
        return sequence

    def run_until(self, condition: Any) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "it does not come to an end"
            self.cache.pump(time.monotonic())
            for result in self.engine.step():
                if self._learns:
                    self.cache.after_step(result.stats)

    def has_stored(self) -> bool:
        """Whether the tiers have what was offered to them; waits until they do, however busy the machine is."""

        def is_stored() -> bool:
            self.cache.pump(time.monotonic())
            is_offering = self.cache._offloader.is_busy
            return not (is_offering or any(cached.tier.stats().num_queued_stores for cached in self.cache.tiers))

        until(is_stored, DEADLINE_S)
        return True

    def settle(self) -> None:
        """Until all stores are through."""
        self.run_until(lambda: not self.cache.is_busy)

    def flood(self, rng: random.Random) -> None:
        """Fill the pool with something else."""
        self.flood_unsettled(rng)
        self.settle()

    def flood_unsettled(self, rng: random.Random) -> None:
        for _ in range(3):
            self.serve(prompt_of(rng, NUM_BLOCKS // 2))

    def close(self) -> None:
        self.cache.check_integrity(idle=True)
        self.engine.check_integrity(idle=True)
        self.cache.close()


def cached_kv(engine: Engine, digests: list[bytes]) -> Tensor:
    """A copy of these blocks."""
    blocks = engine.pool.acquire_cached(digests)
    assert len(blocks) == len(digests)
    kv = engine.kv.read(blocks)
    engine.pool.release(blocks)
    return kv


def make_engine(model: Path, kv_codec: str = "raw") -> Engine:
    return Engine(engine_config(model, num_blocks=NUM_BLOCKS), kv_codec=kv_codec)


def tier_config(kind: str, folder: Path, codec: str = "raw") -> TierConfig:
    size_gb = 1000 * BLOCK_BYTES / 1e9
    fields: dict[str, dict[str, Any]] = {
        "host": {"host_cache_gb": size_gb, "host_cache_codec": codec},
        "disk": {"disk_cache_path": str(folder), "disk_cache_gb": size_gb, "disk_cache_codec": codec},
        "object": {"object_cache_url": folder.as_uri(), "object_cache_gb": size_gb, "object_cache_codec": codec},
    }
    if kind in ("numa", "dax"):
        place = "numa:0" if kind == "numa" else f"dax:{folder}/slab"
        return TierConfig(tier=(f"{place}?gb={size_gb}&codec={codec}",))
    return TierConfig(**fields[kind])


@pytest.fixture
def waits_for_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads are waited for, however busy the machine is: what was planned is what happens."""
    monkeypatch.setattr("tandem.worker.kv.fetcher._LATE_SLACK_S", DEADLINE_S)


@pytest.fixture(params=["host", "numa", "dax", "disk", "object"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "numa" and not NUMA_NODES.exists():
        pytest.skip("this kernel has no NUMA nodes")
    return str(request.param)


@pytest.mark.usefixtures("waits_for_loads")
def test_an_evicted_prompt_comes_back_with_the_same_tokens(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    rng = random.Random(7)
    engine = make_engine(tiny_model)
    machine = Machine(engine, create_tiers(tier_config(kind, tmp_path), engine))
    first_prompt = prompt_of(rng, 20)
    first = machine.serve(first_prompt)
    machine.settle()
    machine.flood(rng)
    assert engine.pool.count_cached(first.digests) == 0, "the pool was to forget it"
    again = machine.serve(first_prompt)
    assert again.token_ids == first.token_ids
    record = machine.cache.fetcher.records[-1]
    assert record.outcome == "loaded"
    # A tier with some latency leaves the first few blocks to be computed meanwhile.
    assert record.num_loaded_blocks == 20 - record.loads[0].first_block >= 15
    assert again.num_cached_tokens == record.num_loaded_blocks * BLOCK_SIZE
    assert record.predicted_s < record.recompute_s
    told = machine.cache.fetcher.stats().latest[0]
    assert (told.request_id, told.outcome, told.sources) == (again.request_id, "loaded", [record.loads[0].source])
    assert (told.num_loaded_blocks, told.predicted_s) == (record.num_loaded_blocks, record.predicted_s)
    machine.close()


@pytest.mark.usefixtures("waits_for_loads")
@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
def test_a_lossy_tier_has_its_own_chain_and_loses_little(codec: str, tiny_model: Path, tmp_path: Path) -> None:
    rng = random.Random(9)
    config = tier_config("host", tmp_path, codec)
    engine = make_engine(tiny_model, config.codec_identity)
    assert engine.namespace != make_engine(tiny_model).namespace
    machine = Machine(engine, create_tiers(config, engine))
    first = machine.serve(first_prompt := prompt_of(rng, 10))
    exact = cached_kv(engine, first.digests[:10])
    machine.settle()
    machine.flood(rng)
    again = machine.serve(first_prompt)
    assert again.num_cached_tokens == 10 * BLOCK_SIZE
    error = float((cached_kv(engine, again.digests[:10]) - exact).norm() / exact.norm())
    assert 0 < error < {"fp8": 0.05, "int8": 0.02, "int4": 0.2}[codec]
    machine.close()


@pytest.mark.usefixtures("waits_for_loads", "plain_attention")
def test_kv_in_fp8_comes_back_byte_for_byte(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    rng = random.Random(11)
    fields = {"kv_cache_dtype": "fp8", "attention_backend": "triton", "speculate": "off"}
    engine = Engine(engine_config(tiny_model, num_blocks=NUM_BLOCKS // 4, **fields))  # of float32: four of fp8
    machine = Machine(engine, create_tiers(tier_config(kind, tmp_path), engine))
    first = machine.serve(first_prompt := prompt_of(rng, 20))
    before = cached_kv(engine, first.digests[:20])
    assert before.dtype is torch.float8_e4m3fn
    assert before.float().abs().sum() > 0
    machine.settle()
    machine.flood(rng)
    assert engine.pool.count_cached(first.digests) == 0, "the pool was to forget it"
    again = machine.serve(first_prompt)
    assert again.num_cached_tokens >= 15 * BLOCK_SIZE
    assert again.token_ids == first.token_ids
    loaded = slice(20 - again.num_cached_tokens // BLOCK_SIZE, 20)
    after = cached_kv(engine, first.digests[:20])[loaded]
    assert torch.equal(after.view(torch.uint8), before[loaded].view(torch.uint8))
    machine.close()


class Throttled:
    """A machine with one tier of host memory whose speed can be changed."""

    def __init__(self, model: Path, *, learns: bool = False) -> None:
        engine = make_engine(model)
        codec = create_codec("raw")
        block_bytes = codec.encoded_bytes(engine.kv.block_shape, engine.kv.dtype)
        self.store = ThrottledStore(MemoryStore(block_bytes, 1000))
        tier = Tier("host", self.store, POLICIES["lru"](1000), capacity_blocks=1000)
        prior = LoadPrior(50e-6, 10e9)
        self.tier = CachedTier(tier, codec, block_bytes, num_threads=1, prior=prior)
        self.machine = Machine(engine, [self.tier], learns=learns)

    def outcome(self, token_ids: list[int], rng: random.Random) -> str:
        """What became of the fetch of a prompt that is in the tier only."""
        latency_s, self.store.latency_s = self.store.latency_s, 0.0
        self.machine.flood(rng)
        self.store.latency_s = latency_s
        self.machine.serve(token_ids)
        return self.machine.cache.fetcher.records[-1].outcome


def test_a_slow_tier_is_overtaken_then_left_alone_and_comes_back(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.worker.kv.fetcher._PROBE_INTERVAL_S", 0.0)
    rng = random.Random(10)
    throttled = Throttled(tiny_model, learns=True)
    token_ids = prompt_of(rng, 20)
    throttled.machine.serve(token_ids)
    throttled.machine.settle()
    assert throttled.outcome(token_ids, rng) == "loaded"
    # 50 ms per block of 16 tokens: many times what computing them takes.
    throttled.store.latency_s = 0.05
    outcomes = [throttled.outcome(token_ids, rng) for _ in range(6)]
    assert outcomes[0] == "overtaken"
    # On a busy machine a block may once take as long to compute as to load: then the tier is tried again.
    assert outcomes.count("computed") >= 3, f"it still waits for a slow tier: {outcomes}"
    throttled.store.latency_s = 0.0
    for _ in range(10):
        if throttled.outcome(token_ids, rng) == "loaded":
            break
    else:
        raise AssertionError("it did not come back")
    throttled.machine.close()


@pytest.mark.usefixtures("waits_for_loads")
def test_of_two_memories_the_one_that_proves_faster_is_loaded_from(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DRAM before CXL, in whatever order they were given."""
    monkeypatch.setattr("tandem.worker.kv.fetcher._PROBE_INTERVAL_S", 0.0)
    monkeypatch.setattr("tandem.worker.kv.fetcher._LATE_FACTOR", 1e6)
    rng, engine = random.Random(21), make_engine(tiny_model)
    tiers = create_tiers(TierConfig(tier=("host:?gb=0.01&name=cxl", "host:?gb=0.01&name=dram")), engine)
    monkeypatch.setattr(tiers[0].tier._io, "_store", ThrottledStore(tiers[0].tier._store, latency_s=2e-3))
    machine = Machine(engine, tiers)
    token_ids, sources = prompt_of(rng, 20), []
    for _ in range(5):
        machine.serve(token_ids)
        machine.settle()
        machine.flood(rng)
        records = [record for record in machine.cache.fetcher.records if record.loads]
        sources = [load.source for load in records[-1].loads] if records else []
    assert sources == ["dram"], "it has learned what the other costs"
    costs = {load.name: load.block_s for load in machine.cache.loads()}
    assert costs["dram"] < costs["cxl"] / 2
    machine.close()


@pytest.mark.usefixtures("waits_for_loads")
@pytest.mark.parametrize("window_blocks", [0.5, 4, 10])
def test_prompts_share_a_window_of_bytes(
    window_blocks: float, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few bytes are allowed, a piece at a time is loaded."""
    monkeypatch.setattr("tandem.worker.kv.fetcher._LATE_FACTOR", 1e6)
    rng = random.Random(18)
    engine = make_engine(tiny_model)
    window = TierConfig(load_window_mb=window_blocks * BLOCK_BYTES / 1e6, load_step_mb=BLOCK_BYTES / 1e6)
    machine = Machine(engine, create_tiers(tier_config("host", tmp_path), engine), config=window)
    prompts = [prompt_of(rng, 10) for _ in range(3)]
    expected = [machine.serve(tokens).token_ids for tokens in prompts]
    machine.settle()
    machine.flood(rng)
    sequences = [engine.factory.make_sequence(f"again {i}", tokens, GREEDY) for i, tokens in enumerate(prompts)]
    for sequence in sequences:
        engine.add(sequence)
    most, fetcher = 0, machine.cache.fetcher

    def are_done() -> bool:
        nonlocal most
        most = max(most, sum(piece.num_blocks for fetch in fetcher._fetches for piece in fetch.pieces))
        fetcher.check_integrity()
        return all(sequence.finish_reason is not None for sequence in sequences)

    machine.run_until(are_done)
    assert [sequence.token_ids for sequence in sequences] == expected
    assert [record.outcome for record in list(fetcher.records)[-3:]] == ["loaded"] * 3
    assert 0 < most <= max(window_blocks, 4)
    machine.close()


@pytest.mark.usefixtures("waits_for_loads")
def test_a_tier_that_loses_a_block_costs_only_time(tiny_model: Path, tmp_path: Path) -> None:
    rng = random.Random(11)
    engine = make_engine(tiny_model)
    machine = Machine(engine, create_tiers(tier_config("disk", tmp_path), engine))
    first = machine.serve(first_prompt := prompt_of(rng, 20))
    machine.settle()
    machine.flood(rng)
    for path in tmp_path.rglob(f"{first.digests[7].hex()}*"):
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
    again = machine.serve(first_prompt)
    assert again.token_ids == first.token_ids
    assert machine.cache.fetcher.records[-1].outcome == "failed"
    assert sum(machine.cache.tiers[0].tier.stats().num_misses.values()) > 0
    machine.close()


def test_a_request_that_is_cancelled_while_it_loads_leaves_nothing(tiny_model: Path) -> None:
    rng = random.Random(12)
    throttled = Throttled(tiny_model)
    machine, engine = throttled.machine, throttled.machine.engine
    machine.serve(token_ids := prompt_of(rng, 20))
    machine.settle()
    machine.flood(rng)
    throttled.store.latency_s = 0.05
    engine.add(engine.factory.make_sequence("gone", token_ids, GREEDY))
    machine.run_until(lambda: machine.cache.fetcher.is_loading)
    assert engine.abort("gone")
    machine.run_until(lambda: not machine.cache.fetcher.is_loading)
    assert machine.cache.fetcher.records[-1].outcome == "withdrawn"
    machine.close()


@pytest.mark.cpu_engine("each step has its results when it returns")
def test_a_received_prompt_goes_down_slowly(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its next token would be late."""
    monkeypatch.setattr("tandem.worker.kv.offload._BATCH_BYTES", 2 * BLOCK_BYTES)
    rng = random.Random(15)
    engine = make_engine(tiny_model)
    machine = Machine(engine, create_tiers(tier_config("host", tmp_path), engine))
    (cached,) = machine.cache.tiers
    alone = engine.factory.make_sequence("r", prompt_of(rng, 20), GREEDY)
    engine.add(alone)
    while alone.num_output_tokens < 2:
        engine.step()
    offered = []
    while alone.finish_reason is None:
        machine.cache.pump(time.monotonic())
        offered.append(sum(digest in cached.tier for digest in alone.digests))
        engine.step()
    assert 2 <= offered[0] <= 6
    assert offered[0] < offered[-1] < 20
    machine.settle()
    assert cached.tier.count_present(alone.digests) == 20
    machine.close()


@pytest.mark.cpu_engine("the late device computes on one")
def test_loaded_blocks_are_published_once_the_device_has_them(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is learned of a busy machine: what the tier has is loaded.
    monkeypatch.setattr("tandem.worker.kv.fetcher._LATE_FACTOR", 1e6)
    monkeypatch.setattr("tandem.worker.kv.fetcher.Fetcher.after_step", lambda self, stats: None)
    rng = random.Random(17)
    engine = make_engine(tiny_model)
    machine = Machine(engine, create_tiers(tier_config("host", tmp_path), engine))
    tokens = prompt_of(rng, 12)
    expected = machine.serve(tokens).token_ids
    machine.flood(rng)
    device = LateDevice(engine, 0, share_done=0.05)
    for cached in machine.cache.tiers:
        device.make_late(cached.codec)

    def published(sequence: Sequence, first: int, end: int) -> None:
        late = [block for block in sequence.blocks[first:end] if device.stream.writes[block]]
        assert not late, f"blocks {late} are published before they are written"

    engine.scheduler.listen(FakeListener(when_published=published))
    sequence = machine.serve(tokens)
    assert sequence.token_ids == expected
    assert sequence.num_cached_tokens > 0
    assert device.stream.num_late > 0
    machine.settle()
    machine.close()


def test_blocks_evicted_before_their_turn(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.kv.offload._BATCH_BYTES", BLOCK_BYTES)
    monkeypatch.setattr("tandem.worker.kv.offload._BACKLOG_SHARE", 0.0)
    rng = random.Random(16)
    engine = make_engine(tiny_model)
    machine = Machine(engine, create_tiers(tier_config("host", tmp_path), engine))
    (cached,) = machine.cache.tiers
    sequences = [machine.serve(prompt_of(rng, 20)) for _ in range(6)]
    machine.settle()
    assert cached.tier.stats().num_drops["evicted before its turn"] > 10
    monkeypatch.undo()
    for sequence in sequences:
        num_present = cached.tier.count_present(sequence.digests)
        assert machine.serve(sequence.token_ids[:323]).token_ids == sequence.token_ids, num_present
    machine.settle()
    machine.close()


class SlowCopy(HostCopy):
    """As on a GPU: the bytes are there some time later."""

    arrived = False

    @property
    def is_done(self) -> bool:
        return SlowCopy.arrived


def test_blocks_still_on_the_device_are_bounded_and_stored_as_they_arrive(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.worker.kv.offload.HostCopy", SlowCopy)
    monkeypatch.setattr("tandem.worker.kv.offload.MAX_IN_FLIGHT_BYTES", 15 * BLOCK_BYTES)
    monkeypatch.setattr(SlowCopy, "arrived", False)
    rng = random.Random(14)
    engine = make_engine(tiny_model)
    LateDevice(engine, 0, share_done=1.0)
    machine = Machine(engine, create_tiers(tier_config("host", tmp_path), engine))
    (cached,) = machine.cache.tiers
    sequence = machine.serve(prompt_of(rng, 20))
    assert (len(cached.tier.digests()), machine.cache.is_busy) == (0, True)
    assert cached.tier.stats().num_drops == {}
    exact = cached_kv(engine, sequence.digests[:15])
    machine.flood_unsettled(rng)
    monkeypatch.setattr(SlowCopy, "arrived", True)
    machine.settle()
    assert cached.tier.count_present(sequence.digests) == 15
    data = torch.empty(15, cached.block_bytes, dtype=torch.uint8)
    load = cached.tier.load(sequence.digests[:15], data.numpy())
    machine.run_until(lambda: load.is_done)
    blocks = engine.pool.try_allocate(15)
    assert blocks is not None
    cached.decode_into(engine.kv, blocks, data)
    assert torch.equal(engine.kv.read(blocks), exact), "a block changed on its way"
    engine.pool.release(blocks)
    machine.close()


@pytest.mark.usefixtures("waits_for_loads")
def test_a_preempted_sequence_comes_back_from_the_tier(tiny_model: Path, tmp_path: Path) -> None:
    rng = random.Random(13)
    engine = make_engine(tiny_model)
    engine.scheduler.admission.lengths = Expects(1)
    machine = Machine(engine, create_tiers(tier_config("host", tmp_path), engine))
    long = SamplingParams(max_tokens=8 * BLOCK_SIZE, temperature=0.0, ignore_eos=True)
    sequences = [engine.factory.make_sequence(f"s{idx}", prompt_of(rng, 8), long) for idx in range(4)]
    for sequence in sequences:
        engine.add(sequence)
    machine.run_until(lambda: machine.has_stored() and all(sequence.finish_reason for sequence in sequences))
    assert engine.scheduler.num_preemptions > 0
    assert any(record.num_loaded_blocks > 8 for record in machine.cache.fetcher.records), "no answer came back"
    alone = Engine(engine_config(tiny_model))
    for sequence in sequences:
        expected = alone.factory.make_sequence(
            sequence.request_id, sequence.token_ids[: sequence.num_prompt_tokens], long
        )
        alone.add(expected)
        while expected.finish_reason is None:
            alone.step()
        assert sequence.token_ids == expected.token_ids
    machine.close()
