"""The order in which waiting requests are served: fair between tenants, by priority within one.

Between tenants: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), in front of workers that hold several
requests at once (as SFQ(D): Jin, Chase and Kaur, SIGMETRICS 2004). A tenant's start tag grows by work / weight with
each request it is served, and the smallest tag is next. So tenants that wait get worker seconds by their weights, what
one leaves goes to the others. One that comes back starts a little before the present virtual time. That credit, bounded
like the lag of EEVDF (Stoica and Abdel-Wahab, 1995), lets those who ask less than their share ask in clumps.
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

import msgspec

__all__ = ["NO_WORK", "FairQueue", "Ticket", "Work"]

# Of the requests of a tenant that have waited this long the oldest goes first each fourth time, however urgent others
# are: nobody starves, and a backlog of what is not urgent takes no more than that from what is.
MAX_OVERTAKEN_S = 30.0
OLDEST_TURN = 4
MAX_IDLE_TENANTS = 1024  # remembered for what they were served beyond the virtual time, and for what they ask
ARRIVAL_WINDOW_S = 10.0  # over which what a tenant asks is averaged
FORGOTTEN_S = 7 * ARRIVAL_WINDOW_S  # after which less than a thousandth of that average is left
CREDIT_S = 5.0  # worker seconds, per weight, of its share that a tenant which asked less may have at once later


class Work(msgspec.Struct, frozen=True):
    """What requests are predicted to take. A struct, as several are made for each request."""

    num_requests: int = 0
    worker_s: float = 0.0  # worker seconds, prompt and answer: what is shared
    pair_s: float = 0.0  # of these, until the first token, where prefill workers compute the prompt
    alone_s: float = 0.0  # the same, where the worker that decodes does
    new_tokens: int = 0  # prompt tokens to compute
    kv_tokens: int = 0  # length the sequences are expected to reach, summed

    @property
    def prefill_s(self) -> float:
        """Worker seconds until the first token, on whichever workers."""
        return self.pair_s + self.alone_s

    def __add__(self, other: Work) -> Work:
        return Work(
            self.num_requests + other.num_requests,
            self.worker_s + other.worker_s,
            self.pair_s + other.pair_s,
            self.alone_s + other.alone_s,
            self.new_tokens + other.new_tokens,
            self.kv_tokens + other.kv_tokens,
        )

    def __sub__(self, other: Work) -> Work:
        return self + other * -1

    def __mul__(self, factor: float) -> Work:
        return Work(
            round(self.num_requests * factor),
            self.worker_s * factor,
            self.pair_s * factor,
            self.alone_s * factor,
            round(self.new_tokens * factor),
            round(self.kv_tokens * factor),
        )


NO_WORK = Work()


@dataclass(eq=False, slots=True, kw_only=True)
class Ticket:
    """A place in the queue."""

    tenant: str
    priority: int  # lower is more urgent, as in vLLM
    arrived_s: float
    work: Work
    start_tag: float = 0.0  # as of when the queue was last read; for good once it is served


@dataclass(eq=False, slots=True)
class _Line:
    """The waiting requests of one tenant. The dicts are ordered sets."""

    start_tag: float  # virtual time at which its next request starts
    tickets: dict[Ticket, None] = field(default_factory=dict)  # by arrival
    levels: dict[int, dict[Ticket, None]] = field(default_factory=dict)  # by priority, then by arrival
    priorities: list[int] = field(default_factory=list)  # of `levels`, sorted
    work: dict[int, Work] = field(default_factory=dict)  # of each level
    num_served: int = 0
    rate: Work = NO_WORK  # what it asked lately, per second, at `rated_s`; decays from then on
    rated_s: float = 0.0
    ticket_s: float = 0.0  # worker seconds of its latest request

    def rate_at(self, now: float) -> Work:
        """What it asks per second, averaged with exponential weights over a window."""
        return self.rate * math.exp((self.rated_s - now) / ARRIVAL_WINDOW_S)

    @property
    def total(self) -> Work:
        return sum(self.work.values(), NO_WORK)

    def work_until(self, priority: int) -> Work:
        """Of tickets at least as urgent."""
        if not self.tickets:
            return NO_WORK
        levels = self.priorities[: bisect_right(self.priorities, priority)]
        return sum((self.work[level] for level in levels), NO_WORK)

    def in_order(self, now: float) -> Iterator[Ticket]:
        """The tickets by urgency, but the oldest first when it is its turn."""
        oldest = next(iter(self.tickets))
        is_its_turn = now - oldest.arrived_s >= MAX_OVERTAKEN_S and self.num_served % OLDEST_TURN == 0
        if is_its_turn:
            yield oldest
        for ticket in chain.from_iterable(self.levels[priority] for priority in self.priorities):
            if not (is_its_turn and ticket is oldest):
                yield ticket


class FairQueue:
    """All waiting requests. `weight_of` says what share a tenant has beside the others."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._lines: dict[str, _Line] = {}
        self._busy: dict[str, _Line] = {}  # those with tickets: of many tenants few wait at a time
        self._idle: OrderedDict[str, None] = OrderedDict()  # the others; the one that asked longest ago comes first
        self._virtual_s = 0.0  # worker seconds that a tenant of weight 1 has been served if it always waited
        self._num_tickets = 0

    def __len__(self) -> int:
        return self._num_tickets

    @property
    def total(self) -> Work:
        """Of all that waits."""
        return sum((line.total for line in self._busy.values()), NO_WORK)

    def tenants(self) -> dict[str, Work]:
        """What waits, by tenant."""
        return {tenant: line.total for tenant, line in self._busy.items()}

    def waiting(self, tenant: str) -> Work:
        """What waits of one tenant."""
        line = self._busy.get(tenant)
        return line.total if line else NO_WORK

    def add(self, ticket: Ticket) -> None:
        """Put a request in its place."""
        line = self._lines.get(ticket.tenant)
        if line is None:
            line = self._lines[ticket.tenant] = _Line(self._virtual_s - CREDIT_S)
        line.start_tag = self._next_tag(line)
        self._busy[ticket.tenant] = line
        self._idle.pop(ticket.tenant, None)
        level = line.levels.get(ticket.priority)
        if level is None:
            level = line.levels[ticket.priority] = {}
            insort(line.priorities, ticket.priority)
        line.tickets[ticket] = level[ticket] = None
        line.work[ticket.priority] = line.work.get(ticket.priority, NO_WORK) + ticket.work
        self.note_asked(ticket.tenant, ticket.work, ticket.arrived_s)
        self._num_tickets += 1

    def note_asked(self, tenant: str, work: Work, now: float) -> None:
        """Count a request in what its tenant asks; also one that was refused, of a tenant that is known here."""
        line = self._lines.get(tenant)
        if line is not None:
            asked = Work(0, work.worker_s, work.pair_s, work.alone_s)
            line.rate, line.rated_s = line.rate_at(now) + asked * (1 / ARRIVAL_WINDOW_S), now
            line.ticket_s = work.worker_s
            if tenant in self._idle:
                self._idle.move_to_end(tenant)

    def update(self, ticket: Ticket, work: Work) -> None:
        """Change what a waiting request is predicted to take."""
        line = self._lines[ticket.tenant]
        line.work[ticket.priority] = line.work[ticket.priority] - ticket.work + work
        ticket.work = work

    def remove(self, ticket: Ticket) -> bool:
        """Take a request out that is not served; whether it was here."""
        line = self._busy.get(ticket.tenant)
        if line is None or ticket not in line.tickets:
            return False
        self._take_out(line, ticket)
        return True

    def serve(self, ticket: Ticket) -> None:
        """Take a request out and charge its tenant."""
        line = self._lines[ticket.tenant]
        # With requests that wait for one certain worker, others with later tags are served first: the virtual time
        # is that of the tenant that is furthest behind.
        self._virtual_s = max(self._virtual_s, min(other.start_tag for other in self._busy.values()))
        self._take_out(line, ticket)
        line.num_served += 1
        ticket.start_tag = line.start_tag
        line.start_tag += ticket.work.worker_s / self._weight_of(ticket.tenant)

    def in_order(self, now: float) -> Iterator[Ticket]:
        """The waiting requests in the order in which they would be served. Change nothing while you read it."""
        if self._num_tickets == 1:  # mostly: it came to workers that have room
            (line,) = self._busy.values()
            (ticket,) = line.tickets
            ticket.start_tag = line.start_tag
            yield ticket
            return
        # Among equal tags the tenant with fewer waiting goes first: one that just came, before one that floods.
        heads = [(line.start_tag, len(line.tickets), tenant, line.in_order(now)) for tenant, line in self._busy.items()]
        heapq.heapify(heads)
        while heads:
            start_tag, num_tickets, tenant, tickets = heads[0]
            following = next(tickets, None)
            if following is None:
                heapq.heappop(heads)
                continue
            following.start_tag = start_tag
            yield following
            start_tag += following.work.worker_s / self._weight_of(tenant)
            heapq.heapreplace(heads, (start_tag, num_tickets, tenant, tickets))

    def start_tag(self, tenant: str, priority: int) -> float:
        """Of a request that comes now."""
        line = self._lines.get(tenant)
        own_s = line.work_until(priority).worker_s if line else 0.0
        return self._next_tag(line) + own_s / self._weight_of(tenant)

    def is_within_share(self, start_tag: float) -> bool:
        """Whether the tenant has had less than its share before a request with this tag."""
        return start_tag < self._virtual_s

    def ahead(self, tenant: str, priority: int, now: float, horizon_s: float = 0.0) -> Work:
        """What would be served before a request that comes now.

        Of its own tenant all that is as urgent, and of each other one what is served until its tag passes the
        request's: of what waits there, and of what will have come within `horizon_s` if it asks on as it did.
        Costs one step per level and tenant that waits, or with a horizon that asked lately; not per request.
        """
        own = self._lines.get(tenant)
        ahead = own.work_until(priority) if own else NO_WORK
        start_tag = self._next_tag(own) + ahead.worker_s / self._weight_of(tenant)
        for name, line in (self._lines if horizon_s > 0 else self._busy).items():
            lead = start_tag - self._next_tag(line)
            if name == tenant or lead < 0 or (not line.tickets and now - line.rated_s > FORGOTTEN_S):
                continue
            # Its last request before this one takes its tag beyond this one's. At equal tags the newcomer is first.
            served_s = lead * self._weight_of(name) + line.ticket_s * (lead > 0)
            asked = line.total + line.rate_at(now) * horizon_s
            if asked.worker_s > 0:
                ahead += asked * min(served_s / asked.worker_s, 1.0)
        return ahead

    def check_integrity(self) -> None:
        """Raise AssertionError unless sums and orders agree with the tickets."""
        assert self._num_tickets == sum(len(line.tickets) for line in self._lines.values()), "number of tickets"
        assert self._busy == {name: line for name, line in self._lines.items() if line.tickets}, "who waits"
        assert self._idle.keys() == self._lines.keys() - self._busy.keys(), "who is idle"
        for tenant, line in self._lines.items():
            assert line.priorities == sorted(line.levels), f"priorities of {tenant}"
            assert all(line.levels.values()), f"an empty level of {tenant}"
            assert line.tickets.keys() == set(chain.from_iterable(line.levels.values())), f"tickets of {tenant}"
            tokens = sum(ticket.work.new_tokens for ticket in line.tickets)
            assert tokens == line.total.new_tokens, f"{line.total.new_tokens} tokens of {tenant}, not {tokens}"

    def _take_out(self, line: _Line, ticket: Ticket) -> None:
        priority = ticket.priority
        del line.tickets[ticket]
        del line.levels[priority][ticket]
        self._num_tickets -= 1
        line.work[priority] -= ticket.work
        if not line.levels[priority]:
            del line.levels[priority], line.work[priority]
            line.priorities.remove(priority)
        if not line.tickets:
            del self._busy[ticket.tenant]
            self._idle[ticket.tenant] = None
            if len(self._idle) > MAX_IDLE_TENANTS:
                del self._lines[self._idle.popitem(last=False)[0]]

    def _next_tag(self, line: _Line | None) -> float:
        """When the tenant's next request starts: what it did not use lately it may still have, within bounds."""
        earliest = self._virtual_s - CREDIT_S
        if line is None:
            return earliest
        return line.start_tag if line.tickets else max(line.start_tag, earliest)
