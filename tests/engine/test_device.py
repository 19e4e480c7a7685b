from __future__ import annotations

import pytest
import torch

from tandem.engine.device import DeviceQueue
from tandem.engine.engine import Engine
from tandem.engine.sequence import Phase, Sequence
from tests.engine.conftest import BuildEngine
from tests.engine.test_engine import add, drain, generate, make_prompt, output
from tests.support.late_device import LateDevice
from tests.support.scheduler_listener import FakeListener

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@needs_cuda
def test_a_gpu_is_waited_for() -> None:
    queue = DeviceQueue(torch.device("cuda"))
    torch.cuda._sleep(200_000_000)  # cycles
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    assert not done.query()
    queue.wait()
    assert done.query()


def make_late(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """A late device, with checks that no block is published or freed before its content is written."""
    device, pool = LateDevice(engine), engine.pool
    release = pool.release

    def published(sequence: Sequence, first: int, end: int) -> None:
        assert device.is_done, f"{sequence.request_id}: blocks {first}:{end} are not computed yet"

    def check_and_release(blocks: list[int]) -> None:
        assert device.is_done, "blocks are freed that the device still writes"
        release(blocks)

    engine.scheduler.listen(FakeListener(when_published=published))
    monkeypatch.setattr(pool, "release", check_and_release)
    return device


def test_blocks_are_published_and_freed_behind_the_device(
    build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(max_num_batched_tokens=16, num_blocks=20)
    device = make_late(engine, monkeypatch)
    prompts = [make_prompt(60), make_prompt(33, seed=1), make_prompt(47, seed=2)]
    sequences = [add(engine, str(i), prompt) for i, prompt in enumerate(prompts)]
    engine.step()
    assert device.num_late == 1, "a step without a token does not wait for its kernels by itself"
    assert device.is_done
    add(engine, "aborted", make_prompt(90))
    while engine.scheduler.running[-1].request_id != "aborted":
        engine.step()
    engine.abort("aborted")
    drain(engine)
    assert device.num_late >= 3
    engine.check_integrity(idle=True)
    assert [output(sequence) for sequence in sequences] == generate(build_engine(), prompts)


def test_a_prompt_that_fails_half_way_frees_its_blocks_behind_the_device(
    build_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(max_num_batched_tokens=16)
    device = make_late(engine, monkeypatch)
    sequence = add(engine, "r", make_prompt(60), phase=Phase.PREFILL_ONLY)
    engine.step()
    monkeypatch.setattr(engine.scheduler.blocks, "publish_computed", lambda _: 1 / 0)
    result = engine.step()
    assert result is not None
    assert [failure.sequence for failure in result.failures] == [sequence]
    assert device.num_late == 2
    engine.scheduler.blocks.release(sequence)
    engine.check_integrity(idle=True)
