"""What the autoscaler can do, and how it explains a decision: moves, enumerated reasons and their figures."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tandem.protocol.messages import Role
from tandem.scheduling.autoscaling.prediction import Prediction


class Move(NamedTuple):
    """Changes of one kind that are made at once."""

    kind: str  # "flip", "add" or "remove"
    role: Role  # the role that grows, or that shrinks by a removal
    worker_ids: tuple[str, ...] = ()  # of those that flip to the role; or that leave, while what they run moves
    num_added: int = 0  # workers of the role to start

    @property
    def num_workers(self) -> int:
        """Workers that it moves."""
        return len(self.worker_ids) + self.num_added

    def __str__(self) -> str:
        if self.num_added:
            return f"add {self.num_added} {self.role} worker{'s' * (self.num_added > 1)}"
        return f"{self.kind} {', '.join(self.worker_ids)}" + (f" to {self.role}" if self.kind == "flip" else "")


class Reason(StrEnum):
    """Why a decision is what it is."""

    NO_POOLS = "no_pools"  # fewer than two ready workers with a role of their own
    IN_FLIGHT = "in_flight"
    WITHDRAWN = "withdrawn"  # the move in flight failed, or took longer than its deadline
    UNWANTED = "unwanted"  # workers that were to be added have found no room, and are no longer needed
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


# What a decision without a move means, in words for operators.
_IN_WORDS = {
    Reason.NO_POOLS: "waiting for a ready worker of each role",
    Reason.IN_FLIGHT: "a move is under way",
    Reason.WITHDRAWN: "a move was given up",
    Reason.UNWANTED: "a move was given up",
    Reason.ON_TARGET: "on target, nothing to do",
    Reason.UNREACHABLE: "below target, but idle workers would be too slow as well, so no move helps",
    Reason.NO_GAIN: "below target, but no move would gain enough",
    Reason.AT_MAX: "below target, and max_workers is reached",
    Reason.BACKOFF: "waiting before the next try",
    Reason.AGREEING: "watching whether a move stays worth it",
    Reason.COOLDOWN: "waiting after the latest move",
    Reason.ADVISED: "a move that it may not make would help",
}


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """What to do now, if anything, and why."""

    code: Reason
    detail: str
    now: Prediction | None = None  # without a move
    after: Prediction | None = None  # after the move
    move: Move | None = None
    advice: Move | None = None  # a move that would help and is not made
    withdrawn: Move | None = None

    @property
    def reason(self) -> str:
        """The explanation in one line, with numbers."""
        return f"{self.move or _IN_WORDS[self.code]}: {self.detail}"

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
