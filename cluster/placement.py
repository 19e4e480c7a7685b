"""On which nodes workers run: Ray reserves a bundle of cores and GPUs for each of them, spread over the nodes."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import ray
from ray._raylet import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tandem.cluster.ownership import Owner, Place

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

    @property
    def place(self) -> Place:
        """Which of Ray's bundles this is."""
        return Place(self.strategy.placement_group.id.hex(), self.strategy.placement_group_bundle_index)

    @property
    def sizes(self) -> tuple[float, float]:
        """Cores and GPUs."""
        return self.num_cpus, self.num_gpus

    @property
    def resources(self) -> dict[str, float]:
        """What Ray's autoscaler is asked for."""
        return _resources(self.num_cpus, self.num_gpus)

    def __str__(self) -> str:
        needs = [_counted(self.num_cpus, "core"), _counted(self.num_gpus, "GPU")]
        return " and ".join(need for need in needs if need) or "a place"


class WorkerBundles:
    """A placement group with a bundle for each worker, of as many cores and GPUs as it needs.

    Ray puts each bundle on another node than those before it, as long as there is another one. Workers are in the order
    of their roles, so the death of one node leaves workers of each role where that is possible. The bundles of a dead
    node are placed again where there is room, at once or when a node joins.

    The groups of workers that outlive their server do so, too; the next server of the service takes them over.
    """

    def __init__(
        self, needs: Sequence[tuple[float, float]], owner: Owner | None = None, taken: Collection[Place] = ()
    ) -> None:
        """`needs`: cores and GPUs of each worker. `taken`: bundles of workers that `owner` has claimed."""
        name = f"tandem/{owner.service}" if owner is not None else "tandem"
        self._options: dict[str, Any] = {"name": f"{name}/added"} | ({"lifetime": "detached"} if owner else {})
        self._group, self._added = _left_groups(name, needs, taken) if owner is not None else (None, [])
        if self._group is None:
            bundles = [_resources(*need) for need in needs]
            self._group = placement_group(bundles, strategy="SPREAD", **self._options | {"name": name})
        own = (_bundle_of(self._group, number, *need) for number, need in enumerate(needs))
        self._free = [bundle for bundle in own if not taken or bundle.place not in taken]
        self._num_used = Counter(place.group for place in taken)  # bundles of groups other than the first

    def at(self, place: Place, num_cpus: float, num_gpus: float) -> Bundle:
        """The bundle of a claimed worker."""
        return _bundle_of(_group_of(place.group), place.bundle, num_cpus, num_gpus)

    def bundle(self, number: int, num_cpus: float, num_gpus: float) -> Bundle:
        """The bundle of the worker with this number: of all that are free and as large, the one with its number."""
        fitting = (bundle for bundle in self._free if bundle.sizes == (num_cpus, num_gpus))
        bundle = min(fitting, key=lambda bundle: bundle.strategy.placement_group_bundle_index != number, default=None)
        if bundle is None:
            return self._new(num_cpus, num_gpus)
        self._free.remove(bundle)
        return bundle

    def another(self, num_cpus: float, num_gpus: float) -> Bundle:
        """A bundle for one more worker: one that was given back, or a new one, for which Ray finds a node."""
        return self.bundle(-1, num_cpus, num_gpus)

    def _new(self, num_cpus: float, num_gpus: float) -> Bundle:
        options = self._options | {"name": f"{self._options['name']}/{uuid.uuid4().hex}"}  # Ray takes each name once
        group = placement_group([_resources(num_cpus, num_gpus)], **options)
        self._added.append(group)
        self._num_used[group.id.hex()] = 1
        return _bundle_of(group, 0, num_cpus, num_gpus)

    def has_room_for(self, num_cpus: float, num_gpus: float) -> bool:
        """Whether `another` finds room on the nodes that are there."""
        free = ray.available_resources()
        is_kept = any(bundle.sizes == (num_cpus, num_gpus) for bundle in self._free)
        return is_kept or (num_cpus <= free.get("CPU", 0) and num_gpus <= free.get("GPU", 0))

    def give_back(self, bundle: Bundle) -> None:
        """Nobody uses a bundle any more. Its node may be given up if it was asked for by `another`."""
        group = bundle.strategy.placement_group
        if group not in self._added:
            self._free.append(bundle)
            return
        self._num_used[bundle.place.group] -= 1
        if not self._num_used[bundle.place.group]:  # that of an earlier server has several
            self._added.remove(group)
            remove_placement_group(group)

    def remove(self) -> None:
        """Give all bundles back. Ray ends actors that still run in them."""
        for group in (self._group, *self._added):
            remove_placement_group(group)


def _left_groups(
    name: str, needs: Sequence[tuple[float, float]], taken: Collection[Place]
) -> tuple[PlacementGroup | None, list[PlacementGroup]]:
    """What an earlier server of this service left: its group, if it is as needed now, and those of added workers.

    Groups that nobody uses any more are removed.
    """
    used = {place.group for place in taken}
    main, added = None, []
    for group_id, group in placement_group_table().items():
        if group["state"] == "REMOVED" or not (group["name"] == name or group["name"].startswith(f"{name}/added/")):
            continue
        bundles = [group["bundles"][number] for number in sorted(group["bundles"])]
        if main is None and group["name"] == name and bundles == [_resources(*need) for need in needs]:
            main = _group_of(group_id)
        elif group_id in used:
            added.append(_group_of(group_id))
        else:
            remove_placement_group(_group_of(group_id))
    return main, added


def _group_of(group_id: str) -> PlacementGroup:
    return PlacementGroup(PlacementGroupID.from_hex(group_id))


def _bundle_of(group: PlacementGroup, number: int, num_cpus: float, num_gpus: float) -> Bundle:
    return Bundle(num_cpus, num_gpus, PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number))


def _resources(num_cpus: float, num_gpus: float) -> dict[str, float]:
    return {name: number for name, number in (("CPU", num_cpus), ("GPU", num_gpus)) if number}


def _counted(number: float, name: str) -> str:
    if not number:
        return ""
    return f"{number:.3g} {name}" if number == 1 else f"{number:.3g} {name}s"
