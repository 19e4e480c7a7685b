from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cluster import bundles
from tandem.cluster.bundles import Bundle, WorkerBundles
from tandem.cluster.ownership import Owner, Place


@pytest.mark.parametrize(
    ("num_cpus", "num_gpus", "expected"),
    [
        (1.0, 0.0, "1 core"),
        (2.0, 0.0, "2 cores"),
        (1.0, 1.0, "1 core and 1 GPU"),
        (0.66667, 2.0, "0.667 cores and 2 GPUs"),
        (0.0, 0.0, "a place"),
    ],
)
def test_what_a_worker_needs_is_told_in_words(num_cpus: float, num_gpus: float, expected: str) -> None:
    assert str(Bundle(num_cpus, num_gpus, None)) == expected


class Groups:
    """Ray's placement groups, by id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **groups: tuple[str, list[dict[str, float]]]) -> None:
        self.groups = dict(groups)
        monkeypatch.setattr(bundles, "placement_group", self._create)
        monkeypatch.setattr(bundles, "remove_placement_group", lambda group: self.groups.pop(group.name))
        monkeypatch.setattr(bundles, "placement_group_table", self._table)
        monkeypatch.setattr(bundles, "_group_of", self._handle)

    @cache  # noqa: B019 - handles of one group are equal, as Ray's are
    def _handle(self, name: str) -> Any:
        return SimpleNamespace(id=SimpleNamespace(hex=lambda: name), name=name)

    def _create(self, bundles: list[dict[str, float]], *, name: str, **_: object) -> Any:
        group_id = f"new-{len(self.groups)}"
        self.groups[group_id] = (name, bundles)
        return self._handle(group_id)

    def _table(self) -> dict[str, Any]:
        return {
            group_id: {"state": "CREATED", "name": name, "bundles": dict(enumerate(bundles))}
            for group_id, (name, bundles) in self.groups.items()
        }


OWNER = Owner(service="s", orphan_timeout_s=60.0)
CORE = (1.0, 0.0)


def test_groups_of_an_earlier_server_are_used_again_or_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = {"CPU": 1.0}
    groups = Groups(
        monkeypatch,
        main=("tandem/s", [one, one]),
        mine=("tandem/s/added/1", [one]),
        unused=("tandem/s/added/2", [one]),
        others=("tandem/t", [one, one]),
    )
    bundles = WorkerBundles([CORE], OWNER, [Place("main", 1), Place("mine", 0)])
    assert set(groups.groups) == {"main", "mine", "others"}
    assert bundles.bundle(0, *CORE).place == Place("main", 0)
    added = bundles.at(Place("mine", 0), *CORE)
    bundles.give_back(added)
    assert set(groups.groups) == {"main", "others"}
    bundles.give_back(bundles.at(Place("main", 1), *CORE))
    assert bundles.another(*CORE).place == Place("main", 1), "it was given back, not removed"
    bundles.remove()
    assert set(groups.groups) == {"others"}


def test_only_what_claimed_workers_do_not_have_is_asked_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group for all workers, beside that of the claimed ones, would find no room and wait for ever."""
    groups = Groups(monkeypatch, old=("tandem/s", [{"CPU": 1.0}, {"CPU": 1.0}, {"CPU": 1.0}]))
    bundles = WorkerBundles([CORE] * 3, OWNER, [Place("old", 0), Place("old", 1)])
    assert [resources for name, resources in groups.groups.values() if name != "tandem/s"] == [[{"CPU": 1.0}] * 2]
    places = [bundles.bundle(number, *CORE).place for number in range(3)]
    assert sorted(place.group == "old" for place in places) == [False, False, True]
    assert len(set(places)) == 3


def test_fewer_workers_than_were_claimed_ask_ray_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Groups(monkeypatch, old=("tandem/s", [{"CPU": 1.0}] * 3))
    bundles = WorkerBundles([], OWNER, [Place("old", 0), Place("old", 2)])
    assert set(groups.groups) == {"old"}
    assert bundles.another(*CORE).place == Place("old", 1)


def test_a_group_of_added_workers_is_kept_until_the_last_of_them_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would end those that still run in it."""
    groups = Groups(monkeypatch, old=("tandem/s/added/1", [{"CPU": 1.0}, {"CPU": 1.0}]))
    bundles = WorkerBundles([CORE], OWNER, [Place("old", 0), Place("old", 1)])
    first, second = (bundles.at(Place("old", number), *CORE) for number in range(2))
    assert bundles.bundle(0, *CORE).place.group != "old"
    bundles.give_back(first)
    assert "old" in groups.groups
    assert bundles.another(*CORE).place == Place("old", 0), "one that was given back"
    bundles.give_back(first)
    bundles.give_back(second)
    assert "old" not in groups.groups
    assert bundles.another(*CORE).place.group != "old"


def test_one_machine_has_room_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself calls cores free until the workers that were asked for have them."""
    Groups(monkeypatch)
    bundles, room = WorkerBundles([CORE, CORE]), {"CPU": 3.0}
    places = [bundles.bundle(number, *CORE) for number in range(2)]
    assert bundles.has_room_for(*CORE, room)
    third = bundles.another(*CORE)
    assert not bundles.has_room_for(*CORE, room)
    bundles.give_back(places[0])
    assert bundles.has_room_for(*CORE, room), "in the place of the one that left"
    assert not bundles.has_room_for(2.0, 0.0, room)
    bundles.give_back(third)
    assert not bundles.has_room_for(2.0, 0.0, room), "the places of the start stay reserved"
    assert not bundles.has_room_for(1.0, 1.0, room)
