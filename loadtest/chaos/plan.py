"""What is done to a server, and when. All of it follows from a seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tandem.protocol.errors import ConfigError

_MEAN_GAP_S = 10.0  # between two faults, and between two operations
# How often a kind is drawn, relative to the others.
FAULTS = {"kill": 5, "stop-3": 2, "stop-20": 2, "kill-router": 1, "lose-disk": 1}
OPERATIONS = {"flip": 3, "migrate": 4, "restart": 2, "rolling-restart": 1, "replace": 2, "terminate": 2}
_GROUPS = {"faults": FAULTS, "operations": OPERATIONS}


@dataclass(frozen=True, slots=True)
class ChaosEvent:
    """Something that is done to the server. `drawn` in [0, 1) chooses its victim among those present then."""

    at_s: float
    kind: str
    drawn: float


def plan(seed: int, duration_s: float, kinds: Collection[str]) -> list[ChaosEvent]:
    """The events of a run, in order. The faults of a seed are the same with and without operations, and these too."""
    faults = _events(random.Random(seed), duration_s, _among(FAULTS, kinds))
    operations = _events(random.Random(f"operations {seed}"), duration_s, _among(OPERATIONS, kinds))
    return sorted(faults + operations, key=lambda event: event.at_s)


def kinds_of(names: str) -> list[str]:
    """Kinds of events from their names and those of groups, separated by commas. Raises `ConfigError`."""
    kinds: dict[str, None] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        group = _GROUPS.get(name, [name])
        if not all(kind in FAULTS or kind in OPERATIONS for kind in group):
            known = ", ".join([*_GROUPS, *FAULTS, *OPERATIONS])
            raise ConfigError(f"unknown events {name!r}; choose from: {known}")
        kinds |= dict.fromkeys(group)
    return list(kinds)


def _among(weights: Mapping[str, int], kinds: Collection[str]) -> dict[str, int]:
    return {kind: weight for kind, weight in weights.items() if kind in kinds}


def _events(source: random.Random, duration_s: float, weights: Mapping[str, int]) -> list[ChaosEvent]:
    events: list[ChaosEvent] = []
    at_s = source.expovariate(1 / _MEAN_GAP_S)
    while weights and at_s < duration_s:
        (kind,) = source.choices(list(weights), list(weights.values()))
        events.append(ChaosEvent(at_s, kind, source.random()))
        at_s += source.expovariate(1 / _MEAN_GAP_S)
    return events
