"""How long the supervision of workers waits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What the supervisor and drains wait for."""

    ray_s: float = 5.0  # Ray needs milliseconds to end its workers, unless it is about to end itself
    gone_s: float = 5.0  # a replacement waits so long for the memory that a dead worker's process may still take
    leave_s: float = 15.0  # a drained worker has so long to end its process
    drain_poll_s: float = 0.1
    # A worker must have been idle for this long: an answer that has just left may be about to read its KV from here.
    quiet_s: float = 0.5
