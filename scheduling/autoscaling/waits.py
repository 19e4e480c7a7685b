"""The share of prompts that wait too long for a prefill worker, beyond the queue that the forecast builds.

Two causes are assumed to be independent. Gaps and lengths vary even in steady traffic: Sakasegawa's formula for many
servers. And traffic comes in bursts: the rate of a window is a Gamma variable whose variance gives the window the index
of dispersion that was measured (so the number of arrivals is negative binomial). In a burst that is more than the
workers can serve the wait grows until its end, and falls again after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandem.scheduling.autoscaling.burstiness import Burstiness

_LEAST_S = 1e-12  # shorter waits are none; to divide by them could overflow
_MAX_LOAD = 0.97  # load at which waits by chance are capped; above it the fluid queue predicts the wait
_LEAST_EXCESS = 0.05  # dispersion beyond 1 that counts as a burst
# The standard normal distribution at the middles of 16 equal shares.
_QUANTILES = np.array([-1.863, -1.318, -1.010, -0.776, -0.579, -0.402, -0.237, -0.078])
_NORMAL = np.concatenate((_QUANTILES, -_QUANTILES[::-1]))

_Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Queue:
    """Prompts that arrive at `rate` per second at `num_workers` prefill workers."""

    rate: float
    mean_s: float  # worker-seconds of a prompt
    variation: float  # their variance / mean^2
    num_workers: int
    bursts: Burstiness
    longest_burst_s: float  # for longer bursts, workers are added instead

    @property
    def load(self) -> float:
        """Work that arrives per worker and second."""
        return self.rate * self.mean_s / self.num_workers

    @property
    def mean_wait_s(self) -> float:
        """Mean wait due to random gaps and lengths."""
        return self._chance * self._chance_s

    def late(self, slack_s: _Vector) -> _Vector:
        """The share of prompts that wait longer than this. All in seconds."""
        if self._chance_s < _LEAST_S:
            return np.zeros_like(slack_s)
        by_chance = self._chance * np.exp(-slack_s / self._chance_s)
        in_time: _Vector = (1 - by_chance) * (1 - self._late_by_bursts(slack_s))
        return 1 - in_time

    @property
    def _chance(self) -> float:
        """Probability that all workers are busy."""
        busy = min(self.load, _MAX_LOAD)
        return float(busy ** (math.sqrt(2 * (self.num_workers + 1)) - 1)) if busy > 0 else 0.0

    @property
    def _chance_s(self) -> float:
        """Mean wait if all of them are busy."""
        busy = min(self.load, _MAX_LOAD)
        variation = (min(self.bursts.dispersion(self.mean_s), 1.0) + self.variation) / 2
        return variation * self.mean_s / (self.num_workers * (1 - busy))

    def _late_by_bursts(self, slack_s: _Vector) -> _Vector:
        """The share late in bursts, at the time scale where it is largest: bursts within bursts do not count twice."""
        found = self.bursts.by_scale(self.longest_burst_s)
        windows = [(length_s, index - 1) for length_s, index in found if index > 1 + _LEAST_EXCESS]
        if not windows or self.rate <= 0:
            return np.zeros_like(slack_s)
        length_s, excess = np.array(windows).T[:, :, None]
        # Arrivals see a window with probability in proportion to its rate: that makes a Gamma variable of shape
        # k = rate * length / excess one of shape k + 1. Its quantiles by Wilson and Hilferty.
        shape = self.rate * length_s / excess + 1
        rates = shape * (1 - 1 / (9 * shape) + _NORMAL / (3 * np.sqrt(shape))) ** 3 * excess / length_s
        grown_s = np.maximum(rates * self.mean_s / self.num_workers - max(self.load, 1.0), 0.0) * length_s
        return self._share_late(rates, grown_s, length_s, slack_s)

    def _share_late(self, rates: _Vector, grown_s: _Vector, length_s: _Vector, slack_s: _Vector) -> _Vector:
        """rates, grown_s: [scales, quantiles], the latter the wait at the end of a window; returns [classes]."""
        beyond_s = np.maximum(grown_s[:, :, None] - slack_s, 0.0)
        within = beyond_s / np.maximum(grown_s[:, :, None], 1e-9)
        after = beyond_s * (self.rate / rates)[:, :, None] / ((1 - min(self.load, _MAX_LOAD)) * length_s[:, :, None])
        share: _Vector = np.minimum(within + after, 1.0).mean(axis=1).max(axis=0)
        return share
