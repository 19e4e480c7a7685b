"""The latest routing decisions with their reasons, for display. They contain no prompts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tandem.protocol.errors import Overloaded, ServingError
from tandem.scheduling.admission.forecast import Forecast
from tandem.scheduling.placement.placement import Candidate, Placement
from tandem.scheduling.request import ServiceClass

MAX_DECISIONS = 256


@dataclass(eq=False, slots=True)
class RoutingDecision:
    """The decision about one request, and its outcome, which is filled in as it becomes known."""

    request_id: str
    service_class: ServiceClass
    arrived_s: float  # on the router's clock
    forecast: Forecast | None = None  # None where no worker could take the request
    outcome: str = "waiting"  # later "dispatched" or "dropped"; or "rejected" at once
    placement: Placement | None = None  # the one it was dispatched with
    wait_s: float | None = None
    decided_s: float | None = None  # when the decision that dispatched it began; it ended at `booked_s`
    booked_s: float | None = None
    actual_ttft_s: float | None = None
    error: ServingError | None = None

    def to_json(self, now: float) -> dict[str, Any]:
        """The decision with its numbers; times are in seconds, with six digits."""
        forecast, error = self.forecast, self.error
        placement = self.placement or (forecast.placement if forecast else None)
        shown: dict[str, Any] = {
            "request_id": self.request_id,
            "age_s": now - self.arrived_s,
            "outcome": self.outcome,
            "tenant": self.service_class.tenant,
            "priority": self.service_class.priority,
            "ttft_slo_s": None,
            "predicted_ttft_s": None,
            "actual_ttft_s": self.actual_ttft_s,
            "wait_s": self.wait_s,
        }
        if forecast is not None:
            shown |= {
                "ttft_slo_s": forecast.slo_s if forecast.slo_s < math.inf else None,
                "predicted_ttft_s": forecast.ttft_s,
                "predicted_start_s": forecast.start_s,
                "queue": {
                    "place": forecast.ahead.num_requests,
                    "ahead_prompt_tokens": forecast.ahead.new_tokens,
                    "ahead_worker_s": forecast.ahead.worker_s,
                },
                "worker_s": forecast.work.worker_s,
            }
        if error is not None:
            shown["error"] = {"code": error.code, "message": error.message}
            if isinstance(error, Overloaded):
                shown["error"]["retry_after_s"] = error.retry_after_s
        if placement is not None:
            candidates = _candidates(placement, forecast.placement.others if forecast else ())
            shown["placement"] = {
                "candidates": [candidate.explain() for candidate in candidates],  # the first one was chosen
                "num_prompt_tokens": placement.num_prompt_tokens,
                "num_new_tokens": placement.num_new_tokens,
                "expected_output_tokens": placement.expected_output_tokens,
                "skipped": placement.skipped,
                "strategy": placement.strategy,
                "shadow": dict(placement.shadow),
            }
        rounded: dict[str, Any] = _rounded(shown)
        return rounded


class DecisionLog:
    """The latest decisions; older ones are forgotten."""

    def __init__(self) -> None:
        self._decisions: deque[RoutingDecision] = deque(maxlen=MAX_DECISIONS)

    def __len__(self) -> int:
        return len(self._decisions)

    def add(self, decision: RoutingDecision) -> None:
        """Keep a decision, which may still be updated."""
        self._decisions.append(decision)

    def to_json(self, now: float, limit: int = MAX_DECISIONS) -> list[dict[str, Any]]:
        """The decisions, newest first."""
        return [decision.to_json(now) for decision in islice(reversed(self._decisions), limit)]


def _candidates(placement: Placement, others: Sequence[Candidate]) -> list[Candidate]:
    """The chosen candidate, then the others, cheapest first and each pair of workers once."""
    rest = [*([placement.runner_up] if placement.runner_up else []), *placement.others, *others]
    known = {(placement.best.prefill.worker_id, placement.best.decode.worker_id)}
    found = [placement.best]
    for candidate in sorted(rest, key=lambda candidate: candidate.terms.total_s):
        key = (candidate.prefill.worker_id, candidate.decode.worker_id)
        if key not in known:
            known.add(key)
            found.append(candidate)
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
