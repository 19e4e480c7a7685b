"""Whether an engine makes progress, judged by everything that comes from it.

The HTTP server of an engine may go on answering, health checks included, while its core hangs. One silent stream shows
nothing: it may be preempted, or wait behind a long prompt. So the engine is judged, not a stream:

    something is due     a stream that has shown a token waits for the next one; or the engine itself says that it runs
                         requests, in metrics that follow each of its steps; on trial after a stall: any request
    it shows a step      a token, a whole answer, a prompt computed for another engine, or its counters of tokens change

While a client does not read its stream, that stream waits for no token. Comments and parts of events show no step.
Pure: the time is passed in, in seconds of one clock.
"""

from __future__ import annotations

import enum

from tandem.router.engines.engine_status import EngineReport, WorkCounter


class _Phase(enum.Enum):
    SENT = enum.auto()  # its first token may take any time
    DUE = enum.auto()
    HELD = enum.auto()  # a token was due, but its client has stopped reading


class EngineProgress:
    """Follows one engine. Reports about requests from before the latest stall are ignored: they may be old."""

    def __init__(self) -> None:
        self.is_on_trial = False  # true from a stall until it shows a step
        self._phases: dict[object, _Phase] = {}  # the phase of each request on the engine
        self._num_due = 0
        self._says_it_runs = False  # whether it reports that it runs requests, while it has some of ours
        self._work = WorkCounter()
        self._since_s = 0.0

    @property
    def silent_since_s(self) -> float | None:
        """The time since when it has shown no step although one was due; None while none is due."""
        return self._since_s if self._is_due else None

    def begin(self, request: object, now: float) -> None:
        """A request was sent to it."""
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
        """Everything that it computes for the request came."""
        if request in self._phases:
            self._step(now)
            self._set(request, _Phase.SENT, now)

    def hold(self, request: object, now: float, *, is_held: bool) -> None:
        """The client of a stream has stopped reading it, or reads it again."""
        former, new = (_Phase.DUE, _Phase.HELD) if is_held else (_Phase.HELD, _Phase.DUE)
        if self._phases.get(request) is former:
            self._set(request, new, now)

    def report(self, report: EngineReport, now: float) -> None:
        """Its metrics were read."""
        load, work = report.load, report.work
        if self._work.has_changed(work):
            self._step(now)
        was_due = self._is_due
        says_it_runs = load is not None and load.num_running > 0 and work is not None and work.is_of_each_step
        # NOTE: only while we have requests there; those of others are not ours to rescue.
        self._says_it_runs = says_it_runs and bool(self._phases)
        if not was_due:
            self._since_s = max(self._since_s, now)

    def stalled(self) -> None:
        """It was found to have stalled: forget its requests, which leave it."""
        self._phases.clear()
        self._num_due = 0
        self._says_it_runs = False
        self.is_on_trial = True

    def joined(self, now: float) -> None:
        """It answers again. While it did not, its probes judged it."""
        self._since_s = max(self._since_s, now)

    def returned(self, now: float) -> None:
        """The engine computes again after a stall."""
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
