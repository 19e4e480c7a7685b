from __future__ import annotations

from collections.abc import Sequence

import pytest

from tandem.loadtest.traces import TraceRequest
from tandem.protocol.messages import Role, WorkerState
from tandem.scheduling.autoscaling.moves import Move
from tandem.scheduling.autoscaling.policy import AutoscalerPolicy
from tandem.simulator.cluster import Cluster
from tandem.simulator.machine import MACHINES
from tandem.simulator.scaling import DynamoPlanner, LlmdRules, Scaler, ScalingPlan, Scene, TandemScaler, Threshold
from tandem.simulator.simulation import Outcome, simulate

SLO = (10.0, 0.1)


def serve(scaler: Scaler, requests: Sequence[TraceRequest], num_prefill: int = 2, num_decode: int = 2) -> Outcome:
    cluster = Cluster(machine=MACHINES["cpu-135m"], num_prefill=num_prefill, num_decode=num_decode)
    return simulate(requests, cluster, "tandem", scaling=ScalingPlan(scaler=scaler, slo=SLO, start_s=20.0))


def make_requests(per_s: float, until_s: float, num_prompt: int = 1000, num_output: int = 50) -> list[TraceRequest]:
    return [TraceRequest(idx / per_s, num_prompt, num_output, ()) for idx in range(int(per_s * until_s))]


class Script:
    """Moves at given times; notes the workers that it sees."""

    def __init__(self, moves: dict[float, Move]) -> None:
        self.moves, self.seen = moves, list[tuple[float, set[tuple[str, str, str]]]]()

    def decide(self, scene: Scene) -> Sequence[Move]:
        self.seen.append((scene.now, {(one.worker_id, one.role, one.state) for one in scene.registry}))
        move = self.moves.pop(scene.now, None)
        return [move] if move else []


def test_moves_take_effect_and_no_request_is_lost() -> None:
    script = Script(
        {
            10.0: Move("flip", Role.PREFILL, ("d1",)),
            20.0: Move("add", Role.DECODE, num_added=1),
            60.0: Move("remove", Role.PREFILL, ("p0",)),
        }
    )
    requests = make_requests(0.5, 120.0)
    outcome = serve(script, requests)
    assert all(job.end_s is not None for job in outcome.jobs)
    assert len(outcome.jobs) == len(requests)
    seen = dict(script.seen)
    assert ("d1", Role.PREFILL, WorkerState.READY) in seen[15.0]
    assert ("a1", Role.DECODE, WorkerState.STARTING) in seen[25.0]
    assert ("a1", Role.DECODE, WorkerState.READY) in seen[45.0]
    assert {name for name, _, _ in seen[115.0]} == {"p1", "d0", "d1", "a1"}
    late = [job for job in outcome.jobs if job.arrival_s > 60.0]
    assert all("p0" not in (job.prefill_worker_id, job.decode_worker_id) for job in late)
    assert 4 * 118.0 < outcome.worker_s < 5 * 118.0


@pytest.mark.parametrize(
    "scaler",
    [
        TandemScaler(AutoscalerPolicy(max_workers=8, acts=frozenset({"flip", "add", "remove"}), start_s=20.0)),
        Threshold(SLO, 8),
        DynamoPlanner(SLO, 8),
        LlmdRules(SLO, 8),
    ],
    ids=lambda scaler: type(scaler).__name__,
)
def test_every_scaler_grows_under_load_within_its_budget(scaler: Scaler) -> None:
    sizes: list[int] = []

    class Watched:
        def decide(self, scene: Scene) -> Sequence[Move]:
            sizes.append(len(list(scene.registry)))
            return scaler.decide(scene)

    outcome = serve(Watched(), make_requests(4.0, 300.0))
    assert all(job.end_s is not None for job in outcome.jobs)
    assert 4 < max(sizes) <= 8
    assert outcome.num_moves > 0
