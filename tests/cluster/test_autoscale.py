"""The autoscaler's moves on the workers of a cluster. Ray, its nodes and the decisions are fakes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tandem.cluster import autoscale
from tandem.cluster.autoscale import policy_of
from tandem.protocol.config import ClusterConfig, EngineConfig
from tandem.protocol.messages import Role
from tandem.scheduling.autoscaling.in_flight import AutoscalerState
from tandem.scheduling.autoscaling.moves import Move, Reason, ScalingDecision
from tandem.scheduling.autoscaling.observation import Observation
from tandem.scheduling.autoscaling.policy import AutoscalerPolicy
from tests.support.supervised import supervised
from tests.support.waiting import eventually

TICKS: dict[str, Any] = {"autoscale": True, "autoscale_interval_s": 0.002}
BOUNDS: dict[str, Any] = TICKS | {"min_workers": 2, "max_workers": 4}
ADD = Move("add", Role.DECODE, num_added=1)
CORE = {"CPU": 1.0}


class Script:
    """Decides what the test says, and notes what it was shown."""

    def __init__(self) -> None:
        self.next: ScalingDecision | None = None
        self.usual = ScalingDecision(Reason.ON_TARGET, "nothing to do")
        self.seen: list[Observation] = []
        self.policy: AutoscalerPolicy | None = None

    def decide(
        self, observation: Observation, now: float, state: AutoscalerState, policy: AutoscalerPolicy
    ) -> tuple[ScalingDecision, AutoscalerState]:
        self.seen.append(observation)
        self.policy = policy
        decision, self.next = self.next or self.usual, None
        return decision, state

    def move(self, move: Move) -> None:
        self.next = ScalingDecision(Reason(move.kind), "why", move=move)

    @property
    def setback(self) -> str:
        return self.seen[-1].fleet.setback if self.seen else ""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(autoscale, "decide", script.decide)
    return script


async def test_workers_are_added_and_removed_as_decided(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, **BOUNDS) as cluster:
        script.move(ADD)
        await eventually(lambda: cluster.roles().get("decode-1") is Role.DECODE)
        (arrival,) = cluster.supervisor.joins.latest
        assert arrival["reason"] == "add 1 decode worker: why"
        await eventually(lambda: not script.seen[-1].fleet.coming)
        script.move(Move("remove", Role.DECODE, ("decode-0",)))
        await eventually(lambda: "decode-0" not in cluster.supervisor.members)
        (departure,) = cluster.supervisor.drains.latest
        assert (departure["reason"], departure["finished"]) == ("remove decode-0: why", True)
        status = cluster.supervisor.autoscaler_status
        assert (status["arrivals"], status["departures"]) == ([arrival], [departure])
        assert script.setback == ""


async def test_the_last_worker_of_a_role_stays_even_if_another_covers_it(
    monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    async with supervised(monkeypatch, num_prefill=2, num_decode=2, **BOUNDS) as cluster:
        await cluster.supervisor.drain("decode-1", 60, restart=False)  # by hand, in the same moment
        script.move(Move("remove", Role.DECODE, ("decode-0",)))
        await eventually(lambda: script.setback == "decode-0 is now the last decode worker.")
        script.move(Move("remove", Role.PREFILL, ("prefill-1",)))
        await eventually(lambda: "prefill-1" not in cluster.supervisor.members)
        script.move(Move("remove", Role.PREFILL, ("prefill-0",)))
        await eventually(lambda: script.setback == "prefill-0 is now the last prefill worker.")
        script.move(Move("remove", Role.PREFILL, ("prefill-1",)))
        await eventually(lambda: script.setback.startswith("There is no worker 'prefill-1'"))
        assert cluster.roles() == {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}


async def test_a_machine_without_room_is_a_setback_at_once(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, **BOUNDS) as cluster:
        bundles: Any = cluster.supervisor.bundles
        bundles.has_room = False
        script.move(ADD)
        await eventually(lambda: script.setback.startswith("This machine has no room for another worker"))
        script.next = ScalingDecision(Reason.WITHDRAWN, "no room", withdrawn=ADD)
        await eventually(lambda: script.setback == "")


async def test_a_failed_start_is_a_setback_with_its_reason(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, **BOUNDS) as cluster:
        cluster.ray.num_bad_starts = 1
        script.move(ADD)
        await eventually(lambda: script.setback == "decode-1 was not added: no such model")


async def test_nodes_are_asked_for_until_a_worker_has_its_end(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    requests: list[object] = []
    monkeypatch.setattr("tandem.cluster.node_requests.request_resources", lambda *, bundles: requests.append(bundles))
    config = BOUNDS | {"ray_address": "auto", "orphan_timeout_s": 0.0, "num_cpus_per_worker": 1.0}
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, **config) as cluster:
        cluster.ray.placed.clear()
        script.move(ADD)
        await eventually(lambda: requests == [[], [CORE] * 3])
        await eventually(lambda: script.seen[-1].fleet.num_unplaced == 1)
        assert script.seen[-1].fleet.coming == {"decode-1"}
        assert script.seen[-1].fleet.spared == {"prefill-0", "decode-0"}
        script.next = ScalingDecision(Reason.WITHDRAWN, "no room by its deadline", withdrawn=ADD)
        await eventually(lambda: requests == [[], [CORE] * 3, []])
        (arrival,) = cluster.supervisor.joins.latest
        assert arrival["withdrawn"] == "a move was given up: no room by its deadline"
        assert set(cluster.supervisor.members) == {"prefill-0", "decode-0"}
        await eventually(lambda: (script.setback, script.seen[-1].fleet.num_unplaced) == ("", 0))
        script.move(ADD)
        await eventually(lambda: len(requests) == 4)
        cluster.ray.loaded.clear()
        cluster.ray.placed.set()
        await eventually(lambda: requests == [[], [CORE] * 3, [], [CORE] * 3, []])
        await eventually(lambda: script.seen[-1].fleet.coming == {"decode-2"})  # it loads its model
        cluster.ray.loaded.set()
        await eventually(lambda: "decode-2" in cluster.roles())
        assert not cluster.supervisor.failure.done()


async def test_one_that_loads_when_it_is_withdrawn_goes_for_good(
    monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, **BOUNDS) as cluster:
        cluster.ray.loaded.clear()
        script.move(ADD)
        await eventually(lambda: "decode-1" in cluster.supervisor.members)
        await eventually(lambda: cluster.supervisor.members["decode-1"].process is not None)
        script.next = ScalingDecision(Reason.WITHDRAWN, "late", withdrawn=ADD)
        await eventually(lambda: "decode-1" not in cluster.supervisor.members)
        cluster.ray.loaded.set()
        assert cluster.roles() == {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
        (arrival,) = cluster.supervisor.joins.latest
        assert arrival["withdrawn"] == "a move was given up: late"


async def test_a_fixed_role_is_reported_and_the_other_flips(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=3, **TICKS) as cluster:
        cluster.supervisor.members["decode-1"].fixed_role = "its server cannot"
        script.move(Move("flip", Role.PREFILL, ("decode-1", "decode-2")))
        await eventually(lambda: cluster.roles()["decode-2"] is Role.PREFILL)
        (flip,) = cluster.supervisor.flips.latest
        assert (flip["worker"], flip["reason"]) == ("decode-2", "flip decode-1, decode-2 to prefill: why")
        script.usual = ScalingDecision(Reason.FLIP, "why", move=Move("flip", Role.PREFILL, ("decode-1",)))
        told = "flip decode-1 to prefill: why, but its server cannot"
        await eventually(lambda: cluster.supervisor.autoscaler_status.get("reason") == told)
        assert len(cluster.supervisor.flips.latest) == 1


async def test_the_next_start_is_expected_as_fast_as_the_last(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    async with supervised(monkeypatch, num_prefill=1, num_decode=1, **TICKS) as cluster:
        prefill, decode = cluster.supervisor.members.values()
        prefill.up_since, prefill.start_s = math.inf, 0.0  # taken over from an earlier server
        decode.start_s = 200.0
        await eventually(lambda: script.policy is not None and script.policy.start_s == 200.0)
        assert script.policy is not None
        assert (script.policy.deadline_s("add"), script.policy.deadline_s("remove")) == (600.0, 300.0)
        decode.start_s = 0.0
        await eventually(lambda: script.policy is not None and script.policy.start_s == AutoscalerPolicy().start_s)


@pytest.mark.parametrize(
    ("bounds", "acts", "least", "most"),
    [
        ({}, {"flip"}, 2, 2**31),
        ({"max_workers": 4}, {"flip", "add"}, 2, 4),
        ({"min_workers": 2}, {"flip", "remove"}, 2, 2**31),
        ({"min_workers": 3, "max_workers": 8}, {"flip", "add", "remove"}, 3, 8),
    ],
)
def test_it_does_what_it_has_a_bound_for(bounds: dict[str, int], acts: set[str], least: int, most: int) -> None:
    config = ClusterConfig(engine=EngineConfig(model="m"), num_prefill=2, num_decode=2, **bounds)
    policy = policy_of(config)
    assert (policy.acts, policy.min_workers, policy.max_workers) == (acts, least, most)
