"""When the autoscaler acts, and within which bounds."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerPolicy:
    """When the autoscaler acts, and within which bounds."""

    interval_s: float = 2.0  # between two decisions
    min_workers: int = 2
    max_workers: int = 2**31
    acts: frozenset[str] = frozenset({"flip"})  # of "flip", "add", "remove"; the others are only advised
    target: float = 0.98  # attainment that suffices
    min_gain: float = 0.01  # least gain of a move, as a share of all requests
    min_share: float = 0.03  # least gain of a move, as a share of the loss
    num_agreeing: int = 2  # observations in a row that want the same
    cooldown_s: float = 10.0  # between two moves
    remove_after_s: float = 300.0  # a removal waits until a worker has been spare for this long
    contrary_weight: float = 4.0  # each second without a spare worker takes back this many seconds with one
    headroom: float = 1.25  # a worker may leave if the others could serve this multiple of the forecast
    start_s: float = 60.0  # time until a new worker serves
    flip_deadline_s: float = 60.0
    move_deadline_s: float = 300.0  # adding and removing are withdrawn after this time
    start_deadlines: float = 3.0  # adding may take this many times `start_s`, if that is longer
    max_backoff_s: float = 3600.0  # longest pause after withdrawals in a row

    def __post_init__(self) -> None:
        if self.num_agreeing < 1 or self.headroom <= 1 or not 0 < self.target < 1:
            raise ConfigError(
                f"num_agreeing={self.num_agreeing} must be at least 1, headroom={self.headroom} above 1 and "
                f"target={self.target} between 0 and 1; other values make pools oscillate"
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
