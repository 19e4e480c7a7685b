"""Decides how many workers each role has. It is a pure function of an observation, the clock and a small state.

It predicts which share of requests will be within their SLOs for today's pools and for their neighbours: some workers
flipped, added or removed. It moves if the gain over the next minutes outlasts the cost of moving. Flips come first. The
caller carries decisions out; one is in flight at a time, and one that takes too long is withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tandem.scheduling.autoscaling.in_flight import (
    AutoscalerState,
    InFlight,
    calm,
    follow,
    forget_spare,
    is_in_flight,
    note_spare,
)
from tandem.scheduling.autoscaling.moves import Reason, ScalingDecision
from tandem.scheduling.autoscaling.observation import Observation
from tandem.scheduling.autoscaling.outlook import Neighbour, Outlook
from tandem.scheduling.autoscaling.policy import DEFAULT_POLICY, AutoscalerPolicy
from tandem.scheduling.autoscaling.prediction import Prediction

# How an operator lets a move happen that the autoscaler may not make, by the move's kind.
_REMEDIES = {
    "flip": "move the worker with tandem restart --role",
    "add": "give --max-workers, or run tandem add",
    "remove": "give --min-workers, or run tandem drain",
}
_RELIEF = 0.9  # share of the wait that may be left after a move that counts as relief


def decide(
    observation: Observation, now: float, state: AutoscalerState, policy: AutoscalerPolicy = DEFAULT_POLICY
) -> tuple[ScalingDecision, AutoscalerState]:
    """The decision, to move some workers or to hold, and the state for the next call."""
    state = replace(state, traffic=state.traffic.updated(observation.demand, now))
    outlook = Outlook.of(observation, state.traffic, policy, now)
    if sum(outlook.pools) < 2:
        return ScalingDecision(Reason.NO_POOLS, f"{outlook.sizes} are ready"), calm(forget_spare(state))
    hold = outlook.predict(outlook.pools)
    if state.moving is not None:
        if is_in_flight(state.moving, observation):
            return follow(outlook, hold, state, state.moving)
        pauses = {kind: pause for kind, pause in state.pauses.items() if kind != state.moving.move.kind}
        state = replace(state, moving=None, pauses=pauses)
    return _weigh(outlook, hold, state)


def _weigh(outlook: Outlook, hold: Prediction, state: AutoscalerState) -> tuple[ScalingDecision, AutoscalerState]:
    """Compare the neighbours with today's pools."""
    policy, told = outlook.policy, outlook.describe(hold)
    is_on_target = hold.attainment >= policy.target and hold.least >= policy.target
    remove = _best_removal(outlook.removes(), policy) if is_on_target else None
    is_spare = remove is not None
    state = note_spare(state, outlook.now, policy, is_spare=is_spare)
    if remove is not None:
        return _settle(remove, None, hold, told, state, outlook)
    if is_on_target:
        return ScalingDecision(Reason.ON_TARGET, told, hold), calm(state)
    flips = [one for one in outlook.flips() if not _lengthens_queue(one, hold, policy)]
    flip, add = _best_gain(flips, hold, policy), _best_gain(outlook.adds(), hold, policy)
    if flip is None and add is None and hold.last_wait_s > policy.start_s:
        flip, add = _best_relief(flips, hold), _best_relief(outlook.adds(), hold)
        if flip is not None:  # scores cannot be compared here
            return _settle(flip, add, hold, told, state, outlook)
    if flip is not None and (
        add is None or flip.prediction.score - hold.score >= 0.5 * (add.prediction.score - hold.score)
    ):
        return _settle(flip, add, hold, told, state, outlook)
    if add is not None and _is_free(add, state, outlook):
        return _settle(add, None, hold, told, state, outlook)
    if flip is not None:
        return _settle(flip, add, hold, told, state, outlook)
    if add is not None:
        return _settle(add, None, hold, told, state, outlook)
    if hold.is_unreachable:
        code = Reason.UNREACHABLE
    elif outlook.num_alive >= policy.max_workers:
        code = Reason.AT_MAX
    else:
        code = Reason.NO_GAIN
    return ScalingDecision(code, told, hold), calm(state)


def _settle(
    best: Neighbour,
    better: Neighbour | None,
    hold: Prediction,
    told: str,
    state: AutoscalerState,
    outlook: Outlook,
) -> tuple[ScalingDecision, AutoscalerState]:
    """Make the move if the autoscaler may, and if it was wanted for long enough. `better` would help too, or more."""
    policy, now, move, after = outlook.policy, outlook.now, best.move, best.prediction
    kind = (move.kind, move.role)
    num_wanted = state.num_wanted + 1 if state.wanted == kind else 1
    state = replace(state, wanted=kind, num_wanted=num_wanted)
    advice = better.move if better is not None and better.move.kind not in policy.acts else None

    def held(code: Reason, why: str) -> tuple[ScalingDecision, AutoscalerState]:
        return ScalingDecision(code, f"{why}; now {told}", hold, after, advice=advice), state

    effect = f"{move} would bring {hold.attainment:.1%} in time to {after.attainment:.1%}"
    if now < (until_s := state.pause(move.kind).until_s):
        return held(Reason.BACKOFF, f"{move} was withdrawn, and is tried again in {until_s - now:.0f} s")
    if num_wanted < policy.num_agreeing:
        return held(Reason.AGREEING, f"{effect}, as {num_wanted} of {policy.num_agreeing} looks say")
    if move.kind == "remove" and state.spare_s < policy.remove_after_s:
        spare = f"a worker is spare for {state.spare_s:.0f} of remove_after_s={policy.remove_after_s:g} s"
        return held(Reason.AGREEING, f"{spare}; {effect}")
    if move.kind not in policy.acts:
        advice = move
        return held(Reason.ADVISED, f"{effect}; {_REMEDIES[move.kind]}")
    if now - state.last_move_s < policy.cooldown_s:
        return held(Reason.COOLDOWN, f"{effect}, in {policy.cooldown_s - (now - state.last_move_s):.0f} s")
    moving = InFlight(move, now + policy.deadline_s(move.kind), outlook.observation.servers)
    state = replace(calm(forget_spare(state)), moving=moving, last_move_s=now)
    detail = f"{told}; {after.attainment:.1%} after it"
    return ScalingDecision(Reason(move.kind), detail, hold, after, move, advice), state


def _best_gain(candidates: Iterable[Neighbour], hold: Prediction, policy: AutoscalerPolicy) -> Neighbour | None:
    """The smallest move that reaches the target; else the one that gains most. None if none gains enough."""
    least_gain = max(policy.min_gain, policy.min_share * (1 - hold.score))
    gaining = [one for one in candidates if one.prediction.score - hold.score >= least_gain]
    if not gaining:
        return None
    best = max(one.prediction.score for one in gaining)
    enough = [one for one in gaining if one.prediction.score >= min(best, max(policy.target, best - policy.min_gain))]
    return min(enough, key=lambda one: (one.move.num_workers, -one.prediction.score))


def _lengthens_queue(candidate: Neighbour, hold: Prediction, policy: AutoscalerPolicy) -> bool:
    """Whether the move makes a queue that is too long to wait for grow faster: then less would be served."""
    return candidate.prediction.last_wait_s > max(hold.last_wait_s / _RELIEF, policy.start_s)


def _best_relief(candidates: Iterable[Neighbour], hold: Prediction) -> Neighbour | None:
    """The move that slows a growing queue most, although none of them stops it. None if none helps enough."""
    best = min(candidates, key=lambda one: one.prediction.last_wait_s, default=None)
    is_relief = best is not None and best.prediction.last_wait_s <= _RELIEF * hold.last_wait_s
    return best if is_relief else None


def _best_removal(candidates: Iterable[Neighbour], policy: AutoscalerPolicy) -> Neighbour | None:
    """The largest removal after which the target is still met, the cost of the move included."""
    safe = [one for one in candidates if one.prediction.attainment >= policy.target]
    return max(safe, key=lambda one: (one.move.num_workers, one.prediction.score), default=None)


def _is_free(candidate: Neighbour, state: AutoscalerState, outlook: Outlook) -> bool:
    """Whether the autoscaler may make this move now."""
    kind = candidate.move.kind
    return kind in outlook.policy.acts and outlook.now >= state.pause(kind).until_s
