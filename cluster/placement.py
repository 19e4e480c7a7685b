"""On which nodes workers run: Ray reserves a bundle of cores and GPUs for each of them, spread over the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

__all__ = ["Bundle", "WorkerBundles"]


class Bundle(NamedTuple):
    """What is reserved for one worker, on one node: all ranks of the worker run there."""

    num_cpus: float
    num_gpus: float
    strategy: Any  # Ray's, which leads an actor to the bundle

    @property
    def options(self) -> dict[str, Any]:
        """Options of an actor that takes the whole bundle."""
        return {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "scheduling_strategy": self.strategy}

    def __str__(self) -> str:
        needs = [_counted(self.num_cpus, "core"), _counted(self.num_gpus, "GPU")]
        return " and ".join(need for need in needs if need) or "a place"


class WorkerBundles:
    """A placement group with a bundle for each worker, of as many cores and GPUs as it needs.

    Ray puts each bundle on another node than those before it, as long as there is another one. Workers are in the order
    of their roles, so the death of one node leaves workers of each role where that is possible. The bundles of a dead
    node are placed again where there is room, at once or when a node joins.
    """

    def __init__(self, needs: Sequence[tuple[float, float]]) -> None:
        """`needs`: cores and GPUs of each worker."""
        self._needs = needs
        bundles = [_resources(*need) for need in needs]
        self._free: list[Bundle] = []
        self._added: list[PlacementGroup] = []
        self._group: PlacementGroup = placement_group(bundles, strategy="SPREAD", name="tandem")

    def bundle(self, number: int) -> Bundle:
        """The bundle of the worker with this number."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        return Bundle(*self._needs[number], strategy)

    def another(self, num_cpus: float, num_gpus: float) -> Bundle:
        """A bundle for one more worker: one that was given back, or a new one, for which Ray finds a node."""
        for bundle in self._free:
            if (bundle.num_cpus, bundle.num_gpus) == (num_cpus, num_gpus):
                self._free.remove(bundle)
                return bundle
        group = placement_group([_resources(num_cpus, num_gpus)], name="tandem")
        self._added.append(group)
        return Bundle(num_cpus, num_gpus, PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0))

    def has_room_for(self, num_cpus: float, num_gpus: float) -> bool:
        """Whether `another` finds room on the nodes that are there."""
        free = ray.available_resources()
        is_kept = any((bundle.num_cpus, bundle.num_gpus) == (num_cpus, num_gpus) for bundle in self._free)
        return is_kept or (num_cpus <= free.get("CPU", 0) and num_gpus <= free.get("GPU", 0))

    def give_back(self, bundle: Bundle) -> None:
        """Nobody uses a bundle any more. Its node may be given up if it was asked for by `another`."""
        group = bundle.strategy.placement_group
        if group in self._added:
            self._added.remove(group)
            remove_placement_group(group)
        else:
            self._free.append(bundle)

    def remove(self) -> None:
        """Give all bundles back. Ray ends actors that still run in them."""
        for group in (self._group, *self._added):
            remove_placement_group(group)


def _resources(num_cpus: float, num_gpus: float) -> dict[str, float]:
    return {name: number for name, number in (("CPU", num_cpus), ("GPU", num_gpus)) if number}


def _counted(number: float, name: str) -> str:
    if not number:
        return ""
    return f"{number:.3g} {name}" if number == 1 else f"{number:.3g} {name}s"
