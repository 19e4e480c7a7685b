"""What requests would have lost by each of the other strategies, in predicted seconds, on live traffic."""

from __future__ import annotations

from typing import Any

from tandem.protocol.routing import STRATEGIES
from tandem.scheduling.placement.placement import Placement

_WEIGHT = 0.002  # of the newest decision, once there are 500: single requests lose very different times


class Shadow:
    """A moving mean for each strategy. Below 0: requests would have gained."""

    def __init__(self) -> None:
        self.mean_lost_s: dict[str, float] = {}  # by strategy; those that nothing is known of are left out
        self.num_decisions: dict[str, int] = {}

    def note(self, placement: Placement) -> None:
        """A request goes to the workers of this placement now."""
        for strategy, lost_s in placement.shadow.items():
            number = self.num_decisions[strategy] = self.num_decisions.get(strategy, 0) + 1
            mean_s = self.mean_lost_s.get(strategy, 0.0)
            self.mean_lost_s[strategy] = mean_s + max(1 / number, _WEIGHT) * (lost_s - mean_s)

    def report(self) -> dict[str, Any]:
        """By strategy, as JSON: the mean of the seconds lost, and of how many decisions."""
        return {
            name: {"mean_lost_s": self.mean_lost_s[name], "num_decisions": self.num_decisions[name]}
            for name in STRATEGIES
            if name in self.mean_lost_s
        }
