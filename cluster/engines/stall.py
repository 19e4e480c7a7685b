"""Notices an engine that answers but computes nothing. Pure: the caller passes what it saw, and seconds."""

from __future__ import annotations

from tandem.router.engines.fleet.engine_status import Progress

__all__ = ["ServerStallWatch"]

SILENT_S = 60.0  # a server that answers nothing for this long is replaced
_MAX_GAP_S = 30.0  # between two looks; after a longer one this process itself had stopped


class ServerStallWatch:
    """Watches one server. It stalls if it has requests and its counters stand still, or if it stops answering."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` is how long the counters of a server that has requests may stand still."""
        self._timeout_s = timeout_s
        self._work_done = -1.0
        self._since_s: float | None = None  # when it last showed that it works
        self._looked_s = 0.0

    def look(self, progress: Progress | None, now: float) -> str:
        """Why the server has stalled, "" if it has not. `progress` is None if it did not answer."""
        was_away, self._looked_s = now - self._looked_s > _MAX_GAP_S, now
        works = progress is not None and (not progress.is_busy or progress.work_done != self._work_done)
        if progress is not None:
            self._work_done = progress.work_done
        if works or was_away or self._since_s is None:
            self._since_s = now
            return ""
        timeout_s = self._timeout_s if progress is not None else min(self._timeout_s, SILENT_S)
        if now - self._since_s < timeout_s:
            return ""
        return f"{'computed nothing' if progress is not None else 'did not answer'} for {timeout_s:g} s"
