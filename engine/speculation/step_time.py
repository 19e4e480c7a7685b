"""How long a step takes, by its rows: learned from the engine's own steps, cheaply enough for each of them."""

from __future__ import annotations

_KEPT = 0.98  # of the sums, with each further step
_PRIOR_STEPS = 0.5  # what the prior counts as, among some 50 steps
_PRIOR_SHARE = 0.06  # of a step of one row that each further row takes, as long as nothing else was measured
_MAX_FACTOR = 3.0  # a step that took this many times longer than expected was disturbed, and counts as this


class StepTime:
    """seconds = base + row_s * rows, by least squares over the latest steps; neither is negative.

    The fewer different numbers of rows they had, the more the slope is the prior's: `_PRIOR_SHARE` of a step.
    """

    def __init__(self) -> None:
        self._num = self._x = self._xx = self._y = self._xy = 0.0
        self._row_s, self._base_s = 0.0, 0.0

    def observe(self, rows: int, duration_s: float) -> None:
        """Learn from a step of this many rows, each of which had logits."""
        if self._num:
            duration_s = min(duration_s, _MAX_FACTOR * self.seconds(rows))
        self._num = self._num * _KEPT + 1
        self._x = self._x * _KEPT + rows
        self._xx = self._xx * _KEPT + rows * rows
        self._y = self._y * _KEPT + duration_s
        self._xy = self._xy * _KEPT + rows * duration_s
        self._fit()

    def seconds(self, rows: int) -> float:
        """The expected duration. 0 until a step was observed."""
        return self._base_s + self._row_s * rows

    def _fit(self) -> None:
        mean_x, mean_y = self._x / self._num, self._y / self._num
        variance = max(self._xx / self._num - mean_x**2, 0.0)
        covariance = self._xy / self._num - mean_x * mean_y
        # The prior is a spread of its own: rows that differ by one, with the prior's slope.
        weight = _PRIOR_STEPS / self._num
        prior = _PRIOR_SHARE * mean_y / (1 + _PRIOR_SHARE * (mean_x - 1))
        slope = (covariance + weight * prior) / (variance + weight)
        self._row_s = min(max(slope, 0.0), mean_y / mean_x)
        self._base_s = mean_y - self._row_s * mean_x
