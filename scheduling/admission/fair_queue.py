"""The order in which waiting requests are served: fair between tenants, by priority within one.

Between tenants: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), in front of workers that hold several
requests at once (as SFQ(D): Jin, Chase and Kaur, SIGMETRICS 2004). A tenant's start tag grows by work / weight with
each request that is served, and the smallest tag is next. So waiting tenants get worker seconds by their weights, and
share what others leave. A tenant that comes back starts a little before the present virtual time. This credit, bounded
like the lag of EEVDF (Stoica and Abdel-Wahab, 1995), lets tenants that ask less than their share ask in bursts.
No I/O and no clock.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

from tandem.scheduling.admission.work import NO_WORK, Work

# Once a tenant's oldest request has waited this long, it goes first every fourth time, however urgent the others are.
# So no request starves, and a backlog of low priority delays urgent requests by no more than that.
MAX_OVERTAKEN_S = 30.0
OLDEST_FIRST_INTERVAL = 4
MAX_IDLE_TENANTS = 1024  # tenants remembered without waiting requests: for their start tag, and for what they ask
ARRIVAL_WINDOW_S = 10.0  # time over which a tenant's demand is averaged
FORGOTTEN_S = 7 * ARRIVAL_WINDOW_S  # less than a thousandth of the average is left after this time
CREDIT_S = 5.0  # worker seconds per weight: what a tenant that asked for less than its share may use at once later


@dataclass(eq=False, slots=True, kw_only=True)
class QueueEntry:
    """A request's place in the queue."""

    tenant: str
    priority: int  # lower is more urgent, as in vLLM
    arrived_s: float
    work: Work
    start_tag: float = 0.0  # as of the last reading of the queue; final once the request is served


E = TypeVar("E", bound=QueueEntry)


@dataclass(eq=False, slots=True)
class _TenantQueue(Generic[E]):
    """The waiting requests of one tenant. The dicts are ordered sets."""

    start_tag: float  # virtual time at which its next request starts
    entries: dict[E, None] = field(default_factory=dict)  # by arrival
    levels: dict[int, dict[E, None]] = field(default_factory=dict)  # by priority, then by arrival
    priorities: list[int] = field(default_factory=list)  # the keys of `levels`, sorted
    work: dict[int, Work] = field(default_factory=dict)  # sums by priority
    num_served: int = 0
    rate: Work = NO_WORK  # demand per second at `rated_s`; it decays from then on
    rated_s: float = 0.0
    latest_worker_s: float = 0.0  # worker seconds of its latest request

    def rate_at(self, now: float) -> Work:
        """The tenant's demand per second, averaged over a window with exponential weights."""
        return self.rate * math.exp((self.rated_s - now) / ARRIVAL_WINDOW_S)

    @property
    def total(self) -> Work:
        return sum(self.work.values(), NO_WORK)

    def work_until(self, priority: int) -> Work:
        """Work of the requests that are at least as urgent."""
        if not self.entries:
            return NO_WORK
        levels = self.priorities[: bisect_right(self.priorities, priority)]
        return sum((self.work[level] for level in levels), NO_WORK)

    def in_order(self, now: float) -> Iterator[E]:
        """The entries by urgency; every few times the oldest comes first, if it has waited long."""
        oldest = next(iter(self.entries))
        has_waited_long = now - oldest.arrived_s >= MAX_OVERTAKEN_S
        is_oldest_first = has_waited_long and self.num_served % OLDEST_FIRST_INTERVAL == 0
        if is_oldest_first:
            yield oldest
        for entry in chain.from_iterable(self.levels[priority] for priority in self.priorities):
            if not (is_oldest_first and entry is oldest):
                yield entry


class FairQueue(Generic[E]):
    """All waiting requests. `weight_of` gives a tenant's share relative to the others."""

    def __init__(self, weight_of: Callable[[str], float], *, credit_s: float = CREDIT_S) -> None:
        self._weight_of = weight_of
        self._credit_s = credit_s
        self._tenants: dict[str, _TenantQueue[E]] = {}
        self._busy: dict[str, _TenantQueue[E]] = {}  # tenants with entries: few of many wait at a time
        self._idle: OrderedDict[str, None] = OrderedDict()  # the other tenants; the least recently active comes first
        self._virtual_s = 0.0  # worker seconds that an always waiting tenant of weight 1 would have been served
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    @property
    def total(self) -> Work:
        """Work of all waiting requests."""
        return sum((queue.total for queue in self._busy.values()), NO_WORK)

    def by_tenant(self) -> dict[str, Work]:
        """Work of the waiting requests, by tenant."""
        return {tenant: queue.total for tenant, queue in self._busy.items()}

    def work_of(self, tenant: str) -> Work:
        """Work of one tenant's waiting requests."""
        queue = self._busy.get(tenant)
        return queue.total if queue else NO_WORK

    def add(self, entry: E) -> None:
        """Put a request in the queue."""
        tenant, priority = entry.tenant, entry.priority
        queue = self._tenants.get(tenant)
        if queue is None:
            queue = self._tenants[tenant] = _TenantQueue(self._virtual_s - self._credit_s)
        queue.start_tag = self._next_tag(queue)
        self._busy[tenant] = queue
        self._idle.pop(tenant, None)
        level = queue.levels.get(priority)
        if level is None:
            level = queue.levels[priority] = {}
            insort(queue.priorities, priority)
        queue.entries[entry] = level[entry] = None
        queue.work[priority] = queue.work.get(priority, NO_WORK) + entry.work
        self.note_demand(tenant, entry.work, entry.arrived_s)
        self._num_entries += 1

    def note_demand(self, tenant: str, work: Work, now: float) -> None:
        """Count a request in its tenant's demand, also a refused one; unknown tenants are ignored."""
        queue = self._tenants.get(tenant)
        if queue is not None:
            asked = Work(0, work.worker_s, work.pair_s, work.alone_s)
            queue.rate, queue.rated_s = queue.rate_at(now) + asked * (1 / ARRIVAL_WINDOW_S), now
            queue.latest_worker_s = work.worker_s
            if tenant in self._idle:
                self._idle.move_to_end(tenant)

    def update(self, entry: E, work: Work) -> None:
        """Change the predicted work of a waiting request."""
        queue = self._tenants[entry.tenant]
        queue.work[entry.priority] = queue.work[entry.priority] - entry.work + work
        entry.work = work

    def remove(self, entry: E) -> bool:
        """Take a request out without serving it. Returns whether it was here."""
        queue = self._busy.get(entry.tenant)
        if queue is None or entry not in queue.entries:
            return False
        self._take_out(queue, entry)
        return True

    def serve(self, entry: E) -> None:
        """Take a request out and charge its tenant."""
        queue = self._tenants[entry.tenant]
        # Requests with later tags may be served first while others wait for a certain worker. The virtual time is that
        # of the tenant furthest behind.
        self._virtual_s = max(self._virtual_s, min(other.start_tag for other in self._busy.values()))
        self._take_out(queue, entry)
        queue.num_served += 1
        entry.start_tag = queue.start_tag
        queue.start_tag += entry.work.worker_s / self._weight_of(entry.tenant)

    def charge(self, tenant: str, worker_s: float) -> None:
        """Charge a tenant for work that nobody predicted when its request was served."""
        queue = self._tenants.get(tenant)
        if queue is not None:
            queue.start_tag += worker_s / self._weight_of(tenant)

    def in_order(self, now: float) -> Iterator[E]:
        """The waiting requests in the order in which they would be served. Change nothing while you iterate."""
        if self._num_entries == 1:  # the usual case: a request came and the workers have room
            (queue,) = self._busy.values()
            (entry,) = queue.entries
            entry.start_tag = queue.start_tag
            yield entry
            return
        # Among equal tags the tenant with fewer waiting requests goes first: a newcomer before a tenant that floods.
        heads = [
            (queue.start_tag, len(queue.entries), tenant, queue.in_order(now)) for tenant, queue in self._busy.items()
        ]
        heapq.heapify(heads)
        while heads:
            start_tag, num_entries, tenant, entries = heads[0]
            following = next(entries, None)
            if following is None:
                heapq.heappop(heads)
                continue
            following.start_tag = start_tag
            yield following
            start_tag += following.work.worker_s / self._weight_of(tenant)
            heapq.heapreplace(heads, (start_tag, num_entries, tenant, entries))

    def start_tag(self, tenant: str, priority: int) -> float:
        """The start tag of a request that arrives now."""
        queue = self._tenants.get(tenant)
        own_s = queue.work_until(priority).worker_s if queue else 0.0
        return self._next_tag(queue) + own_s / self._weight_of(tenant)

    def is_within_share(self, start_tag: float) -> bool:
        """Whether the tenant of a request with this tag has had less than its share before it."""
        return start_tag < self._virtual_s

    def ahead(self, tenant: str, priority: int, now: float, horizon_s: float = 0.0) -> Work:
        """The work that would be served before a request that arrives now.

        Of its own tenant: all requests that are as urgent. Of each other tenant: what is served until that tenant's tag
        passes the request's, out of what waits and what arrives within `horizon_s` if its demand continues.
        Takes one step per priority and waiting tenant, or with a horizon per recent tenant; not one per request.
        """
        own = self._tenants.get(tenant)
        ahead = own.work_until(priority) if own else NO_WORK
        start_tag = self._next_tag(own) + ahead.worker_s / self._weight_of(tenant)
        for name, queue in (self._tenants if horizon_s > 0 else self._busy).items():
            lead = start_tag - self._next_tag(queue)
            if name == tenant or lead < 0 or (not queue.entries and now - queue.rated_s > FORGOTTEN_S):
                continue
            # Its last request before this one takes its tag past this one's. At equal tags the newcomer is first.
            served_s = lead * self._weight_of(name) + queue.latest_worker_s * (lead > 0)
            asked = queue.total + queue.rate_at(now) * horizon_s
            if asked.worker_s > 0:
                ahead += asked * min(served_s / asked.worker_s, 1.0)
        return ahead

    def check_integrity(self) -> None:
        """Raise AssertionError unless sums and orders agree with the entries."""
        assert self._num_entries == sum(len(queue.entries) for queue in self._tenants.values()), "number of entries"
        assert self._busy == {name: queue for name, queue in self._tenants.items() if queue.entries}, "busy tenants"
        assert self._idle.keys() == self._tenants.keys() - self._busy.keys(), "idle tenants"
        assert len(self._idle) <= MAX_IDLE_TENANTS, f"{len(self._idle)} idle tenants are remembered"
        for tenant, queue in self._tenants.items():
            assert queue.priorities == sorted(queue.levels), f"priorities of {tenant}"
            assert all(queue.levels.values()), f"an empty level of {tenant}"
            assert queue.entries.keys() == set(chain.from_iterable(queue.levels.values())), f"entries of {tenant}"
            tokens = sum(entry.work.new_tokens for entry in queue.entries)
            assert tokens == queue.total.new_tokens, f"{queue.total.new_tokens} tokens of {tenant}, not {tokens}"

    def _take_out(self, queue: _TenantQueue[E], entry: E) -> None:
        priority = entry.priority
        del queue.entries[entry]
        del queue.levels[priority][entry]
        self._num_entries -= 1
        queue.work[priority] -= entry.work
        if not queue.levels[priority]:
            del queue.levels[priority], queue.work[priority]
            queue.priorities.remove(priority)
        if not queue.entries:
            del self._busy[entry.tenant]
            self._idle[entry.tenant] = None
            if len(self._idle) > MAX_IDLE_TENANTS:
                del self._tenants[self._idle.popitem(last=False)[0]]

    def _next_tag(self, queue: _TenantQueue[E] | None) -> float:
        """Start tag of the tenant's next request. The credit for what it did not use lately is bounded."""
        earliest = self._virtual_s - self._credit_s
        if queue is None:
            return earliest
        return queue.start_tag if queue.entries else max(queue.start_tag, earliest)
