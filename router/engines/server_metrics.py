"""`/metrics` of a server, read once for all of its data-parallel ranks.

Each rank is probed by itself, but all share one exposition: the 2,900 lines of a server with eight ranks would cost its
HTTP process eight times as much.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from tandem.router.engines.engine import RemoteEngine
from tandem.router.engines.probe_client import ProbeFailed


class MetricsReading(NamedTuple):
    """What one reading found."""

    text: str  # "" if the server has no metrics
    num_ours: dict[str, int]  # by engine: the most requests it had from this router while the text was made
    read_s: float


class ServerMetrics:
    """Used from one event loop only."""

    def __init__(self, max_age_s: float, clock: Callable[[], float]) -> None:
        """Ranks share a reading that is younger than `max_age_s`."""
        self.engines: list[RemoteEngine] = []  # the ranks, or the only engine
        self._max_age_s = max_age_s
        self._clock = clock
        self._lock = asyncio.Lock()
        self._latest: MetricsReading | None = None
        self._failure: tuple[ProbeFailed, float] | None = None

    async def read(self, engine: RemoteEngine, timeout_s: float) -> MetricsReading:
        """The metrics, at most `max_age_s` old. Raises `ProbeFailed`."""
        asked_s = self._clock()
        async with self._lock:
            if self._failure is not None and self._failure[1] > asked_s:  # another rank has waited for it meanwhile
                raise self._failure[0]
            latest = self._latest
            if latest is None or self._clock() - latest.read_s >= self._max_age_s or engine.name not in latest.num_ours:
                latest = self._latest = await self._read(engine, timeout_s)
            return latest

    async def _read(self, engine: RemoteEngine, timeout_s: float) -> MetricsReading:
        before = self._num_ours()
        try:
            answer = await engine.probe_client.get("/metrics", timeout_s)
        except ProbeFailed as exc:
            self._failure = exc, self._clock()
            raise
        # Requests that ended or came while the server answered are not foreign.
        num_ours = {name: max(count, before.get(name, 0)) for name, count in self._num_ours().items()}
        text = answer.content.decode(errors="replace") if answer.status == 200 else ""
        return MetricsReading(text, num_ours, self._clock())

    def _num_ours(self) -> dict[str, int]:
        return {engine.name: len(engine.running) for engine in self.engines}
