"""One engine at run time: its client, its breaker, and what is known and expected of its cache.

Everything here is of one event loop. `EngineFleet` changes its life; an `Attempt` counts itself in and out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from zmq.asyncio import Context

from tandem.protocol.config import ExternalEnginesConfig
from tandem.protocol.digest import root_digest
from tandem.protocol.messages import BlockEvents, PeerAddress, WorkerCard, WorkerState
from tandem.router.engines.addresses import Resolve
from tandem.router.engines.breaker import Breaker
from tandem.router.engines.config import EngineSpec
from tandem.router.engines.kv_events import BlockTranslator, KvEventFeed
from tandem.router.engines.probe_client import ProbeClient
from tandem.router.engines.simulated_cache import SimulatedCache
from tandem.router.engines.step_timing import StepTiming
from tandem.router.engines.upstream import Upstream
from tandem.runtime.background import BackgroundTasks
from tandem.scheduling.prefix_index import PrefixIndex
from tandem.scheduling.registry import Booking

__all__ = ["RemoteEngine", "RunningRequest", "digest_root"]

DEFAULT_BLOCK_SIZE = 16
DEFAULT_SIMULATED_BLOCKS = 8192  # of an engine that does not tell its size
DEFAULT_NUM_BLOCKS = 1 << 16
DEFAULT_MODEL_LEN = 1 << 20
DEFAULT_BATCHED_TOKENS = 2048  # vLLM's, and SGLang's is of that order
MAX_RETRY_AFTER_S = 60.0


class RunningRequest(Protocol):
    """A request under way on an engine."""

    @property
    def has_answer(self) -> bool:
        """Whether its first byte has come."""

    def abort(self, reason: str) -> None:
        """End it now, with an error that names the engine."""


class RemoteEngine:
    """What the router has of one engine."""

    def __init__(self, spec: EngineSpec, config: ExternalEnginesConfig, resolve: Resolve | None = None) -> None:
        """`resolve` gives the addresses that it may be connected at; None = any its name has."""
        self.configured = spec
        self.spec = spec  # with the model it told
        self.state = WorkerState.STARTING
        self.reason = "not reached yet"
        self.is_removed = False
        self.is_gone = asyncio.Event()
        self.breaker = Breaker(
            max_failures=config.breaker_failures, open_s=config.breaker_open_s, max_open_s=config.breaker_max_open_s
        )
        self.busy_until_s = 0.0
        self.running: set[RunningRequest] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.foreign: list[Booking] = []  # load that others put on it
        self.has_metrics = True
        self.num_requests = 0
        self.num_failures = 0
        self.epoch = 0
        self.card: WorkerCard | None = None
        self.step_timing = StepTiming(DEFAULT_BATCHED_TOKENS)
        self.feed: KvEventFeed | None = None
        self._simulated_cache: SimulatedCache | None = None
        self._translator: BlockTranslator | None = None
        self._sequence = 0
        self._feed_task: asyncio.Task[None] | None = None
        self._background = BackgroundTasks()
        key = spec.api_key()
        headers = spec.headers | ({"authorization": f"Bearer {key}"} if key else {})
        self.upstream = Upstream(spec.url, headers, connect_timeout_s=config.connect_timeout_s, resolve=resolve)
        self.probe_client = ProbeClient(spec.url, headers, resolve)

    @property
    def name(self) -> str:
        """Its name here, and its worker id."""
        return self.spec.name

    def refusal(self, now: float, *, is_last: bool = False) -> str:
        """Why it is given nothing just now; "" when it may be. `is_last`: there is no other engine."""
        if self.state is not WorkerState.READY:
            return f"{self.state.value}: {self.reason}"
        if not self.breaker.allows(now) and not (is_last and self.breaker.may_be_passed):
            return f"circuit {self.breaker.state(now).value}"
        return f"busy for {self.busy_until_s - now:.1f} s more" if now < self.busy_until_s else ""

    def begin(self, request: RunningRequest) -> None:
        """Count a request in."""
        self.running.add(request)
        self.num_requests += 1
        self.idle.clear()

    def end(self, request: RunningRequest) -> None:
        """Count a request out; again changes nothing."""
        self.running.discard(request)
        if not self.running:
            self.idle.set()

    def hold_back(self, retry_after_s: float, now: float) -> None:
        """Respect a Retry-After."""
        self.busy_until_s = max(self.busy_until_s, now + min(retry_after_s, MAX_RETRY_AFTER_S))

    def join(self, card: WorkerCard, index: PrefixIndex, context: Context) -> None:
        """Begin a life: an empty cache, as far as we know, and its events from here on."""
        self.card = card
        self.step_timing = StepTiming(card.max_num_batched_tokens)
        self._sequence = 0
        index.add_worker(self.name, self.epoch)
        if not self.spec.kv_events:
            self._simulated_cache = SimulatedCache(self.spec.num_blocks or _told_blocks(card), self.spec.cache_ttl_s)
            return
        self._translator = BlockTranslator(digest_root(self.spec.model, card.block_size), card.block_size)

        def on_batch(events: list[dict[str, Any]], is_lost: bool) -> None:
            self._apply(events, is_lost, index)

        self.feed = KvEventFeed(context, self.spec.kv_events, self.spec.kv_replay, on_batch)
        self._feed_task = self._background.keep(f"KV events of engine {self.name}", self.feed.run)

    def leave(self, index: PrefixIndex) -> None:
        """End a life: what it had cached counts no more."""
        index.remove_worker(self.name)
        if self._feed_task is not None:
            self._feed_task.cancel()
        self._feed_task = self._simulated_cache = self._translator = None
        for booking in self.foreign:
            booking.release()
        self.foreign.clear()

    async def close(self) -> None:
        """Close its connections and sockets."""
        await self._background.close()
        await self.upstream.close()
        await self.probe_client.aclose()

    def expect_cached(self, digests: Sequence[bytes], index: PrefixIndex, now: float) -> None:
        """A prompt is on its way there: it will be cached, for a while, or until events say more."""
        if self._simulated_cache is None:
            index.speculate([self.name], digests, now)
        else:
            self._publish(*self._simulated_cache.touch(digests, now), index)

    def expire(self, index: PrefixIndex, now: float) -> None:
        """Let go of what was not used for long."""
        if self._simulated_cache is not None and (removed := self._simulated_cache.expire(now)):
            self._publish([], removed, index)

    def to_json(self, now: float) -> dict[str, Any]:
        """What `GET /v1/engines` tells. No key: the name of its variable at most."""
        spec, card = self.spec, self.card
        return {
            "name": spec.name,
            "url": spec.url,
            "model": spec.model,
            "kind": spec.kind,
            "role": spec.role.value,
            "group": spec.group,
            "state": self.state.value,
            "reason": self.reason,
            "refusal": self.refusal(now),
            "circuit": self.breaker.state(now).value,
            "num_circuit_openings": self.breaker.num_opened,
            "num_running": len(self.running),
            "num_foreign": len(self.foreign),
            "num_requests": self.num_requests,
            "num_failures": self.num_failures,
            "block_size": card.block_size if card else None,
            "num_blocks": card.num_blocks if card else None,
            "max_model_len": card.max_model_len if card else None,
            "prefix_index": "events" if spec.kv_events else "estimated",
            "num_event_gaps": self.feed.num_gaps if self.feed else 0,
        }

    def _apply(self, events: list[dict[str, Any]], is_lost: bool, index: PrefixIndex) -> None:
        translator = self._translator
        if translator is None:
            return
        if is_lost:
            events = [{"type": "AllBlocksCleared"}, *events]
        try:
            change = translator.apply(events)
        except (KeyError, TypeError, ValueError) as exc:
            self.reason = f"its KV events are malformed: {exc!r}"
            return
        if change.is_cleared:
            index.add_worker(self.name, self.epoch)
            self._sequence = 0
        self._publish(change.stored, change.removed, index)

    def _publish(self, stored: list[bytes], removed: list[bytes], index: PrefixIndex) -> None:
        if stored or removed:
            self._sequence += 1
            index.apply(
                BlockEvents(
                    worker_id=self.name, epoch=self.epoch, sequence=self._sequence, stored=stored, removed=removed
                )
            )


def card_of(spec: EngineSpec, epoch: int, *, model_len: int, block_size: int, num_blocks: int) -> WorkerCard:
    """The engine as a worker: what was configured, else what it told, else a default."""
    block_size = spec.block_size or block_size or DEFAULT_BLOCK_SIZE
    return WorkerCard(
        address=PeerAddress(worker_id=spec.name, epoch=epoch, endpoint=spec.url, heartbeat_endpoint=""),
        role=spec.role,
        kind=spec.cost_kind,
        model=spec.model,
        max_model_len=spec.max_model_len or model_len or DEFAULT_MODEL_LEN,
        block_size=block_size,
        num_blocks=spec.num_blocks or num_blocks or DEFAULT_NUM_BLOCKS,
        block_bytes=spec.kv_bytes_per_token * block_size,
        max_num_batched_tokens=spec.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS,
        # Of its own: engines cannot read each other's caches, so placement must not count on it.
        namespace=root_digest(digest_root(spec.model, block_size), cache_salt=spec.name),
        pid=0,
    )


def digest_root(model: str, block_size: int) -> bytes:
    """Namespace of the digests by which engines of one model are compared."""
    return root_digest(b"engines", cache_salt=model, lora=str(block_size))


def with_model(spec: EngineSpec, model: str) -> EngineSpec:
    """The spec with the model the engine told."""
    return replace(spec, model=model)


def _told_blocks(card: WorkerCard) -> int:
    return DEFAULT_SIMULATED_BLOCKS if card.num_blocks == DEFAULT_NUM_BLOCKS else card.num_blocks
