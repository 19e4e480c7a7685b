"""Leases and outbox together, under dropped, delayed, repeated and reordered messages and the death of either side."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.handoff_world import World, walk


class Exploration(RuleBasedStateMachine):
    """Lets hypothesis choose every step and every fault, and shrink failures."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.data = data
        self.world = World(lambda n: self.data.draw(st.integers(0, n - 1)))

    @rule(
        data=st.data(),
        step=st.sampled_from(
            [
                World.new_request,
                World.control_message,
                World.compute,
                World.submit,
                World.land,
                World.settle,
                World.heartbeat,
                World.time_passes,
                World.expire,
                World.heal,
                World.cancel,
                World.collect,
                World.give_up_sender,
                World.end_zombie,
                World.kill_receiver,
            ]
        ),
    )
    def step(self, data: st.DataObject, step: Callable[[World], None]) -> None:
        self.data = data
        step(self.world)

    @invariant()
    def nothing_is_broken(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.wind_down()


TestExploration = Exploration.TestCase
TestExploration.settings = settings(suppress_health_check=list(HealthCheck))


def test_random_walks_see_success_and_failure_and_leave_nothing_behind() -> None:
    num_received = num_released = 0
    for seed in range(40):
        print(f"seed {seed}")
        world = walk(seed, num_steps=800)
        num_received += world.num_received
        num_released += world.num_released
        world.wind_down()
    assert num_received > 100
    assert num_released > 100
