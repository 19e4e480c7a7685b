"""What admission predicts for a request."""

from __future__ import annotations

from typing import NamedTuple

from tandem.protocol.errors import ServingError
from tandem.scheduling.admission.work import Work
from tandem.scheduling.placement.placement import Placement


class Forecast(NamedTuple):
    """The prediction for a request that arrives now. All times are in seconds."""

    placement: Placement
    work: Work
    ahead: Work  # work that waits in the router and is served first
    start_s: float  # time until its prompt begins, after waiting in the router and at the worker
    ttft_s: float
    slo_s: float  # inf = none
    error: ServingError | None  # why it is refused; None = it is admitted

    @property
    def is_hopeful(self) -> bool:
        """Whether the request is worth a try.

        On an idle worker it always is, whatever is predicted: no other worker would be faster, and a wrong model could
        not learn if everything that it takes for slow were refused.
        """
        return self.ttft_s <= self.slo_s or self.start_s <= 0
