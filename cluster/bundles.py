"""On which nodes workers run: Ray reserves a bundle of cores and GPUs for each of them, spread over the nodes."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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

_ROUNDING = 1e-3  # Ray counts shares of cores and GPUs to four decimals


class Bundle(NamedTuple):
    """What is reserved for one worker, on one node: all ranks of the worker run there."""

    num_cpus: float
    num_gpus: float
    strategy: Any  # Ray's scheduling strategy, which puts an actor into the bundle

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
        """Its number of cores and of GPUs."""
        return self.num_cpus, self.num_gpus

    @property
    def resources(self) -> dict[str, float]:
        """The bundle as Ray's autoscaler is asked for it."""
        return _resources(self.num_cpus, self.num_gpus)

    def __str__(self) -> str:
        needs = [_counted(self.num_cpus, "core"), _counted(self.num_gpus, "GPU")]
        return " and ".join(need for need in needs if need) or "a place"


class WorkerBundles:
    """A placement group with a bundle for each worker, of as many cores and GPUs as it needs.

    Ray puts each bundle on another node than those before it, as long as there is another one. Workers are in the order
    of their roles, so the death of one node leaves workers of each role where that is possible. The bundles of a dead
    node are placed again where there is room, at once or when a node joins.

    Groups outlive their server too if their workers do; the next server of the service takes them over.
    """

    def __init__(
        self, needs: Sequence[tuple[float, float]], owner: Owner | None = None, taken: Collection[Place] = ()
    ) -> None:
        """`needs`: cores and GPUs of each worker without a place. `taken`: bundles of workers that `owner` has claimed.

        Ray is asked only for what the groups of claimed workers lack: it could not find room for everything twice.
        """
        self._name = f"tandem/{owner.service}" if owner is not None else "tandem"
        self._options: dict[str, Any] = {"lifetime": "detached"} if owner else {}
        self._free: list[Bundle] = []
        self._num_used = Counter(place.group for place in taken)
        self._first = ""  # the group of the first workers; it stays reserved when they leave
        self._groups: dict[str, PlacementGroup] = {}
        self._reserved: dict[str, list[tuple[float, float]]] = {}  # sizes of the bundles of each group
        if owner is not None:
            self._take_over(taken)
        rest = list(needs)
        for bundle in self._free:
            if bundle.sizes in rest:
                rest.remove(bundle.sizes)
        if rest:
            self._create(rest, is_first=not self._groups)

    def _take_over(self, taken: Collection[Place]) -> None:
        """Use the groups of claimed workers again, and remove the others that an earlier server of the service left."""
        for group_id, group in placement_group_table().items():
            is_ours = group["name"] == self._name or group["name"].startswith(f"{self._name}/added/")
            if group["state"] == "REMOVED" or not is_ours:
                continue
            if not self._num_used[group_id]:
                remove_placement_group(_group_of(group_id))
                continue
            self._first = self._first or (group_id if group["name"] == self._name else "")
            sizes = [(one.get("CPU", 0.0), one.get("GPU", 0.0)) for _, one in sorted(group["bundles"].items())]
            own = self._note(_group_of(group_id), sizes)
            self._free += [bundle for bundle in own if bundle.place not in taken]

    def at(self, place: Place, num_cpus: float, num_gpus: float) -> Bundle:
        """The bundle of a claimed worker."""
        return _bundle_of(_group_of(place.group), place.bundle, num_cpus, num_gpus)

    def bundle(self, number: int, num_cpus: float, num_gpus: float) -> Bundle:
        """The bundle of the worker with this number, chosen by that number among the free ones of its size."""
        fitting = [bundle for bundle in self._free if bundle.sizes == (num_cpus, num_gpus)]
        if not fitting:
            self._create([(num_cpus, num_gpus)], is_first=False)
            fitting = self._free[-1:]
        bundle = min(fitting, key=lambda bundle: bundle.place.bundle != number)
        self._free.remove(bundle)
        self._num_used[bundle.place.group] += 1
        return bundle

    def another(self, num_cpus: float, num_gpus: float) -> Bundle:
        """A bundle for one more worker: one that was given back, or a new one, for which Ray looks for a node."""
        return self.bundle(-1, num_cpus, num_gpus)

    def room(self) -> dict[str, float]:
        """All cores and GPUs of Ray's nodes. Asks Ray."""
        return dict(ray.cluster_resources())

    def has_room_for(self, num_cpus: float, num_gpus: float, room: Mapping[str, float]) -> bool:
        """Whether `another` finds a place on the one node of a private Ray, which is all ours.

        Ray's own count of what is free lags behind: it may include what was asked for a moment ago.
        """
        if any(bundle.sizes == (num_cpus, num_gpus) for bundle in self._free):
            return True
        reserved = [sizes for needs in self._reserved.values() for sizes in needs]
        free_cpus = room.get("CPU", 0.0) - sum(sizes[0] for sizes in reserved)
        free_gpus = room.get("GPU", 0.0) - sum(sizes[1] for sizes in reserved)
        return num_cpus <= free_cpus + _ROUNDING and num_gpus <= free_gpus + _ROUNDING

    def give_back(self, bundle: Bundle) -> None:
        """Take back a bundle that is no longer used. If `another` asked for it, its node may be given up."""
        group_id = bundle.place.group
        self._num_used[group_id] -= 1
        self._free.append(bundle)
        if group_id != self._first and not self._num_used[group_id]:
            self._free = [free for free in self._free if free.place.group != group_id]
            del self._reserved[group_id]
            remove_placement_group(self._groups.pop(group_id))

    def remove(self) -> None:
        """Give all bundles back. Ray ends actors that still run in them."""
        for group in self._groups.values():
            remove_placement_group(group)

    def _create(self, needs: Sequence[tuple[float, float]], *, is_first: bool) -> None:
        """Ask Ray for a group of free bundles."""
        name = self._name if is_first else f"{self._name}/added/{uuid.uuid4().hex}"  # Ray takes each name once
        group = placement_group([_resources(*need) for need in needs], strategy="SPREAD", name=name, **self._options)
        if is_first:
            self._first = group.id.hex()
        self._free += self._note(group, needs)

    def _note(self, group: PlacementGroup, needs: Sequence[tuple[float, float]]) -> list[Bundle]:
        """Remember a group of ours. Returns its bundles."""
        self._groups[group.id.hex()] = group
        self._reserved[group.id.hex()] = list(needs)
        return [_bundle_of(group, number, *need) for number, need in enumerate(needs)]


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
