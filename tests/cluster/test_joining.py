"""Workers that join a running cluster, and those that cannot. Ray is a fake."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.protocol.errors import AddRefused
from tandem.protocol.messages import Role
from tests.support.supervised import supervised
from tests.support.waiting import eventually


async def test_a_worker_joins_in_the_place_of_one_that_left_or_in_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=2) as cluster:
        bundles: Any = cluster.supervisor.bundles
        await cluster.supervisor.drain("decode-1", 60, restart=False)
        await eventually(lambda: len(bundles.free) == 1)
        record = await cluster.supervisor.add_worker(Role.DECODE)
        assert record["worker"] == "decode-1"
        await eventually(lambda: "serving_after_s" in record)
        assert (bundles.free, bundles.num_asked_for) == ([], 0)
        second = await cluster.supervisor.add_worker(Role.PREFILL)
        await eventually(lambda: "serving_after_s" in second)
        assert bundles.num_asked_for == 1
        assert cluster.roles() == {
            "prefill-0": Role.PREFILL,
            "prefill-1": Role.PREFILL,
            "decode-0": Role.DECODE,
            "decode-1": Role.DECODE,
        }
        assert cluster.supervisor.autoscaler_status["arrivals"] == [record, second]
        cluster.die("prefill-1")  # it is looked after like the others
        await cluster.is_served("prefill-1", cluster.ray.latest("prefill-1").card.address.epoch)


async def test_one_that_cannot_start_is_withdrawn_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1) as cluster:
        bundles: Any = cluster.supervisor.bundles
        cluster.ray.num_bad_starts = 1
        record = await cluster.supervisor.add_worker(Role.DECODE)
        await eventually(lambda: "withdrawn" in record and len(bundles.free) == 1)
        assert record["withdrawn"] == "no such model"
        assert not cluster.supervisor.failure.done()
        assert set(cluster.supervisor.members) == {"prefill-0", "decode-0"}
        again = await cluster.supervisor.add_worker(Role.DECODE)
        assert again["worker"] == "decode-2", "a name is not used twice: the first one's record is still shown"
        await eventually(lambda: "serving_after_s" in again)


async def test_one_that_ray_finds_no_room_for_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1) as cluster:
        monkeypatch.setattr("tandem.cluster.member._PLACE_TIMEOUT_S", 0.05)
        cluster.ray.placed.clear()
        record = await cluster.supervisor.add_worker(Role.DECODE)
        await eventually(lambda: "withdrawn" in record)
        assert str(record["withdrawn"]).startswith("Ray found no")
        assert cluster.roles() == {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


async def test_what_cannot_be_added_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1) as cluster:
        bundles: Any = cluster.supervisor.bundles
        bundles.has_room = False
        with pytest.raises(AddRefused, match=r"no room for another worker .* drain one first"):
            await cluster.supervisor.add_worker(Role.DECODE)
        bundles.has_room = True
        with pytest.raises(AddRefused, match="no place for a colocated worker"):
            await cluster.supervisor.add_worker(Role.COLOCATED)
        assert len(cluster.ray.actors) == 2


async def test_a_worker_is_added_while_all_others_are_being_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1) as cluster:
        cluster.ray.stops.clear()
        for worker in ("prefill-0", "decode-0"):
            await cluster.supervisor.drain(worker, 60, restart=True)
        record = await cluster.supervisor.add_worker(Role.DECODE)
        await eventually(lambda: "serving_after_s" in record)
        cluster.ray.stops.set()
