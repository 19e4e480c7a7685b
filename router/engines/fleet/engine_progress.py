"""Whether an engine gets on, judged by everything that comes from it.

The HTTP server of an engine may go on answering, health checks included, while its core hangs. One silent stream shows
nothing: it may be preempted, or wait behind a long prompt. So the engine is judged, not a stream:

    something is due     a stream that has shown a token waits for the next one; or the engine itself says that it runs
                         requests, in metrics that follow each of its steps; on trial after a stall: any request
    it shows a step      a token, a whole answer, a prompt computed for another engine, or its counters of tokens change

While the client of a stream takes nothing, its stream waits for nothing. Comments and parts of events show no step.
Pure: the time is passed in, in seconds of one clock.
"""

from __future__ import annotations

import enum

from tandem.router.engines.fleet.engine_status import EngineReport, WorkCounter

__all__ = ["EngineProgress"]


class _Phase(enum.Enum):
    SENT = enum.auto()  # its first token may take any time
    DUE = enum.auto()
    HELD = enum.auto()  # its client takes nothing: it was due before


class EngineProgress:
    """Follows one engine. What is told of requests from before the latest stall is ignored: it may be old."""

    def __init__(self) -> None:
        self.is_on_trial = False  # since a stall, until it shows a step
        self._phases: dict[object, _Phase] = {}  # of each request on the engine
        self._num_due = 0
        self._says_it_runs = False  # requests, ours among them
        self._work = WorkCounter()
        self._since_s = 0.0

    @property
    def silent_since_s(self) -> float | None:
        """Since when it has shown no step while one was due; None while none is."""
        return self._since_s if self._is_due else None

    def begin(self, request: object, now: float) -> None:
        """A request is sent to it."""
        self._set(request, _Phase.DUE if self.is_on_trial else _Phase.SENT, now)

    def end(self, request: object) -> None:
        """A request is over, or leaves it. Later calls change nothing."""
        self._num_due -= self._phases.pop(request, None) is _Phase.DUE
        self._says_it_runs &= bool(self._phases)

    def token(self, request: object, now: float) -> None:
        """A token of the request's stream came: the next one is due."""
        if request in self._phases:
            self._step(now)
            self._set(request, _Phase.DUE, now)

    def answer(self, request: object, now: float) -> None:
        """All that it computes for the request came."""
        if request in self._phases:
            self._step(now)
            self._set(request, _Phase.SENT, now)

    def hold(self, request: object, now: float, *, is_held: bool) -> None:
        """The client of a stream takes nothing of it, or does so again."""
        former, new = (_Phase.DUE, _Phase.HELD) if is_held else (_Phase.HELD, _Phase.DUE)
        if self._phases.get(request) is former:
            self._set(request, new, now)

    def report(self, report: EngineReport, now: float) -> None:
        """Its metrics were read."""
        load, work = report
        if self._work.has_changed(work):
            self._step(now)
        was_due = self._is_due
        says_it_runs = load is not None and load.num_running > 0 and work is not None and work.is_of_each_step
        # NOTE: only while requests of ours are there; those of others need no remedy of ours.
        self._says_it_runs = says_it_runs and bool(self._phases)
        if not was_due:
            self._since_s = max(self._since_s, now)

    def stalled(self) -> None:
        """It was found to have stalled: forget its requests, which are taken from it."""
        self._phases.clear()
        self._num_due = 0
        self._says_it_runs = False
        self.is_on_trial = True

    def joined(self, now: float) -> None:
        """It answers again: while it did not, its probes judged it."""
        self._since_s = max(self._since_s, now)

    def returned(self, now: float) -> None:
        """It was found to compute again."""
        self._step(now)

    @property
    def _is_due(self) -> bool:
        return self._num_due > 0 or self._says_it_runs

    def _step(self, now: float) -> None:
        self._since_s = max(self._since_s, now)
        self.is_on_trial = False

    def _set(self, request: object, phase: _Phase, now: float) -> None:
        if phase is _Phase.DUE and not self._is_due:
            self._since_s = max(self._since_s, now)
        self._num_due += (phase is _Phase.DUE) - (self._phases.get(request) is _Phase.DUE)
        self._phases[request] = phase
