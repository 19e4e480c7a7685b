"""The move in flight: what is remembered of it, whether it is done, and when it is withdrawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tandem.protocol.messages import Role
from tandem.scheduling.autoscaling.moves import Move, Reason, ScalingDecision
from tandem.scheduling.autoscaling.observation import Observation, by_server
from tandem.scheduling.autoscaling.outlook import Outlook
from tandem.scheduling.autoscaling.policy import AutoscalerPolicy
from tandem.scheduling.autoscaling.prediction import Prediction
from tandem.scheduling.autoscaling.traffic import Traffic

MAX_LOOK_INTERVALS = 3.0  # one look counts for at most this many intervals: the router may have been stopped


@dataclass(frozen=True, slots=True)
class InFlight:
    """A move that has been decided and is not done."""

    move: Move
    deadline_s: float
    before: frozenset[str]  # all servers at the decision


class Pause(NamedTuple):
    """A pause, after withdrawals, in which a kind of move is not made."""

    num_withdrawn: int = 0  # in a row
    until_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class AutoscalerState:
    """What is remembered between two decisions. Sizes are not: they are observed each time."""

    traffic: Traffic = field(default_factory=Traffic)
    wanted: tuple[str, Role] | None = None  # kind and role of the move that the latest observations want
    num_wanted: int = 0  # number of these observations in a row
    spare_s: float = 0.0  # how long a worker has been spare, less what contrary looks took back
    spare_seen_s: float | None = None  # time of the latest look at that; None before the first one, and after a move
    moving: InFlight | None = None
    last_move_s: float = -math.inf
    pauses: Mapping[str, Pause] = field(default_factory=dict)  # by kind of move

    def pause(self, kind: str) -> Pause:
        """The pause of a kind of move; it may be over."""
        return self.pauses.get(kind, Pause())


def follow(
    outlook: Outlook, hold: Prediction, state: AutoscalerState, flight: InFlight
) -> tuple[ScalingDecision, AutoscalerState]:
    """Wait for the move in flight, or give it up."""
    fleet, move, left_s = outlook.observation.fleet, flight.move, flight.deadline_s - outlook.now
    if fleet.setback:
        return _withdraw(outlook, hold, state, flight, fleet.setback)
    if left_s <= 0:
        why = "Ray has found no room" if fleet.num_unplaced else "it is not done"
        return _withdraw(outlook, hold, state, flight, f"{why} by its deadline")
    told = f"{move}, {left_s:.0f} s are left; {outlook.describe(hold)}"
    is_unplaced = move.num_added and fleet.num_unplaced
    if not is_unplaced or outlook.with_headroom.predict(outlook.pools).least < outlook.policy.target:
        return ScalingDecision(Reason.IN_FLIGHT, told, hold), calm(state)
    wanted = ("unwanted", move.role)
    num_wanted = state.num_wanted + 1 if state.wanted == wanted else 1
    if num_wanted < outlook.policy.num_agreeing:
        return ScalingDecision(Reason.IN_FLIGHT, told, hold), replace(state, wanted=wanted, num_wanted=num_wanted)
    detail = f"{move} has found no room, and is no longer needed; {outlook.describe(hold)}"
    return ScalingDecision(Reason.UNWANTED, detail, hold, withdrawn=move), replace(calm(state), moving=None)


def _withdraw(
    outlook: Outlook, hold: Prediction, state: AutoscalerState, flight: InFlight, why: str
) -> tuple[ScalingDecision, AutoscalerState]:
    """Give up the move in flight, and pause moves of its kind, longer after each withdrawal in a row."""
    move, policy = flight.move, outlook.policy
    num = state.pause(move.kind).num_withdrawn + 1
    pause_s = min(policy.move_deadline_s * 2.0 ** min(num - 1, 20), policy.max_backoff_s)
    pauses = {**state.pauses, move.kind: Pause(num, outlook.now + pause_s)}
    detail = f"{move}: {why}; no other {move.kind} for {pause_s:.0f} s"
    state = replace(calm(state), moving=None, pauses=pauses)
    return ScalingDecision(Reason.WITHDRAWN, detail, hold, withdrawn=move), state


def calm(state: AutoscalerState) -> AutoscalerState:
    """The state after an observation that wants no move."""
    return replace(state, wanted=None, num_wanted=0)


def note_spare(state: AutoscalerState, now: float, policy: AutoscalerPolicy, *, is_spare: bool) -> AutoscalerState:
    """Count the time since the latest look for a spare worker, or against one. Gaps without looks do not count."""
    past_s = 0.0 if state.spare_seen_s is None else now - state.spare_seen_s
    past_s = min(past_s, MAX_LOOK_INTERVALS * policy.interval_s)
    spare_s = state.spare_s + past_s if is_spare else max(state.spare_s - policy.contrary_weight * past_s, 0.0)
    return replace(state, spare_s=spare_s, spare_seen_s=now)


def forget_spare(state: AutoscalerState) -> AutoscalerState:
    """Start counting again: the pools have changed."""
    return replace(state, spare_s=0.0, spare_seen_s=None)


def is_in_flight(flight: InFlight, observation: Observation) -> bool:
    """Whether a part of the move is still under way. Nothing is under way for a worker that is gone."""
    move, there = flight.move, by_server(observation.workers)
    if move.num_added:
        new = [ranks for name, ranks in there.items() if name not in flight.before]
        return sum(all(view.is_ready for view in ranks) for ranks in new) < move.num_added
    if move.kind == "remove":
        return any(worker_id in there for worker_id in move.worker_ids)
    views = [view for worker_id in move.worker_ids for view in there.get(worker_id, ())]
    return any(not (view.role == move.role and view.is_ready) for view in views)
