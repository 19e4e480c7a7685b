"""One engine as the deciding side knows it: its state, circuit breaker, cache and load.

Used from one event loop only. `EngineFleet` adds and removes it, `EngineProber` finds out whether it is available, and
running requests count themselves in and out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec
from zmq.asyncio import Context

from tandem.protocol.config import ExternalEnginesConfig
from tandem.protocol.digest import root_digest
from tandem.protocol.messages import FetchStats, PeerAddress, TierLoad, WorkerCard, WorkerState
from tandem.router.engines.addresses import Resolve
from tandem.router.engines.breaker import Breaker
from tandem.router.engines.cache_view import CacheView
from tandem.router.engines.config import EngineSpec
from tandem.router.engines.digests import digest_root
from tandem.router.engines.engine_progress import EngineProgress
from tandem.router.engines.engine_status import CacheSize, ServedModel
from tandem.router.engines.foreign_load import ForeignLoad, MeanLengths
from tandem.router.engines.probe_client import ProbeClient
from tandem.router.engines.step_timing import StepTiming
from tandem.router.engines.tls import engine_tls
from tandem.runtime.time_slicer import TimeSlicer
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry

DEFAULT_BLOCK_SIZE = 16
DEFAULT_SIMULATED_BLOCKS = 8192  # cache of an engine that does not report its size
DEFAULT_NUM_BLOCKS = 1 << 16
DEFAULT_MODEL_LEN = 1 << 20
DEFAULT_BATCHED_TOKENS = 2048  # vLLM's default; SGLang's is of the same order
MAX_RETRY_AFTER_S = 60.0
MAX_HELD_BACK = 1024  # tenants that one engine gets no requests of for now


class RunningRequest(Protocol):
    """A request under way on an engine."""

    @property
    def has_answer(self) -> bool:
        """Whether the first byte of its answer has come."""

    def abort(self, engine: str, reason: str) -> None:
        """End it now, with an error that names the engine."""


class RemoteEngine:
    """The router's side of one engine."""

    def __init__(
        self,
        spec: EngineSpec,
        config: ExternalEnginesConfig,
        *,
        registry: Registry,
        index: PrefixIndex,
        context: Context,
        lengths: MeanLengths,
        resolve: Resolve | None,
        slicer: TimeSlicer,
    ) -> None:
        """`resolve` gives the addresses that its host may be connected at; None = any that the name has.

        `slicer` divides the time among what engines send.
        """
        self.configured = spec
        self.spec = spec  # with the model that the engine reported
        self.state = WorkerState.STARTING
        self.reason = "not reached yet"
        self.is_fallback = False  # it drains, but still serves what no other engine can
        self.is_removed = False
        self.is_gone = asyncio.Event()
        self.breaker = Breaker(
            max_failures=config.breaker_failures, open_s=config.breaker_open_s, max_open_s=config.breaker_max_open_s
        )
        self._busy_until_s: dict[str, float] = {}  # by the tenant that it refused
        self.running: set[RunningRequest] = set()
        self.foreign = ForeignLoad(spec.name, registry, lengths)
        self.num_requests = 0
        self.num_failures = 0
        self.num_stalls = 0
        self.progress = EngineProgress()
        self.card: WorkerCard | None = None
        self.capabilities: dict[str, Any] | None = None  # None = it has not reported them
        self.gives_token_ids = False  # whether its streams have the ids of their tokens, if asked for
        self.step_timing = StepTiming(DEFAULT_BATCHED_TOKENS)
        self.cache = CacheView(spec.name, index, context, self._set_reason, self._note_tiers)
        self._registry = registry
        self._epoch = 0
        self.tls = engine_tls(spec, config)  # None = it speaks plain HTTP
        self.probe_client = ProbeClient(spec.url, spec.request_headers(), resolve, self.tls, slicer)

    @property
    def name(self) -> str:
        """Its name here, and its worker id."""
        return self.spec.name

    @property
    def adapters(self) -> list[str]:
        """Names of the LoRA adapters that it has, or had when it was last there."""
        return self.card.adapters if self.card is not None else []

    def refusal(self, now: float, *, tenant: str | None = None, is_last: bool = False, falls_back: bool = False) -> str:
        """Why it gets no request of a tenant now, or of some tenant; "" = it may get one.

        `is_last`: there is no other engine. `falls_back`: no engine that is ready can take the request.
        """
        if self.state is not WorkerState.READY and not (falls_back and self.is_fallback):
            return f"{self.state.value}: {self.reason}"
        if not self.breaker.allows(now) and not (is_last and self.breaker.may_be_bypassed):
            wait_s = self.breaker.retry_in_s(now)
            return f"circuit open for {wait_s:.1f} s more" if wait_s else "circuit half_open: a trial is under way"
        wait_s = self.busy_s(now, tenant)
        return f"busy for {wait_s:.1f} s more" if wait_s else ""

    def begin(self, request: RunningRequest, now: float) -> None:
        """Count a request in."""
        self.running.add(request)
        self.progress.begin(request, now)
        self.num_requests += 1

    def end(self, request: RunningRequest) -> None:
        """Count a request out. Later calls change nothing."""
        self.running.discard(request)
        self.progress.end(request)

    def hold_back(self, retry_after_s: float, now: float, tenant: str) -> None:
        """Respect a Retry-After.

        It holds for the tenant alone: an engine may refuse a request for what it is, or for whose it is, and one
        tenant's requests must not keep it from the others.
        """
        busy = {name: until_s for name, until_s in self._busy_until_s.items() if until_s > now}
        busy[tenant] = max(busy.get(tenant, now), now + min(retry_after_s, MAX_RETRY_AFTER_S))
        if len(busy) > MAX_HELD_BACK:
            del busy[min(busy, key=busy.__getitem__)]
        self._busy_until_s = busy

    def busy_s(self, now: float, tenant: str | None = None) -> float:
        """How long it gets no requests of the tenant because it refused one; without a tenant, the longest."""
        busy = self._busy_until_s
        until_s = max(busy.values(), default=0.0) if tenant is None else busy.get(tenant, 0.0)
        return max(until_s - now, 0.0)

    def next_card(self, served: ServedModel, size: CacheSize) -> WorkerCard:
        """The engine's card for its next life: values as configured, else as reported, else defaults."""
        model = served.name
        spec = replace(self.configured, model=model)
        block_size = spec.block_size or size.block_size or DEFAULT_BLOCK_SIZE
        return WorkerCard(
            address=PeerAddress(worker_id=spec.name, epoch=self._epoch + 1, endpoint=spec.url, heartbeat_endpoint=""),
            role=spec.role,
            kind=spec.cost_kind,
            model=model,
            max_model_len=spec.max_model_len or served.max_model_len or DEFAULT_MODEL_LEN,
            block_size=block_size,
            num_blocks=spec.num_blocks or size.num_blocks or DEFAULT_NUM_BLOCKS,
            block_bytes=spec.kv_bytes_per_token * block_size,
            max_num_batched_tokens=spec.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
            # A name of its own: engines cannot read each other's caches, so placement must not count on it.
            namespace=root_digest(digest_root(model, block_size), cache_salt=spec.name),
            adapters=list(served.adapters),
            serves_alone=spec.serves_alone,
            loads_all=True,
            pid=0,
        )

    def join(self, card: WorkerCard, now: float) -> None:
        """Begin a life with this card: ready, and with an empty cache as far as we know."""
        self.card = card
        self.spec = replace(self.configured, model=card.model)
        self._epoch = card.address.epoch
        self.step_timing = StepTiming(card.max_num_batched_tokens)
        self.progress.joined(now)
        self._registry.add(card, now)
        has_size = self.spec.num_blocks or card.num_blocks != DEFAULT_NUM_BLOCKS
        self.cache.start(self.spec, card, card.num_blocks if has_size else DEFAULT_SIMULATED_BLOCKS)
        self.set_state(WorkerState.READY, "")

    def note_served(self, served: ServedModel) -> None:
        """Note what it serves now; vLLM loads and unloads LoRA adapters at run time."""
        adapters, self.capabilities = served.adapters, served.capabilities
        if self.card is None or adapters == tuple(self.card.adapters):
            return
        self.card = msgspec.structs.replace(self.card, adapters=list(adapters))
        if self._registry.get(self.name) is not None:
            self._registry.set_adapters(self.name, adapters)

    def leave(self, reason: str) -> None:
        """End a life: its cache and its foreign load are forgotten."""
        self.cache.stop()
        self.foreign.clear()
        self.set_state(WorkerState.DEAD, reason)

    def stall(self, reason: str, now: float) -> None:
        """Take its requests from it: it answers, but computes nothing. It gets others once it has shown a step."""
        self.num_stalls += 1
        self.progress.stalled()
        self.breaker.stalled(now)
        self.leave(reason)
        for request in list(self.running):
            request.abort(self.name, reason)

    def set_state(self, state: WorkerState, reason: str, *, is_fallback: bool = False) -> None:
        """Change its state here and in the registry."""
        self.state, self.reason, self.is_fallback = state, reason, is_fallback
        self._registry.set_state(self.name, state, reason or "answers", is_fallback=is_fallback)

    async def close(self) -> None:
        """Close its connections and sockets."""
        await self.cache.close()
        self.probe_client.close()

    def to_json(self, now: float) -> dict[str, Any]:
        """The engine in `GET /v1/engines`. No key is shown, only the name of its variable."""
        spec, card, worker = self.spec, self.card, self._registry.get(self.name)
        return {
            "name": spec.name,
            "url": spec.url,
            "model": spec.model,
            "adapters": self.adapters,
            "kind": spec.kind,
            "role": spec.role.value,
            "group": spec.group,
            "data_parallel_rank": spec.data_parallel_rank,
            "state": self.state.value,
            "reason": self.reason,
            "refusal": self.refusal(now),
            "circuit": self.breaker.state(now).value,
            "num_circuit_openings": self.breaker.num_opened,
            "num_running": len(self.running),
            "num_foreign": len(self.foreign),
            "num_requests": self.num_requests,
            "num_failures": self.num_failures,
            "num_stalls": self.num_stalls,
            "block_size": card.block_size if card else None,
            "num_blocks": card.num_blocks if card else None,
            "max_model_len": card.max_model_len if card else None,
            "gives_token_ids": self.gives_token_ids,
            "prefix_index": "events" if spec.kv_events else "estimated",
            "num_event_gaps": self.cache.num_event_gaps,
            "tiers": [msgspec.to_builtins(tier) for tier in worker.tiers] if worker else [],
        }

    def _set_reason(self, reason: str) -> None:
        self.reason = reason

    def _note_tiers(self, tiers: Sequence[TierLoad], fetches: FetchStats) -> None:
        self._registry.note_tiers(self.name, tiers, fetches)
