"""What carries out the autoscaler's moves."""

from __future__ import annotations

from typing import Protocol

from tandem.scheduling.autoscaling.moves import Add, Flip, Remove, ScalingDecision

__all__ = ["Scaling", "execute"]


class Scaling(Protocol):
    """Flips, adds and removes workers. Every method starts the work and returns at once."""

    def refusal(self, flip: Flip) -> str:
        """Why this worker keeps its role; "" = it can flip."""

    def flip(self, flip: Flip, reason: str) -> None:
        """Begin to give a worker another role."""

    def add(self, add: Add, reason: str) -> None:
        """Begin to start workers."""

    def remove(self, remove: Remove, reason: str) -> None:
        """Begin to let a worker leave."""

    def withdraw(self, add: Add, reason: str) -> None:
        """Give up the workers that were to be added and do not serve yet."""


def execute(decision: ScalingDecision, scaling: Scaling) -> str:
    """Begin what was decided. Returns the reason to show, with what was refused."""
    if decision.withdrawn is not None and decision.withdrawn.add is not None:
        scaling.withdraw(decision.withdrawn.add, decision.reason)
    move, refusals = decision.move, []
    if move is None:
        return decision.reason
    for flip in move.flips:
        if refusal := scaling.refusal(flip):
            refusals.append(refusal)
        else:
            scaling.flip(flip, decision.reason)
    if move.add is not None:
        scaling.add(move.add, decision.reason)
    for remove in move.removes:
        scaling.remove(remove, decision.reason)
    return f"{decision.reason}, but {refusals[0]}" if refusals else decision.reason
