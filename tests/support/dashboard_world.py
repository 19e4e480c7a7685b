"""A deciding process as the dashboard sees it: workers with load, tenants and decisions, without any processes."""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from tandem.frontend.http.metrics import FrontendMetrics
from tandem.protocol.errors import Overloaded
from tandem.protocol.messages import FetchStats, LinkLoad, Role, TierLoad, WorkerLoad
from tandem.router.overview import NUM_DECISIONS, overview_of, workers_overview
from tandem.scheduling.admission.forecast import Forecast
from tandem.scheduling.admission.stats import TenantStats
from tandem.scheduling.admission.tenants import TenantPolicy, Tenants
from tandem.scheduling.admission.work import NO_WORK, Work
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.decisions import DecisionLog, RoutingDecision
from tandem.scheduling.placement.placement import Candidate, Placement, Terms
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.placement.shadow import Shadow
from tandem.scheduling.request import ServiceClass
from tandem.scheduling.workers.load import RequestLoad
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import RegisteredWorker
from tests.support.builders import add_ready, make_card

NUM_BLOCKS = 4096
SEATS = 64


@dataclass
class FakeAdmission:
    """An `AdmissionSource`."""

    stats: dict[str, TenantStats] = field(default_factory=dict)
    waiting: dict[str, Work] = field(default_factory=dict)
    shadow: Shadow = field(default_factory=Shadow)

    def queued(self) -> dict[str, Work]:
        return self.waiting


class DashboardWorld:
    """Half of the workers prefill and half decode. `tick` lets a second of random traffic pass."""

    def __init__(
        self, num_workers: int = 2, *, names: Sequence[str] = (), tenants: Sequence[str] = ("chat",), seed: int = 1
    ) -> None:
        self.random = random.Random(seed)
        self.registry, self.index, self.costs = Registry(), PrefixIndex(), CostModel()
        self.sizing = CacheSizing(self.registry, self.costs)
        self.tenants = Tenants(named={name: TenantPolicy(weight=1.0 + place) for place, name in enumerate(tenants)})
        self.admission = FakeAdmission({name: TenantStats() for name in tenants})
        self.log = DecisionLog()
        self.metrics = FrontendMetrics(CollectorRegistry())
        self.autoscaler: dict[str, Any] = {}
        self.settings = {
            "--prefill": str(num_workers // 2),
            "--decode": str(num_workers - num_workers // 2),
            "--host-cache-gb": "8.0",
            "--no-autoscale": "",
        }
        self.num_requests = 0
        for number in range(num_workers):
            is_prefill = number < num_workers // 2
            role = Role.PREFILL if is_prefill else Role.DECODE
            name = names[number] if names else f"{role.value}-{number if is_prefill else number - num_workers // 2}"
            card = make_card(
                name,
                role,
                kind="NVIDIA H200",
                num_blocks=NUM_BLOCKS,
                max_num_seqs=SEATS,
                max_num_batched_tokens=8192,
                tiers={"host": "", "disk": "a folder", "object": "a bucket"},
            )
            add_ready(self.registry, card)
            self.index.add_worker(name, 1)
            self._report(self.registry.get(name), self.random.random())

    async def overview(self) -> dict[str, Any]:
        """As `OperatorApi.overview`."""
        decisions = self.log.to_json(time.monotonic(), NUM_DECISIONS)
        shared = overview_of(
            self.registry,
            self.costs,
            self.admission,
            self.tenants,
            decisions=decisions,
            autoscaler=self.autoscaler,
            settings=self.settings,
        )
        return {"models": ["org/toy"], **shared, **workers_overview(self.registry, self.index, self.costs, self.sizing)}

    def fill(self, num_ticks: int) -> None:
        """Traffic from before anybody looked, and what an autoscaler would say."""
        for _ in range(num_ticks):
            self.tick(60)
        told = "99.2% in time on 1 prefill + 1 decode workers, 4.20 requests/s, prefill waits 0.42 s at load 0.61"
        move = {
            "worker": "decode-3",
            "from": "decode",
            "to": "prefill",
            "reason": "flip decode-3 to prefill: 71.0% in time, prefill waits 2.10 s, decode 0.30 s; 99.1% after it",
            "began": time.time() - 300,
            "serving_after_s": 0.012,
            "drained_after_s": 4.2,
        }
        self.autoscaler = {
            "reason": f"on target, nothing to do: {told}",
            "prefill_wait_s": 0.42,
            "decode_wait_s": 0.31,
            "flips": [move] if len(self.registry) > 2 else [],
            "arrivals": [
                {"worker": "decode-9", "role": "decode", "reason": "add 1 decode worker", "began": time.time() - 200}
                | {"withdrawn": "Ray has found no room by its deadline"}
            ],
            "departures": [
                {"id": 1, "worker": "decode-8", "restart": False, "reason": "remove decode-8: one too many"}
                | {"began": time.time() - 100, "finished": True, "left_after_s": 1.5}
            ],
        }

    def tick(self, num_requests: int = 8) -> None:
        """A second of traffic."""
        for worker in self.registry:
            self._report(worker, min(max(_busy(worker) + self.random.uniform(-0.1, 0.1), 0.05), 0.98))
        for _ in range(num_requests):
            self.request()

    def request(self, tenant: str = "") -> RoutingDecision:
        """A request that is placed and answered, or refused if there is one in twenty."""
        tenant = tenant or self.random.choice(list(self.admission.stats))
        self.num_requests += 1
        placement = self._placement()
        ttft_s = placement.best.terms.ttft_s
        error = self.num_requests % 20 == 0 and Overloaded(
            "The queue is too long.", retry_after_s=2.0, code="queue_full"
        )
        forecast = Forecast(placement, NO_WORK, NO_WORK, 0.0, ttft_s, math.inf, error or None)
        decision = RoutingDecision(f"cmpl-{self.num_requests:08d}", ServiceClass(tenant, 0), time.monotonic(), forecast)
        self.log.add(decision)
        stats = self.admission.stats[tenant]
        if error:
            decision.outcome, decision.error = "rejected", error
            stats.rejected[error.code] += 1
            self.metrics.requests.labels("/v1/completions", "429").inc()
            return decision
        decision.outcome, decision.placement, decision.wait_s = "dispatched", placement, 0.002
        self.admission.shadow.note(placement)
        decision.actual_ttft_s = ttft_s * self.random.uniform(0.8, 1.3)
        stats.num_admitted += 1
        stats.wait_s += 0.002
        self.metrics.running_requests.set(sum(worker.load.num_running for worker in self.registry))
        self.admission.waiting[tenant] = Work(self.random.randrange(4), 0.5)
        self._count(decision, placement)
        return decision

    def _count(self, decision: RoutingDecision, placement: Placement) -> None:
        metrics, num_prompt = self.metrics, placement.num_prompt_tokens
        metrics.requests.labels("/v1/completions", "200").inc()
        metrics.prompt_tokens.inc(num_prompt)
        metrics.cached_tokens.inc(placement.best.num_cached_tokens)
        metrics.generation_tokens.inc(120)
        metrics.ttft_s.observe(decision.actual_ttft_s or 0.0)
        metrics.itl_s.observe_all([self.random.uniform(0.012, 0.03) for _ in range(20)])
        metrics.duration_s.observe(2.0)
        conversation = min(int(self.random.paretovariate(0.5)), 1 << 20)  # few are asked often, many once
        prompt = [hashlib.sha256(b"%d %d" % (conversation, number)).digest()[:16] for number in range(num_prompt // 16)]
        self.sizing.observe(
            prompt,
            [],
            block_size=16,
            num_prompt_tokens=num_prompt,
            num_cached_tokens=placement.best.num_cached_tokens,
            tenant=decision.service_class.tenant,
        )

    def _placement(self) -> Placement:
        workers = list(self.registry)
        prefill = self.random.choice([one for one in workers if one.role is Role.PREFILL])
        decode = self.random.choice([one for one in workers if one.role is Role.DECODE])
        num_prompt = self.random.randrange(16, 240) * 16
        cached = num_prompt * self.random.randrange(4) // 4
        prefill_s = (num_prompt - cached) / 8000
        pair = Terms(0.02, 0.004, prefill_s, 0.0, 0.012, 0.0, 0.3)
        alone = Terms(0.01, 0.0, prefill_s * 1.2, prefill_s * 2, 0.0, 0.05, 0.34)
        candidates = [
            Candidate(prefill, decode, cached, None, pair, "host" if cached else ""),
            Candidate(decode, decode, cached // 2, None, alone),
        ]
        best, runner_up = sorted(candidates, key=lambda one: one.terms.total_s)
        load = RequestLoad(best.prefill.worker_id, best.decode.worker_id, num_prompt - cached, cached, num_prompt + 100)
        if self.random.random() < 0.1:
            self.registry.reserve(load)
        shadow = {"round-robin": 0.1 + prefill_s, "kv": 0.02}
        return Placement(best, runner_up, (), num_prompt, 100, {"not_ready": 1}, shadow=shadow)

    def _report(self, worker: RegisteredWorker | None, busy: float) -> None:
        assert worker is not None
        num_running = round(busy * SEATS)
        load = WorkerLoad(
            num_running=num_running,
            num_free_blocks=round((1 - busy) * NUM_BLOCKS),
            num_free_seats=SEATS - num_running,
            num_open_leases=round(busy * 3) if worker.role is Role.DECODE else 0,
        )
        self.registry.note_load(worker.worker_id, load, 0.0)
        loaded = Counter(worker.fetches.num_loaded_blocks if worker.fetches else {})
        loaded.update({"host": 6, "disk": 2, "peer": 1})
        tiers = [
            TierLoad(name="host", num_blocks=round(busy * 16384), capacity_blocks=16384, block_s=0.0001),
            TierLoad(name="disk", num_blocks=round(busy * 50000), capacity_blocks=65536, block_s=0.0008),
            TierLoad(name="object", num_blocks=90000, capacity_blocks=262144, block_s=0.004),
        ]
        fetches = FetchStats(
            num_prompts={"loaded": 1},
            num_loaded_blocks=dict(loaded),
            num_lent_blocks=0,
            predicted_load_s=0.1,
            actual_load_s=0.1,
            saved_s=0.2,
        )
        self.registry.note_tiers(worker.worker_id, tiers, fetches)
        if worker.role is Role.PREFILL:
            before = worker.links[0] if worker.links else LinkLoad(peer_id="decode-0")
            link = LinkLoad(
                peer_id="decode-0",
                num_handoffs=before.num_handoffs + 3,
                num_bytes=before.num_bytes + 40_000_000,
                exposed_s=before.exposed_s + 0.01,
            )
            self.registry.note_links(worker.worker_id, [link])


def _busy(worker: RegisteredWorker) -> float:
    return worker.load.num_running / SEATS
