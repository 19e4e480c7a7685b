from __future__ import annotations

import time

import pytest
import torch

from tandem.engine.device import CudaStream, HostStream, make_stream
from tandem.engine.engine import Engine
from tandem.engine.sequence import Phase
from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import add, make_prompt
from tests.support.late_device import LateDevice

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@needs_cuda
def test_a_gpus_mark_is_done_when_the_work_before_it_is() -> None:
    stream = CudaStream(torch.device("cuda"))
    begin = stream.record()
    torch.cuda._sleep(200_000_000)  # cycles
    end = stream.record()
    assert not stream.is_done(end)
    launched = time.perf_counter()
    stream.wait(end)
    assert stream.is_done(end)
    assert stream.seconds_between(begin, end) >= time.perf_counter() - launched


def test_on_a_cpu_everything_is_done_and_the_clock_measures_it() -> None:
    readings = [3.0, 5.5]
    stream = make_stream(torch.device("cpu"), lambda: readings.pop(0))
    assert isinstance(stream, HostStream)
    first, last = stream.record(), stream.record()
    assert stream.is_done(last)
    assert stream.seconds_between(first, last) == 2.5


def finish(engine: Engine) -> None:
    for _ in range(10_000):
        if not engine.has_work:
            return
        engine.step()
        engine.check_integrity()
    raise AssertionError("the engine does not come to an end")


@pytest.mark.cpu_engine("the late device computes on one")
def test_few_steps_are_launched_ahead(build_engine: BuildEngine) -> None:
    engine = build_engine(max_num_batched_tokens=16)
    device = LateDevice(engine, 0)
    device.stream.is_done = lambda mark: False  # type: ignore[method-assign]
    sequence = add(engine, "r", make_prompt(90))
    for _ in range(5):
        assert engine.step() == []
    assert sequence.num_computed_tokens == 32
    assert engine.has_work


@pytest.mark.cpu_engine("the late device computes on one")
def test_a_prompt_that_fails_half_way_ends_alone(build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(max_num_batched_tokens=16)
    LateDevice(engine, 0)
    sequence = add(engine, "r", make_prompt(60), phase=Phase.PREFILL_ONLY)
    engine.step()
    monkeypatch.setattr(engine.scheduler.blocks, "publish", lambda _: 1 / 0)
    failures = []
    while not failures:
        failures += [failure for result in engine.step() for failure in result.failures]
    assert {failure.sequence for failure in failures} == {sequence}
    monkeypatch.undo()
    finish(engine)
    engine.scheduler.blocks.release(sequence)
    engine.check_integrity(idle=True)
