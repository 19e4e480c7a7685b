"""How a decision of the autoscaler becomes calls."""

from __future__ import annotations

from tandem.cluster.scaling import execute
from tandem.protocol.messages import Role
from tandem.scheduling.autoscaling.moves import Add, Flip, Move, Reason, Remove, ScalingDecision

FIXED = "its server cannot"


class Calls:
    """Notes what it is asked to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def refusal(self, flip: Flip) -> str:
        return FIXED if flip.worker_id == "w1" else ""

    def flip(self, flip: Flip, reason: str) -> None:
        self.calls.append((flip, reason))

    def add(self, add: Add, reason: str) -> None:
        self.calls.append((add, reason))

    def remove(self, remove: Remove, reason: str) -> None:
        self.calls.append((remove, reason))

    def withdraw(self, add: Add, reason: str) -> None:
        self.calls.append(("withdraw", add, reason))


def test_every_part_of_a_move_is_carried_out_and_a_late_one_withdrawn() -> None:
    calls, add = Calls(), Add(Role.PREFILL, 2)
    flips = (Flip("w0", Role.DECODE), Flip("w1", Role.DECODE))
    decisions = [
        ScalingDecision(Reason.FLIP, "why", move=Move("flip", Role.DECODE, flips=flips)),
        ScalingDecision(Reason.ADD, "why", move=Move("add", Role.PREFILL, add=add)),
        ScalingDecision(Reason.REMOVE, "why", move=Move("remove", Role.PREFILL, removes=(Remove("w2"),))),
        ScalingDecision(Reason.WITHDRAWN, "why", withdrawn=Move("add", Role.PREFILL, add=add)),
        ScalingDecision(Reason.ON_TARGET, "why"),
    ]
    reasons = [execute(decision, calls) for decision in decisions]
    assert reasons == [
        f"flip w0, w1 to decode: why, but {FIXED}",
        "add 2 prefill workers: why",
        "remove w2: why",
        "a move was given up: why",
        "on target, nothing to do: why",
    ]
    assert calls.calls == [
        (flips[0], "flip w0, w1 to decode: why"),
        (add, reasons[1]),
        (Remove("w2"), reasons[2]),
        ("withdraw", add, reasons[3]),
    ]
