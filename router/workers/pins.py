"""Pins for the HTTP edge: which prefixes are kept, for how long, and on which workers.

A pin always expires. The router decides what is kept and refuses what exceeds the quotas. Each worker keeps the blocks
that it has, within its own bound and by its own clock.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tandem.protocol.digest import CacheScope
from tandem.protocol.errors import ContextLengthExceeded, NoWorker, RequestError
from tandem.protocol.messages import Pin, Prefetch, Unpin, WorkerState, worker_of
from tandem.router.backend import HintAction, HintedPin, PinRequest, PinState
from tandem.router.workers.client import WorkerClient
from tandem.router.workers.pin_ledger import Conversations, PinLedger, PinnedChain, PinOwner
from tandem.scheduling.admission.tenants import PinQuotas
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import RegisteredWorker, WorkerChange, can_decode, can_prefill

DEFAULT_TTL_S = 300.0
REPORT_TIMEOUT_S = 2.0  # a worker answers between two steps


@dataclass(frozen=True, slots=True, kw_only=True)
class PinSummary:
    """All pins of a router."""

    num_pins: int
    num_blocks: int  # covered, cached or not
    max_blocks: int  # how many they may cover
    num_refused: dict[str, int]  # by the exceeded quota
    num_conversations: int  # with a remembered latest turn


class PinService:
    """Keeps the ledger, tells the workers about its pins, and asks them what they hold."""

    def __init__(
        self,
        registry: Registry,
        index: PrefixIndex,
        workers: WorkerClient,
        quotas: PinQuotas,
        digests_of: Callable[[list[int], CacheScope], Awaitable[list[bytes]]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = PinLedger(quotas)
        self._max_ttl_s = quotas.max_pin_ttl_s
        self._conversations = Conversations()
        self._registry = registry
        self._index = index
        self._workers = workers
        self._digests_of = digests_of
        self._clock = clock
        registry.listen(self._worker_changed)

    async def pin(self, request: PinRequest) -> PinState:
        """Keep a prefix or a conversation for a while, including blocks that are cached only later.

        Raises `RequestError` if it cannot be pinned, `PinQuotaExceeded`, and `NoWorker` while there is no worker.
        """
        max_ttl_s = self._max_ttl_s
        ttl_s = min(DEFAULT_TTL_S, max_ttl_s) if request.ttl_s is None else request.ttl_s
        if ttl_s > max_ttl_s:
            raise RequestError(
                f"ttl_s={ttl_s:g} is over max_pin_ttl_s={max_ttl_s:g}; ask for less, and pin again before it ends.",
                param="ttl_s",
            )
        digests = await self._chain_of(request)
        now = self._clock()
        pin = _new_pin(request, now + ttl_s)
        self.ledger.add(pin, digests, self.max_blocks, now, max_of_key=request.max_pins_of_key)
        self._send(pin, now)
        return (await self._states([pin]))[0]

    async def hint(self, request: PinRequest, action: HintAction) -> HintedPin:
        """As `Pins.hint`. A pin of an earlier hint of this key about the same is extended: clients send one each turn.

        Raises what `pin` raises.
        """
        if action is not HintAction.RETAIN and not any(worker.card.tiers for worker in self._registry):
            raise RequestError(f"No worker has a tier, which {action} is about.")
        if action is HintAction.DEMOTE:
            return HintedPin(0.0, 0, is_cut=False)
        ttl_s = min(DEFAULT_TTL_S if request.ttl_s is None else request.ttl_s, self._max_ttl_s)
        digests = await self._chain_of(request)
        now = self._clock()
        pin = _new_pin(request, now + ttl_s, is_hint=True)
        pin = self.ledger.retain(pin, digests, self.max_blocks, now, max_of_key=request.max_pins_of_key)
        self._send(pin, now)
        num_blocks = len(pin.digests)
        return HintedPin(pin.expires_at - now, num_blocks * self._block_size, is_cut=num_blocks < len(digests))

    async def unpin(self, pin_id: str, tenant: str | None) -> None:
        """End a pin of this tenant now; None = of any tenant. Raises `PinNotFound`."""
        self.ledger.get(pin_id, tenant, self._clock())
        self.ledger.remove(pin_id)
        for worker in self._registry:
            self._workers.send(worker.worker_id, Unpin(pin_id=pin_id))

    async def prefetch(self, pin_id: str, prefetch: Prefetch, tenant: str | None) -> PinState:
        """Bring up the blocks of a pin of this tenant now; None = of any tenant. Raises `PinNotFound`."""
        now = self._clock()
        pin = self.ledger.get(pin_id, tenant, now)
        self._send(pin, now, prefetch)
        return (await self._states([pin]))[0]

    async def pins(self, tenant: str | None, cache_scope: CacheScope | None) -> list[PinState]:
        """The live pins of a tenant and of a scope, oldest first; None = of any."""
        pins = self.ledger.live(self._clock())
        return await self._states(
            [pin for pin in pins if tenant in (None, pin.owner.tenant) and cache_scope in (None, pin.owner.scope)]
        )

    def record_turn(self, owner: PinOwner, conversation_id: str, digests: Sequence[bytes]) -> None:
        """Record what a conversation consists of now; its pins follow."""
        self._conversations.note(owner, conversation_id, digests)
        max_blocks, now = self.max_blocks, self._clock()
        if not max_blocks:  # no worker decodes now: the pins keep their blocks
            return
        for pin in self.ledger.follow(owner, conversation_id, digests, max_blocks, now):
            self._send(pin, now)

    @property
    def max_blocks(self) -> int:
        """Blocks that all pins together may cover."""
        return max_pinned_blocks(self._registry)

    def summary(self) -> PinSummary:
        """The pins and their quotas now."""
        return PinSummary(
            num_pins=len(self.ledger.live(self._clock())),
            num_blocks=self.ledger.num_blocks,
            max_blocks=self.max_blocks,
            num_refused=dict(self.ledger.num_refused),
            num_conversations=len(self._conversations),
        )

    async def _chain_of(self, request: PinRequest) -> list[bytes]:
        worker = next(iter(self._registry), None)
        if worker is None:
            raise NoWorker("No worker is available to keep the prefix.")
        if request.token_ids is None:  # the conversation may be unknown yet: the pin waits for its first turn
            return self._conversations.digests(PinOwner(request.tenant, request.cache_scope), request.conversation_id)
        num_tokens, block_size, limit = len(request.token_ids), worker.card.block_size, worker.card.max_model_len
        if num_tokens < block_size:
            raise RequestError(
                f"The prefix is {num_tokens} tokens long, shorter than a KV block of {block_size}: nothing to pin."
            )
        if num_tokens > limit:
            raise ContextLengthExceeded(f"The prefix has {num_tokens} tokens; this model's context is {limit}.")
        return await self._digests_of(request.token_ids, request.cache_scope)

    def _worker_changed(self, change: WorkerChange) -> None:
        """Send all pins to a worker that has joined, maybe after a restart."""
        if change.worker.state is WorkerState.READY:
            now = self._clock()
            for pin in self.ledger.live(now):
                is_target = change.worker.worker_id in self._likely_workers(pin.digests, now, change.worker.worker_id)
                self._send_to(change.worker, pin, now, pin.prefetch if is_target else Prefetch.NONE)

    def _send(self, pin: PinnedChain, now: float, prefetch: Prefetch | None = None) -> None:
        """Send a pin to every worker. Those that would get its next request also bring its blocks up."""
        targets = self._likely_workers(pin.digests, now)
        for worker in self._registry:
            is_target = worker.worker_id in targets
            self._send_to(worker, pin, now, (prefetch or pin.prefetch) if is_target else Prefetch.NONE)

    def _send_to(self, worker: RegisteredWorker, pin: PinnedChain, now: float, prefetch: Prefetch) -> None:
        message = Pin(pin_id=pin.pin_id, digests=list(pin.digests), ttl_s=pin.expires_at - now, prefetch=prefetch)
        self._workers.send(worker.worker_id, message)

    def _likely_workers(self, digests: Sequence[bytes], now: float, preferred: str = "") -> set[str]:
        """For each role, the worker with most of a chain in memory; `preferred` if there are several."""
        depths: Counter[str] = Counter()
        for holder, depth in self._index.longest_prefix(digests, now).items():
            worker = self._registry.get(worker_of(holder))
            if worker is not None and worker.card.lends(holder):
                depths[worker.worker_id] = max(depths[worker.worker_id], depth)
        likely = set()
        for plays_role in (can_prefill, can_decode):
            workers = [worker.worker_id for worker in self._registry if plays_role(worker)]
            if workers:
                likely.add(max(workers, key=lambda worker_id: (depths[worker_id], worker_id == preferred)))
        return likely

    async def _states(self, pins: Sequence[PinnedChain]) -> list[PinState]:
        reports = await self._workers.query_pins([pin.pin_id for pin in pins], REPORT_TIMEOUT_S) if pins else {}
        now = self._clock()
        return [
            PinState(
                pin_id=pin.pin_id,
                tenant=pin.owner.tenant,
                conversation_id=pin.conversation_id,
                num_blocks=len(pin.digests),
                num_tokens=len(pin.digests) * self._block_size,
                remaining_s=max(pin.expires_at - now, 0.0),
                prefetch=pin.prefetch,
                held={
                    worker.worker_id: reports[worker.worker_id].get(pin.pin_id, {})
                    if worker.worker_id in reports
                    else None
                    for worker in self._registry
                },
            )
            for pin in pins
        ]

    @property
    def _block_size(self) -> int:
        worker = next(iter(self._registry), None)
        return 0 if worker is None else worker.card.block_size


def _new_pin(request: PinRequest, expires_at: float, *, is_hint: bool = False) -> PinnedChain:
    owner, pin_id = PinOwner(request.tenant, request.cache_scope), f"pin-{secrets.token_hex(12)}"
    return PinnedChain(
        pin_id, owner, request.conversation_id, expires_at, request.prefetch, key_id=request.key_id, is_hint=is_hint
    )


def max_pinned_blocks(registry: Registry) -> int:
    """Blocks that pins may cover: those that decoding workers may keep, each in its own largest place.

    If a shared tier may keep more, its number counts instead: a chain is kept if any of these places has it.
    """
    own = shared = 0
    for worker in registry:
        bounds = worker.card.max_pinned_blocks.items()
        if can_decode(worker):
            own += max((bound for place, bound in bounds if not worker.card.tiers.get(place)), default=0)
        shared = max([shared, *(bound for place, bound in bounds if worker.card.tiers.get(place))])
    return max(own, shared)
