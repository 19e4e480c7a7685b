from __future__ import annotations

from tandem.protocol.messages import Role, StepOutput, StepStats, WorkerLoad
from tandem.router.workers.load_recorder import LEARN_INTERVAL_S, LoadRecorder
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.workers.registry import Registry
from tests.support.builders import add_ready, make_card


def step(num_running: int) -> StepOutput:
    return StepOutput(
        worker_id="d",
        epoch=1,
        deltas=[],
        stats=StepStats(duration_s=0.02, num_decode_seqs=1, num_decode_kv_tokens=10),
        load=WorkerLoad(num_running=num_running),
    )


def test_of_steps_in_quick_succession_one_teaches_the_cost_model() -> None:
    registry, costs = Registry(), CostModel()
    worker = add_ready(registry, make_card("d", Role.DECODE))
    kind, model = worker.card.kind, costs.steps(worker.card.kind)
    recorder = LoadRecorder(registry, costs)
    for num_running in (1, 2, 3):
        recorder.record_step("d", kind, step(num_running), now=100.0)
    assert (worker.load.num_running, model.num_measurements) == (3, 1)
    recorder.record_step("d", kind, step(0), now=100.0 + 2 * LEARN_INTERVAL_S)
    assert model.num_measurements == 2
