"""Notices an engine that answers but computes nothing. Pure: the caller passes what it saw, and seconds."""

from __future__ import annotations

from tandem.router.engines.engine_status import EngineReport, WorkCounter, WorkDone

SILENT_S = 60.0  # a server that answers nothing for this long is replaced
_MAX_GAP_S = 30.0  # between two looks; after a longer one this process itself had stopped
_NOTHING_DONE = WorkDone(0.0, is_of_each_step=False)  # SGLang shows its counters once it has computed


class ServerStallWatch:
    """Watches one server. It stalls if it has requests and its counters do not change, or if it stops answering.

    The router judges an engine by its requests too, and sooner (`EngineProgress`); this one ends the server.
    """

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` is how long the counters of a server that has requests may stay unchanged."""
        self._timeout_s = timeout_s
        self._work = WorkCounter()
        self._since_s: float | None = None  # when it last showed that it works
        self._looked_s = 0.0

    def look(self, report: EngineReport | None, now: float) -> str:
        """Why the server has stalled, "" if it has not. `report` is None if it did not answer."""
        was_away, self._looked_s = now - self._looked_s > _MAX_GAP_S, now
        if self._works(report) or was_away or self._since_s is None:
            self._since_s = now
            return ""
        timeout_s = self._timeout_s if report is not None else min(self._timeout_s, SILENT_S)
        if now - self._since_s < timeout_s:
            return ""
        return f"{'computed nothing' if report is not None else 'did not answer'} for {timeout_s:g} s"

    def _works(self, report: EngineReport | None) -> bool:
        """Whether it has computed since the look before, or has nothing to compute."""
        if report is None:
            return False
        has_computed = self._work.has_changed(report.work or _NOTHING_DONE)
        return has_computed or report.load is None or not report.load.is_busy
