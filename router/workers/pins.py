"""Pinned prefixes and the conversations that pins follow: what is promised to whom, for how long, and to which workers.

A pin always ends by itself. The router says what shall be kept and refuses what is beyond the quotas; each worker keeps
what it has of it, within its own bound and by its own clock.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import DIGEST_BYTES, CacheScope
from tandem.protocol.errors import ContextLengthExceeded, NoWorker, PinNotFound, PinQuotaExceeded, RequestError
from tandem.protocol.messages import Pin, Prefetch, Unpin, WorkerState, is_readable, worker_of
from tandem.router.backend import PinRequest, PinState
from tandem.router.workers.client import WorkerClient
from tandem.scheduling.prefix_index import PrefixIndex
from tandem.scheduling.registry import Registry
from tandem.scheduling.workers import RegisteredWorker, WorkerChange, can_decode, can_prefill

__all__ = ["Conversations", "Owner", "PinService", "PinSummary", "PinTable", "PinnedChain", "max_pinned_blocks"]

DEFAULT_TTL_S = 300.0
MAX_CONVERSATION_BYTES = 32 << 20  # remembered over all conversations: 2 M blocks, less what short ones cost
CONVERSATION_BYTES = 512  # of one beside its digests, about
REPORT_TIMEOUT_S = 2.0  # a worker answers between two steps
_SHARED_PLACES = {"disk", "object"}  # what one worker keeps there, all others find


class Owner(NamedTuple):
    """Whose a pin or a conversation is, and whose cached blocks it is about."""

    tenant: str
    scope: CacheScope


class Conversations:
    """The latest chain of digests of each conversation, the least recently used forgotten first."""

    def __init__(self, max_bytes: int = MAX_CONVERSATION_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._chains: OrderedDict[tuple[Owner, str], bytes] = OrderedDict()  # joined: a third of the memory

    def __len__(self) -> int:
        return len(self._chains)

    def note(self, owner: Owner, conversation_id: str, digests: Sequence[bytes]) -> None:
        """Remember what a conversation consists of now."""
        key = (owner, conversation_id)
        if key in self._chains:
            self._num_bytes -= _size(key, self._chains.pop(key))
        self._chains[key] = joined = b"".join(digests)
        self._num_bytes += _size(key, joined)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._chains.popitem(last=False))

    def digests(self, owner: Owner, conversation_id: str) -> list[bytes]:
        """The chain of its latest turn; empty if the conversation is not known."""
        joined = self._chains.get((owner, conversation_id), b"")
        return [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]


@dataclass(eq=False, slots=True)
class PinnedChain:
    """One pin. Only `PinTable` changes it."""

    pin_id: str
    owner: Owner
    conversation_id: str  # "" = it stays as it is
    expires_at: float
    prefetch: Prefetch
    digests: tuple[bytes, ...] = ()


class PinTable:
    """All live pins and what their tenants use of their quotas. No I/O and no clock: the time is passed in.

    A block counts once for each tenant whose pins cover it: blocks of several tenants are the same only where those
    share their caches.
    """

    def __init__(self, *, max_pins: int, max_pins_per_tenant: int, tenant_share: float) -> None:
        self.num_refused: Counter[str] = Counter()  # by the quota that was exceeded
        self._max_pins = max_pins
        self._max_pins_per_tenant = max_pins_per_tenant
        self._tenant_share = tenant_share
        self._pins: dict[str, PinnedChain] = {}  # oldest first
        self._uses: dict[str, Counter[bytes]] = {}  # by tenant, pins that cover a block

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Blocks that pins cover, cached anywhere or not."""
        return sum(len(uses) for uses in self._uses.values())

    def live(self, now: float) -> list[PinnedChain]:
        """All pins whose time is not over, oldest first; forgets the others."""
        for pin in [pin for pin in self._pins.values() if pin.expires_at <= now]:
            self.remove(pin.pin_id)
        return list(self._pins.values())

    def get(self, pin_id: str, tenant: str | None, now: float) -> PinnedChain:
        """A live pin of a tenant, or (None) of any. Raises `PinNotFound`."""
        self.live(now)
        pin = self._pins.get(pin_id)
        if pin is None or tenant not in (None, pin.owner.tenant):
            raise PinNotFound(f"There is no pin '{pin_id[:100]}'; it may have expired.", param="id")
        return pin

    def add(self, pin: PinnedChain, digests: Sequence[bytes], max_blocks: int, now: float) -> None:
        """Take a pin in and cover these blocks. `max_blocks`: of all pins. Raises `PinQuotaExceeded`."""
        pins = self.live(now)
        tenant = pin.owner.tenant
        num_of_tenant = sum(other.owner.tenant == tenant for other in pins)
        uses = self._uses.get(tenant, Counter())
        num_new = len(set(digests) - uses.keys())
        max_of_tenant = int(max_blocks * self._tenant_share)
        for quota, value, limit, what in (
            ("max_pins", len(pins) + 1, self._max_pins, "pins"),
            ("max_pins_per_tenant", num_of_tenant + 1, self._max_pins_per_tenant, "pins of this tenant"),
            ("pin_share", self.num_blocks + num_new, max_blocks, "blocks of all pins"),
            ("pin_tenant_share", len(uses) + num_new, max_of_tenant, "blocks of this tenant's pins"),
        ):
            if value > limit:
                self.num_refused[quota] += 1
                first_end_s = min((other.expires_at for other in pins), default=now + 1.0) - now
                raise PinQuotaExceeded(
                    f"With this pin there would be {value} {what}, over the limit of {limit} ({quota}); unpin others, "
                    f"wait for one to expire, or raise --{quota.replace('_', '-')}.",
                    retry_after_s=first_end_s,
                )
        self._pins[pin.pin_id] = pin
        self._cover(pin, digests)

    def remove(self, pin_id: str) -> None:
        """Forget a pin that is here."""
        pin = self._pins.pop(pin_id)
        self._cover(pin, ())

    def follow(
        self, owner: Owner, conversation_id: str, digests: Sequence[bytes], max_blocks: int, now: float
    ) -> list[PinnedChain]:
        """Let the pins of a conversation cover its latest turn, as far as the quotas allow; those that changed."""
        changed = []
        for pin in self.live(now):
            if (pin.owner, pin.conversation_id) != (owner, conversation_id):
                continue
            before = pin.digests
            self._cover(pin, ())
            uses = self._uses.get(owner.tenant, Counter())
            room = min(max_blocks - self.num_blocks, int(max_blocks * self._tenant_share) - len(uses))
            self._cover(pin, _leading(digests, uses, room))
            if pin.digests != before:
                changed.append(pin)
        return changed

    def check_integrity(self) -> None:
        """Raise AssertionError unless the covered blocks are those of the pins."""
        uses: dict[str, Counter[bytes]] = {}
        for pin in self._pins.values():
            if pin.digests:
                uses.setdefault(pin.owner.tenant, Counter()).update(pin.digests)
        assert uses == self._uses, "covered blocks disagree"

    def _cover(self, pin: PinnedChain, digests: Sequence[bytes]) -> None:
        """Let a pin cover these blocks and no others."""
        uses = self._uses.setdefault(pin.owner.tenant, Counter())
        uses.update(digests)
        uses.subtract(pin.digests)
        for digest in pin.digests:
            if not uses[digest]:
                del uses[digest]
        if not uses:
            del self._uses[pin.owner.tenant]
        pin.digests = tuple(digests)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinSummary:
    """All pins of a router."""

    num_pins: int
    num_blocks: int  # that they cover, cached or not
    max_blocks: int  # that they may cover
    num_refused: dict[str, int]  # by the quota that was exceeded
    num_conversations: int  # whose latest turn is remembered


class PinService:
    """Pins for the HTTP edge: keeps the table, tells the workers, and asks them what they hold."""

    def __init__(
        self,
        registry: Registry,
        index: PrefixIndex,
        workers: WorkerClient,
        config: RouterConfig,
        digests_of: Callable[[list[int], CacheScope], Awaitable[list[bytes]]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = PinTable(
            max_pins=config.max_pins,
            max_pins_per_tenant=config.max_pins_per_tenant,
            tenant_share=config.pin_tenant_share,
        )
        self._conversations = Conversations()
        self._registry = registry
        self._index = index
        self._workers = workers
        self._config = config
        self._digests_of = digests_of
        self._clock = clock
        registry.listen(self._worker_changed)

    async def pin(self, request: PinRequest) -> PinState:
        """Keep a prefix or a conversation for a while, also what of it is cached only later.

        Raises `RequestError` for what cannot be pinned, `PinQuotaExceeded`, and `NoWorker` while there is none.
        """
        max_ttl_s = self._config.max_pin_ttl_s
        ttl_s = min(DEFAULT_TTL_S, max_ttl_s) if request.ttl_s is None else request.ttl_s
        if ttl_s > max_ttl_s:
            raise RequestError(
                f"ttl_s={ttl_s:g} is over max_pin_ttl_s={max_ttl_s:g}; ask for less, and pin again before it ends.",
                param="ttl_s",
            )
        digests = await self._chain_of(request)
        now = self._clock()
        owner, pin_id = Owner(request.tenant, request.cache_scope), f"pin-{secrets.token_hex(12)}"
        pin = PinnedChain(pin_id, owner, request.conversation_id, now + ttl_s, request.prefetch)
        self.table.add(pin, digests, self.max_blocks, now)
        self._send(pin, now)
        return (await self._states([pin]))[0]

    async def unpin(self, pin_id: str, tenant: str | None) -> None:
        """End a pin of this tenant, or (None) of any, now. Raises `PinNotFound`."""
        self.table.get(pin_id, tenant, self._clock())
        self.table.remove(pin_id)
        for worker in self._registry:
            self._workers.send(worker.worker_id, Unpin(pin_id=pin_id))

    async def prefetch(self, pin_id: str, prefetch: Prefetch, tenant: str | None) -> PinState:
        """Bring up the blocks of a pin of this tenant, or (None) of any, now. Raises `PinNotFound`."""
        now = self._clock()
        pin = self.table.get(pin_id, tenant, now)
        self._send(pin, now, prefetch)
        return (await self._states([pin]))[0]

    async def pins(self, tenant: str | None, cache_scope: CacheScope | None) -> list[PinState]:
        """The live pins of a tenant and of a scope, oldest first; None = of any."""
        pins = self.table.live(self._clock())
        return await self._states(
            [pin for pin in pins if tenant in (None, pin.owner.tenant) and cache_scope in (None, pin.owner.scope)]
        )

    def note_turn(self, owner: Owner, conversation_id: str, digests: Sequence[bytes]) -> None:
        """A conversation consists of this now; pins of it follow."""
        self._conversations.note(owner, conversation_id, digests)
        max_blocks, now = self.max_blocks, self._clock()
        if not max_blocks:  # no worker decodes at the moment: what is covered stays covered
            return
        for pin in self.table.follow(owner, conversation_id, digests, max_blocks, now):
            self._send(pin, now)

    @property
    def max_blocks(self) -> int:
        """What all pins may cover."""
        return max_pinned_blocks(self._registry)

    def summary(self) -> PinSummary:
        """Pins and quotas now."""
        return PinSummary(
            num_pins=len(self.table.live(self._clock())),
            num_blocks=self.table.num_blocks,
            max_blocks=self.max_blocks,
            num_refused=dict(self.table.num_refused),
            num_conversations=len(self._conversations),
        )

    async def _chain_of(self, request: PinRequest) -> list[bytes]:
        worker = next(iter(self._registry), None)
        if worker is None:
            raise NoWorker("No worker is there to keep anything.")
        if request.token_ids is None:  # maybe of a conversation that is not known (yet): the pin waits for its turns
            return self._conversations.digests(Owner(request.tenant, request.cache_scope), request.conversation_id)
        num_tokens, block_size, limit = len(request.token_ids), worker.card.block_size, worker.card.max_model_len
        if num_tokens < block_size:
            raise RequestError(
                f"The prefix is {num_tokens} tokens long, shorter than a KV block of {block_size}: nothing to pin."
            )
        if num_tokens > limit:
            raise ContextLengthExceeded(f"The prefix has {num_tokens} tokens; this model's context is {limit}.")
        return await self._digests_of(request.token_ids, request.cache_scope)

    def _worker_changed(self, change: WorkerChange) -> None:
        """Tell a worker that joined, maybe after a restart, of all pins."""
        if change.worker.state is WorkerState.READY:
            now = self._clock()
            for pin in self.table.live(now):
                is_target = change.worker.worker_id in self._likely_workers(pin.digests, now, change.worker.worker_id)
                self._send_to(change.worker, pin, now, pin.prefetch if is_target else Prefetch.NONE)

    def _send(self, pin: PinnedChain, now: float, prefetch: Prefetch | None = None) -> None:
        """Tell every worker of a pin; those that would get its next request are to bring it up."""
        targets = self._likely_workers(pin.digests, now)
        for worker in self._registry:
            is_target = worker.worker_id in targets
            self._send_to(worker, pin, now, (prefetch or pin.prefetch) if is_target else Prefetch.NONE)

    def _send_to(self, worker: RegisteredWorker, pin: PinnedChain, now: float, prefetch: Prefetch) -> None:
        message = Pin(pin_id=pin.pin_id, digests=list(pin.digests), ttl_s=pin.expires_at - now, prefetch=prefetch)
        self._workers.send(worker.worker_id, message)

    def _likely_workers(self, digests: Sequence[bytes], now: float, preferred: str = "") -> set[str]:
        """The worker of each role that has most of a chain in its memory; of several the preferred one."""
        depths: Counter[str] = Counter()
        for holder, depth in self._index.longest_prefix(digests, now).items():
            if is_readable(holder):
                worker_id = worker_of(holder)
                depths[worker_id] = max(depths[worker_id], depth)
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


def max_pinned_blocks(registry: Registry) -> int:
    """Blocks that pins may cover: what the workers that decode may keep, each in the largest place of its own.

    Or in a tier they share, where that is larger: a chain is kept if any of these has it.
    """
    own = shared = 0
    for worker in registry:
        bounds = worker.card.max_pinned_blocks
        if can_decode(worker):
            own += max((bound for place, bound in bounds.items() if place not in _SHARED_PLACES), default=0)
        shared = max([shared, *(bound for place, bound in bounds.items() if place in _SHARED_PLACES)])
    return max(own, shared)


def _size(key: tuple[Owner, str], joined: bytes) -> int:
    owner, conversation_id = key
    return CONVERSATION_BYTES + sum(map(len, owner)) + len(conversation_id) + len(joined)


def _leading(digests: Sequence[bytes], uses: Mapping[bytes, int], room: int) -> tuple[bytes, ...]:
    """As many leading blocks as `room` new ones allow."""
    for count, digest in enumerate(digests):
        room -= digest not in uses
        if room < 0:
            return tuple(digests[:count])
    return tuple(digests)
