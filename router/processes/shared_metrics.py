"""`/metrics` of several processes as of one: what each counted is added up, what all of them see is told once.

What a process counted stays in the totals after its end, as of the last time that anyone asked: a counter that fell
would look like a restart of all of them, and a rate over it would be wrong by the whole total.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

__all__ = ["SharedMetrics"]

MAX_RETIRED = 256  # processes that have ended; the counts of those beyond, heard longest ago, are lost
# Counted by each process for itself. The rest is told by workers and engines to all processes alike.
_OWN_PREFIX = "tandem_router_"
_OWN_NAMES = {
    "tandem_engine_running_requests",
    "tandem_engine_requests",
    "tandem_engine_failures",
    "tandem_engine_circuit_openings",
    "tandem_engine_retries",
}

_Labels = tuple[tuple[str, str], ...]


class _Family(msgspec.Struct, array_like=True):
    """One metric of one process."""

    name: str
    kind: str
    text: str
    samples: dict[tuple[str, _Labels], float]  # by sample's name and labels

    @property
    def is_added_up(self) -> bool:
        """Whether the processes' values are parts of a whole."""
        return self.name.startswith(_OWN_PREFIX) or self.name in _OWN_NAMES


_Wire = list[tuple[str, str, str, list[tuple[str, _Labels, float]]]]


class SharedMetrics:
    """The metrics of this process, and what its siblings said of theirs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._told: dict[tuple[str, int], bytes] = {}  # by process and epoch, heard longest ago first

    def own(self) -> bytes:
        """What siblings are told of this process."""
        wire: _Wire = [
            (family.name, family.kind, family.text, [(*key, value) for key, value in family.samples.items()])
            for family in _families(self._registry.collect())
        ]
        return msgspec.msgpack.encode(wire)

    def note(self, name: str, epoch: int, content: bytes, living: Collection[tuple[str, int]]) -> None:
        """A sibling has told its metrics. Its latest word counts. `living` are the siblings, by name and epoch."""
        self._told.pop((name, epoch), None)
        self._told[name, epoch] = content
        ended = [process for process in self._told if process not in living]
        for process in ended[: max(len(ended) - MAX_RETIRED, 0)]:
            del self._told[process]

    def retired(self, living: Collection[tuple[str, int]]) -> bytes:
        """What processes that have ended had counted, for one that joins."""
        ended = [(name, epoch, told) for (name, epoch), told in self._told.items() if (name, epoch) not in living]
        return msgspec.msgpack.encode(ended)

    def note_retired(self, content: bytes) -> None:
        """Take in a sibling's `retired`."""
        for name, epoch, told in msgspec.msgpack.decode(content, type=list[tuple[str, int, bytes]]):
            self._told.setdefault((name, epoch), told)

    def exposition(self, living: Collection[tuple[str, int]]) -> bytes:
        """All processes' metrics in Prometheus' text format. `living` are the siblings, by name and epoch."""
        total = {family.name: family for family in _families(self._registry.collect())}
        for process, told in self._told.items():
            _add(total, _decode(told), is_living=process in living)
        text: bytes = generate_latest(_Shown([*total.values()], 1 + len(living)))
        return text


class _Shown:
    """Families as a collector, which is what `generate_latest` takes."""

    def __init__(self, families: list[_Family], num_processes: int) -> None:
        self._families = families
        self._num_processes = num_processes

    def collect(self) -> Iterator[Metric]:
        """As a registry does."""
        yield GaugeMetricFamily("tandem_router_processes", "Processes of this router", value=self._num_processes)
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for (name, labels), value in family.samples.items():
                metric.add_sample(name, dict(labels), value)
            yield metric


def _add(total: dict[str, _Family], families: Iterable[_Family], *, is_living: bool) -> None:
    """Add what another process counted. One that has ended has no gauges any more."""
    for family in families:
        if not family.is_added_up or not (is_living or family.kind != "gauge"):
            continue
        known = total.setdefault(family.name, _Family(family.name, family.kind, family.text, {}))
        for key, value in family.samples.items():
            if key[0].endswith("_created"):
                known.samples[key] = min(known.samples.get(key, value), value)
            else:
                known.samples[key] = known.samples.get(key, 0.0) + value


def _families(metrics: Iterable[Metric]) -> Iterator[_Family]:
    for metric in metrics:
        samples = {(sample.name, tuple(sample.labels.items())): float(sample.value) for sample in metric.samples}
        yield _Family(metric.name, metric.type, metric.documentation, samples)


def _decode(told: bytes) -> Iterator[_Family]:
    decoded: Any = msgspec.msgpack.decode(told, type=_Wire)
    for name, kind, text, samples in decoded:
        yield _Family(name, kind, text, {(sample, labels): value for sample, labels, value in samples})
