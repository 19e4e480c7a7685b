"""Decides how many workers each role has. It is a pure function of an observation, the clock and a small state.

It predicts which share of requests will be within their SLOs for today's pools and for their neighbours: some workers
flipped, added or removed. It moves if the gain over the next minutes outlasts the cost of moving. Flips come first. The
caller carries decisions out; one is in flight at a time, and one that takes too long is withdrawn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role, WorkerState
from tandem.scheduling.autoscaling.demand import Demand
from tandem.scheduling.autoscaling.prediction import Backlog, Capacity, Pools, Prediction, Sizing, predict
from tandem.scheduling.autoscaling.traffic import Traffic
from tandem.scheduling.cost_model import CostModel, StepCosts
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import RegisteredWorker

__all__ = [
    "DEFAULT_POLICY",
    "Add",
    "AutoscalerPolicy",
    "AutoscalerState",
    "Fleet",
    "Flip",
    "Move",
    "Observation",
    "Reason",
    "Remove",
    "ScalingDecision",
    "WorkerView",
    "decide",
    "observe",
    "server_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerPolicy:
    """When the autoscaler acts, and within which bounds."""

    min_workers: int = 2
    max_workers: int = 2**31
    acts: frozenset[str] = frozenset({"flip"})  # of "flip", "add", "remove"; the others are only advised
    target: float = 0.98  # attainment that suffices
    min_gain: float = 0.01  # least gain of a move, as a share of all requests
    min_share: float = 0.03  # least gain of a move, as a share of the loss
    num_agreeing: int = 2  # observations in a row that want the same
    cooldown_s: float = 10.0  # between two moves
    remove_after_s: float = 120.0  # a removal waits until there has been a worker too many for this long
    headroom: float = 1.25  # a worker may go if the others could serve this much more than forecast
    start_s: float = 60.0  # until a new worker serves
    flip_deadline_s: float = 60.0
    move_deadline_s: float = 300.0  # of adding and removing; then the move is withdrawn
    start_deadlines: float = 3.0  # starts of a worker that adding may take, if that is longer
    max_backoff_s: float = 3600.0  # longest pause after withdrawals in a row

    def __post_init__(self) -> None:
        if self.num_agreeing < 1 or self.headroom <= 1 or not 0 < self.target < 1:
            raise ConfigError(
                f"num_agreeing={self.num_agreeing} must be at least 1, headroom={self.headroom} above 1 and "
                f"target={self.target} between 0 and 1; less lets pools swing"
            )
        if not 2 <= self.min_workers <= self.max_workers:
            raise ConfigError(
                f"min_workers={self.min_workers} must be at least 2 and max_workers={self.max_workers} not less"
            )

    def deadline_s(self, kind: str) -> float:
        """Seconds until a move of this kind is withdrawn."""
        if kind == "flip":
            return self.flip_deadline_s
        return max(self.move_deadline_s, self.start_deadlines * self.start_s if kind == "add" else 0.0)


DEFAULT_POLICY = AutoscalerPolicy()

# How far predictions look ahead: at least `_SOON_S`, and `_STARTS` times the start of a worker, so that an added worker
# can pay off.
_SOON_S = 120.0
_STARTS = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What the autoscaler knows of one worker."""

    worker_id: str
    role: Role
    is_ready: bool = True
    num_running: int = 0  # requests that a flip would leave unfinished in the old role
    num_queued_tokens: int = 0
    num_kv_tokens: int = 0  # tokens of the sequences on this worker

    @property
    def server(self) -> str:
        """The process that moves as one: it may have several data-parallel ranks, each of which is a worker here."""
        return server_of(self.worker_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What the router does not know: processes that do not serve yet, and how the move in flight fares."""

    coming: frozenset[str] = frozenset()  # servers that are being started, also anew after a death
    num_unplaced: int = 0  # of these, those that were added and have no room
    setback: str = ""  # why the move in flight cannot be completed; "" = it can
    spared: frozenset[str] = frozenset()  # servers that leave last: their machines would stay reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Workers, their work, and what clients have asked for since the start."""

    workers: tuple[WorkerView, ...]
    demand: Demand
    capacity: Capacity
    backlog: Backlog
    expected_output_tokens: float
    fleet: Fleet = field(default_factory=Fleet)

    @property
    def servers(self) -> frozenset[str]:
        """All processes that are there or come."""
        return self.fleet.coming.union(view.server for view in self.workers)


@dataclass(frozen=True, slots=True)
class Flip:
    """Move this worker to another role."""

    worker_id: str
    to_role: Role


@dataclass(frozen=True, slots=True)
class Add:
    """Start `num_workers` workers of this role."""

    role: Role
    num_workers: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Let this worker leave; what it runs moves to others."""

    worker_id: str


class Move(NamedTuple):
    """Changes of one kind that are made at once."""

    kind: str  # "flip", "add" or "remove"
    role: Role  # the role that grows, or that shrinks by a removal
    flips: tuple[Flip, ...] = ()
    add: Add | None = None
    removes: tuple[Remove, ...] = ()

    @property
    def num_workers(self) -> int:
        """Workers that it moves."""
        return len(self.flips) + len(self.removes) + (self.add.num_workers if self.add else 0)

    def __str__(self) -> str:
        if self.flips:
            return f"flip {', '.join(flip.worker_id for flip in self.flips)} to {self.role}"
        if self.removes:
            return f"remove {', '.join(remove.worker_id for remove in self.removes)}"
        return f"add {self.num_workers} {self.role} worker{'s' * (self.num_workers > 1)}"


class Reason(StrEnum):
    """Why a decision is what it is."""

    NO_POOLS = "no_pools"  # fewer than two ready workers with a role of their own
    IN_FLIGHT = "in_flight"
    WITHDRAWN = "withdrawn"  # the move in flight failed, or took longer than its deadline
    UNWANTED = "unwanted"  # workers that were to be added have found no room, and are not needed any more
    ON_TARGET = "on_target"
    UNREACHABLE = "unreachable"  # requests miss their SLO on an idle worker too: no move helps
    NO_GAIN = "no_gain"  # no neighbour gains enough, or soon enough
    AT_MAX = "at_max"  # only more workers would help
    BACKOFF = "backoff"  # the move that helps was withdrawn a while ago
    AGREEING = "agreeing"  # the move has to be wanted for longer
    COOLDOWN = "cooldown"
    ADVISED = "advised"  # the move that helps is not the autoscaler's to make
    FLIP = "flip"
    ADD = "add"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """What to do now, if anything, and why."""

    code: Reason
    detail: str
    now: Prediction | None = None  # if nothing moves
    after: Prediction | None = None  # after the move
    move: Move | None = None
    advice: Move | None = None  # a move that would help and is not made
    withdrawn: Move | None = None

    @property
    def reason(self) -> str:
        """In one line, with numbers."""
        lead = str(self.move) if self.move else f"hold ({self.code})"
        return f"{lead}: {self.detail}"

    @property
    def prefill_wait_s(self) -> float:
        """Wait of the prompts that are queued now."""
        return self.now.prefill_wait_s if self.now else 0.0

    @property
    def decode_wait_s(self) -> float:
        """Wait for room on a decode worker."""
        return self.now.decode_wait_s if self.now else 0.0

    def as_dict(self) -> dict[str, object]:
        """As `/v1/pools` shows it."""
        status: dict[str, object] = {
            "outcome": str(self.code),
            "reason": self.reason,
            "prefill_wait_s": self.prefill_wait_s,
            "decode_wait_s": self.decode_wait_s,
        }
        if self.now is not None:
            status["predicted_attainment"] = round(self.now.attainment, 4)
            status["predicted_itl_s"] = self.now.itl_s
            status["prefill_load"] = round(self.now.load, 4)
        if self.after is not None:
            status["predicted_attainment_after"] = round(self.after.attainment, 4)
        if self.advice is not None:
            status["advice"] = str(self.advice)
        return status


@dataclass(frozen=True, slots=True)
class _InFlight:
    move: Move
    deadline_s: float
    before: frozenset[str]  # all servers at the decision


class _Pause(NamedTuple):
    """A kind of move is not made for a while after withdrawals."""

    num_withdrawn: int = 0  # in a row
    until_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class AutoscalerState:
    """What is remembered between two decisions. Sizes are not: they are observed anew each time."""

    traffic: Traffic = field(default_factory=Traffic)
    wanted: tuple[str, Role] | None = None  # kind and role of the move that the latest observations want
    num_wanted: int = 0  # number of these observations in a row
    wanted_since_s: float = 0.0
    moving: _InFlight | None = None
    last_move_s: float = -math.inf
    pauses: Mapping[str, _Pause] = field(default_factory=dict)  # by kind of move

    def pause(self, kind: str) -> _Pause:
        """Whether and how long a kind of move is not made."""
        return self.pauses.get(kind, _Pause())


class _Candidate(NamedTuple):
    """A neighbour of today's pools."""

    move: Move
    prediction: Prediction


def decide(
    observation: Observation, now: float, state: AutoscalerState, policy: AutoscalerPolicy = DEFAULT_POLICY
) -> tuple[ScalingDecision, AutoscalerState]:
    """Move some workers or hold, and the state for the next call."""
    state = replace(state, traffic=state.traffic.updated(observation.demand, now))
    view = _View.of(observation, state.traffic, policy, now)
    if sum(view.pools) < 2:
        return ScalingDecision(Reason.NO_POOLS, f"{view.sizes} are ready"), _calm(state)
    hold = view.predict(view.pools)
    if state.moving is not None:
        if _is_in_flight(state.moving, observation):
            return _follow(view, hold, state, state.moving)
        pauses = {kind: pause for kind, pause in state.pauses.items() if kind != state.moving.move.kind}
        state = replace(state, moving=None, pauses=pauses)
    return _weigh(view, hold, state)


def server_of(worker_id: str) -> str:
    """The name of a worker's process. NAME.dp1 is a data-parallel rank of NAME."""
    name, _, rank = worker_id.rpartition(".dp")
    return name if name and rank.isdecimal() else worker_id


def observe(
    registry: Registry, costs: CostModel, expected_output_tokens: float, fleet: Fleet | None = None
) -> Observation:
    """What `decide` needs, from the router's registry and cost model, and from those who start workers."""
    workers = list(registry)
    ready = [worker for worker in workers if worker.state == WorkerState.READY]
    decoders = [worker for worker in ready if worker.role != Role.PREFILL]
    views = tuple(
        WorkerView(
            worker_id=worker.worker_id,
            role=worker.role,
            is_ready=worker.state == WorkerState.READY,
            num_running=worker.num_booked_seqs,
            num_queued_tokens=worker.uncomputed_tokens,
            num_kv_tokens=worker.booked_kv_tokens - worker.awaited_kv_tokens,
        )
        for worker in workers
    )
    num_seqs, kv_tokens = _decoding(decoders)
    return Observation(
        workers=views,
        demand=registry.demand.total,
        capacity=_capacity(ready, costs),
        backlog=Backlog(
            prompt_tokens=sum(worker.uncomputed_tokens for worker in workers) + registry.demand.num_waiting_tokens,
            num_seqs=num_seqs,
            kv_tokens_per_seq=kv_tokens / num_seqs if num_seqs else 0.0,
        ),
        expected_output_tokens=expected_output_tokens,
        fleet=fleet or Fleet(),
    )


@dataclass(frozen=True, slots=True)
class _View:
    """Today's pools, and predictions for others."""

    observation: Observation
    sizing: Sizing
    policy: AutoscalerPolicy
    pools: Pools
    now: float

    @classmethod
    def of(cls, observation: Observation, traffic: Traffic, policy: AutoscalerPolicy, now: float) -> _View:
        sizing = Sizing(
            traffic=traffic,
            capacity=observation.capacity,
            backlog=observation.backlog,
            output_tokens=observation.expected_output_tokens,
            horizon_s=_SOON_S + _STARTS * policy.start_s,
        )
        pools = Pools(len(_pool(observation, Role.PREFILL)), len(_pool(observation, Role.DECODE)))
        return cls(observation, sizing, policy, pools, now)

    @property
    def sizes(self) -> str:
        return f"{self.pools.num_prefill} prefill + {self.pools.num_decode} decode workers"

    @property
    def num_alive(self) -> int:
        """Processes that are there or come: no more than `max_workers` may be."""
        return len(self.observation.servers)

    @property
    def num_ready(self) -> int:
        """Processes that serve, without those that leave: no fewer than `min_workers` may be left."""
        return len({view.server for view in self.observation.workers if view.is_ready})

    def describe(self, prediction: Prediction) -> str:
        rate = self.sizing.traffic.rate(self.now, 0.0)
        return (
            f"{prediction.attainment:.1%} in time on {self.sizes}, {rate:.2f} requests/s, prefill waits "
            f"{prediction.prefill_wait_s:.2f} s at load {prediction.load:.2f}, "
            f"decode {prediction.decode_wait_s:.2f} s, ITL {1e3 * prediction.itl_s:.0f} ms"
        )

    def predict(
        self, pools: Pools, *, later: Pools | None = None, later_s: float = 0.0, extra_s: float = 0.0
    ) -> Prediction:
        return predict(self.sizing, pools, self.now, later=later, later_s=later_s, extra_s=extra_s)

    def flips(self) -> Iterator[_Candidate]:
        """Some workers of a pool play the other role at once. Those that leave prefill take their cache with them."""
        for grow, shrink in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            servers = _cheapest(self.observation, shrink)
            num_free = len(servers) - 1
            least = 1 if self._of(grow) else 0  # an empty pool gets a worker
            if not least and not servers:
                continue
            for num in _sizes(min(num_free, max(self.num_alive // 4, 1))):
                flips = tuple(Flip(server.name, grow) for server in servers[:num])
                num_ranks = sum(server.num_ranks for server in servers[:num])
                extra_s = self._lost_cache_s(num_ranks) if shrink == Role.PREFILL else 0.0
                after = self.predict(self._with(grow, num_ranks, shrink), extra_s=extra_s)
                yield _Candidate(Move("flip", grow, flips=flips), after)

    def adds(self) -> Iterator[_Candidate]:
        """New workers serve after their start."""
        for role in (Role.PREFILL, Role.DECODE):
            for num in _sizes(min(self.policy.max_workers - self.num_alive, 2 * self.num_alive)):
                later = self._with(role, num * self._num_ranks(role))
                after = self.predict(self.pools, later=later, later_s=self.policy.start_s)
                yield _Candidate(Move("add", role, add=Add(role, num)), after)

    def removes(self) -> Iterator[_Candidate]:
        """Fewer workers under more traffic than forecast; the sequences of the leaving ones are computed again."""
        roomier = self.with_headroom
        for role in (Role.PREFILL, Role.DECODE):
            servers = _cheapest(self.observation, role)
            num_most = min(len(servers) - 1, self.num_ready - self.policy.min_workers, max(self.num_alive // 8, 1))
            for num in _sizes(num_most):
                gone = servers[:num]
                num_ranks = sum(server.num_ranks for server in gone)
                moved_s = self.sizing.capacity.costs.prefill_token_s * sum(server.num_kv_tokens for server in gone)
                extra_s = moved_s + (self._lost_cache_s(num_ranks) if role == Role.PREFILL else 0.0)
                after = roomier.predict(self._with(role, -num_ranks), extra_s=extra_s)
                removes = tuple(Remove(server.name) for server in gone)
                yield _Candidate(Move("remove", role, removes=removes), after)

    @property
    def with_headroom(self) -> _View:
        """The same under more traffic than forecast."""
        return replace(self, sizing=replace(self.sizing, demand_factor=self.policy.headroom))

    def _num_ranks(self, role: Role) -> int:
        """Ranks of one more process, if it is like those of its role."""
        servers = _cheapest(self.observation, role) or [_Server("", 1)]
        return max(sum(server.num_ranks for server in servers) // len(servers), 1)

    def _of(self, role: Role) -> int:
        return self.pools.num_prefill if role == Role.PREFILL else self.pools.num_decode

    def _with(self, grow: Role, num: int, shrink: Role | None = None) -> Pools:
        change = {grow: num} | ({shrink: -num} if shrink is not None else {})
        return Pools(
            self.pools.num_prefill + change.get(Role.PREFILL, 0), self.pools.num_decode + change.get(Role.DECODE, 0)
        )

    def _lost_cache_s(self, num: int) -> float:
        """Worker-seconds to compute again what the caches of `num` prefill workers would have hit in a minute."""
        traffic = self.sizing.traffic
        share = num / max(self.pools.num_prefill, 1)
        tokens_per_s = traffic.rate(self.now, 0.0) * traffic.cached_tokens
        return 60.0 * share * tokens_per_s * self.sizing.capacity.costs.prefill_token_s


def _weigh(view: _View, hold: Prediction, state: AutoscalerState) -> tuple[ScalingDecision, AutoscalerState]:
    """Compare the neighbours with today's pools."""
    policy, told = view.policy, view.describe(hold)
    flip = _best_gain(view.flips(), hold, policy)
    if hold.attainment >= policy.target and hold.least >= policy.target:
        remove = _best_removal(view.removes(), policy)
        if remove is None:
            return ScalingDecision(Reason.ON_TARGET, told, hold), _calm(state)
        return _settle(remove, None, hold, told, state, view)
    add = _best_gain(view.adds(), hold, policy)
    if flip is not None and (
        add is None or flip.prediction.score - hold.score >= 0.5 * (add.prediction.score - hold.score)
    ):
        return _settle(flip, add, hold, told, state, view)
    if add is not None and _is_free(add, state, view):
        return _settle(add, None, hold, told, state, view)
    if flip is not None:
        return _settle(flip, add, hold, told, state, view)
    if add is not None:
        return _settle(add, None, hold, told, state, view)
    if hold.is_unreachable:
        code = Reason.UNREACHABLE
    elif view.num_alive >= policy.max_workers:
        code = Reason.AT_MAX
    else:
        code = Reason.NO_GAIN
    return ScalingDecision(code, told, hold), _calm(state)


def _settle(
    best: _Candidate,
    better: _Candidate | None,
    hold: Prediction,
    told: str,
    state: AutoscalerState,
    view: _View,
) -> tuple[ScalingDecision, AutoscalerState]:
    """Make the move if it is ours, and has been wanted for long enough. `better` would help too, or more."""
    policy, now, move, after = view.policy, view.now, best.move, best.prediction
    kind = (move.kind, move.role)
    is_same = state.wanted == kind
    num_wanted = state.num_wanted + 1 if is_same else 1
    since_s = state.wanted_since_s if is_same else now
    state = replace(state, wanted=kind, num_wanted=num_wanted, wanted_since_s=since_s)
    advice = better.move if better is not None and better.move.kind not in policy.acts else None

    def held(code: Reason, why: str) -> tuple[ScalingDecision, AutoscalerState]:
        return ScalingDecision(code, f"{why}; {told}", hold, after, advice=advice or move), state

    effect = f"{move} would make it {after.attainment:.1%}"
    if now < (until_s := state.pause(move.kind).until_s):
        return held(Reason.BACKOFF, f"{move} was withdrawn, and is tried again in {until_s - now:.0f} s")
    if num_wanted < policy.num_agreeing:
        return held(Reason.AGREEING, f"{effect}, seen {num_wanted} of num_agreeing={policy.num_agreeing} times")
    if move.kind == "remove" and now - since_s < policy.remove_after_s:
        return held(Reason.AGREEING, f"{effect}, for {now - since_s:.0f} of remove_after_s={policy.remove_after_s:g}")
    if move.kind not in policy.acts:
        return held(Reason.ADVISED, f"{effect}, but the autoscaler does not {move.kind} workers")
    if now - state.last_move_s < policy.cooldown_s:
        return held(Reason.COOLDOWN, f"{effect}, {now - state.last_move_s:.1f} of cooldown_s={policy.cooldown_s} over")
    moving = _InFlight(move, now + policy.deadline_s(move.kind), view.observation.servers)
    state = replace(_calm(state), moving=moving, last_move_s=now)
    detail = f"{told}; {after.attainment:.1%} after it"
    return ScalingDecision(Reason(move.kind), detail, hold, after, move, advice), state


def _follow(
    view: _View, hold: Prediction, state: AutoscalerState, flight: _InFlight
) -> tuple[ScalingDecision, AutoscalerState]:
    """Wait for the move in flight, or give it up."""
    fleet, move, left_s = view.observation.fleet, flight.move, flight.deadline_s - view.now
    if fleet.setback:
        return _withdraw(view, hold, state, flight, fleet.setback)
    if left_s <= 0:
        why = "Ray has found no room" if fleet.num_unplaced else "it is not done"
        return _withdraw(view, hold, state, flight, f"{why} by its deadline")
    told = f"{move}, {left_s:.0f} s are left; {view.describe(hold)}"
    if not (move.add and fleet.num_unplaced and view.with_headroom.predict(view.pools).least >= view.policy.target):
        return ScalingDecision(Reason.IN_FLIGHT, told, hold), _calm(state)
    wanted = ("unwanted", move.role)
    num_wanted = state.num_wanted + 1 if state.wanted == wanted else 1
    if num_wanted < view.policy.num_agreeing:
        return ScalingDecision(Reason.IN_FLIGHT, told, hold), replace(state, wanted=wanted, num_wanted=num_wanted)
    detail = f"{move} has found no room, and is not needed any more; {view.describe(hold)}"
    return ScalingDecision(Reason.UNWANTED, detail, hold, withdrawn=move), replace(_calm(state), moving=None)


def _withdraw(
    view: _View, hold: Prediction, state: AutoscalerState, flight: _InFlight, why: str
) -> tuple[ScalingDecision, AutoscalerState]:
    """Give up the move in flight, and do not try this kind again for a while, which grows."""
    move, policy = flight.move, view.policy
    num = state.pause(move.kind).num_withdrawn + 1
    pause_s = min(policy.move_deadline_s * 2.0 ** min(num - 1, 20), policy.max_backoff_s)
    pauses = {**state.pauses, move.kind: _Pause(num, view.now + pause_s)}
    detail = f"{move}: {why}; no other {move.kind} for {pause_s:.0f} s"
    state = replace(_calm(state), moving=None, pauses=pauses)
    return ScalingDecision(Reason.WITHDRAWN, detail, hold, withdrawn=move), state


def _best_gain(candidates: Iterable[_Candidate], hold: Prediction, policy: AutoscalerPolicy) -> _Candidate | None:
    """The smallest move that reaches the target; else the one that gains most. None if none gains enough."""
    least_gain = max(policy.min_gain, policy.min_share * (1 - hold.score))
    gaining = [one for one in candidates if one.prediction.score - hold.score >= least_gain]
    if not gaining:
        return None
    best = max(one.prediction.score for one in gaining)
    enough = [one for one in gaining if one.prediction.score >= min(best, max(policy.target, best - policy.min_gain))]
    return min(enough, key=lambda one: (one.move.num_workers, -one.prediction.score))


def _best_removal(candidates: Iterable[_Candidate], policy: AutoscalerPolicy) -> _Candidate | None:
    """The largest removal that leaves the target within reach at all times."""
    safe = [one for one in candidates if one.prediction.least >= policy.target]
    return max(safe, key=lambda one: (one.move.num_workers, one.prediction.score), default=None)


def _is_free(candidate: _Candidate, state: AutoscalerState, view: _View) -> bool:
    """Whether the autoscaler may make this move now."""
    kind = candidate.move.kind
    return kind in view.policy.acts and view.now >= state.pause(kind).until_s


def _calm(state: AutoscalerState) -> AutoscalerState:
    return replace(state, wanted=None, num_wanted=0)


def _is_in_flight(flight: _InFlight, observation: Observation) -> bool:
    """Whether a part of the move is still to come. A worker that is gone has nothing to come."""
    move, there = flight.move, _by_server(observation.workers)
    if move.add is not None:
        new = [ranks for name, ranks in there.items() if name not in flight.before]
        return sum(all(view.is_ready for view in ranks) for ranks in new) < move.add.num_workers
    if move.removes:
        return any(remove.worker_id in there for remove in move.removes)
    views = [view for flip in move.flips for view in there.get(flip.worker_id, ())]
    return any(not (view.role == move.role and view.is_ready) for view in views)


def _sizes(num_most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and the largest."""
    num = 1
    while num < num_most:
        yield num
        num *= 2
    if num_most > 0:
        yield num_most


def _pool(observation: Observation, role: Role) -> list[WorkerView]:
    return [view for view in observation.workers if view.role == role and view.is_ready]


class _Server(NamedTuple):
    """A process, with all its ranks."""

    name: str
    num_ranks: int
    num_running: int = 0
    num_queued_tokens: int = 0
    num_kv_tokens: int = 0


def _cheapest(observation: Observation, role: Role) -> list[_Server]:
    """The servers of a pool, those first that have least to lose."""
    servers = [
        _Server(
            name,
            len(ranks),
            sum(view.num_running for view in ranks),
            sum(view.num_queued_tokens for view in ranks),
            sum(view.num_kv_tokens for view in ranks),
        )
        for name, ranks in _by_server(_pool(observation, role)).items()
    ]
    spared = observation.fleet.spared
    return sorted(servers, key=lambda one: (one.name in spared, one.num_running, one.num_queued_tokens, one.name))


def _by_server(views: Sequence[WorkerView]) -> dict[str, list[WorkerView]]:
    servers: dict[str, list[WorkerView]] = {}
    for view in views:
        servers.setdefault(view.server, []).append(view)
    return servers


def _decoding(decoders: Collection[RegisteredWorker]) -> tuple[int, int]:
    """Sequences that the decode pool has to serve now, running or without room, and their tokens."""
    num_awaited = sum(worker.num_awaited_seqs for worker in decoders)
    awaited_tokens = sum(worker.awaited_kv_tokens for worker in decoders)
    num_for_room = sum(worker.load.num_waiting_for_room for worker in decoders)
    num_held = min(num_for_room, num_awaited)  # their prompts are computed, so they wait for the decode pool
    num_seqs = sum(worker.num_booked_seqs for worker in decoders) - num_awaited + num_held
    tokens = sum(worker.booked_kv_tokens for worker in decoders) - awaited_tokens
    return num_seqs, tokens + awaited_tokens * num_held // max(num_awaited, 1)


def _capacity(workers: Collection[RegisteredWorker], costs: CostModel) -> Capacity:
    """The mean worker."""
    if not workers:
        return Capacity(StepCosts(0.0, 0.0, 0.0, 0.0, 0.0), 1, 1, 0)
    num = len(workers)
    rows = [costs.steps(worker.card.kind).costs for worker in workers]
    return Capacity(
        costs=StepCosts(*(sum(column) / num for column in zip(*rows, strict=True))),
        step_tokens=max(sum(worker.card.max_num_batched_tokens for worker in workers) // num, 1),
        kv_tokens=max(sum(worker.card.num_blocks * worker.card.block_size for worker in workers) // num, 1),
        num_seats=sum(worker.card.max_num_seqs for worker in workers) // num,
    )
