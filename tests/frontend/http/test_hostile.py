"""The hostile inputs against the HTTP edge alone: each is answered, none with a 5xx, and the event loop turns on."""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Iterable

import pytest

from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import FakeBackend, closing
from tests.support.hostile_bodies import Input, large_inputs, small_inputs
from tests.support.waiting import eventually

SEED = 11
ANSWER_TIMEOUT_S = 30.0
MAX_STALL_S = 0.5


class LoopWatch:
    """The longest time that the event loop took for a turn since `restart`.

    By the processor time of this process: a turn delayed by other processes is not our stall.
    """

    def __init__(self) -> None:
        self.num_turns = 0
        self.restart()
        self._task = asyncio.create_task(self._turn())

    async def _turn(self) -> None:
        while True:
            self._began_s = time.process_time()
            await asyncio.sleep(0.001)  # a turn as soon as the loop is free, without keeping it busy
            self.longest_s = max(self.longest_s, time.process_time() - self._began_s)
            self.num_turns += 1

    def restart(self) -> None:
        """Forget all turns, also what the present one has taken until now: to make a large body, for example."""
        self.longest_s = 0.0
        self._began_s = time.process_time()

    def close(self) -> None:
        self._task.cancel()


async def attack(tokenizer: Tokenizer, inputs: Iterable[Input]) -> list[str]:
    """What went wrong."""
    complaints: list[str] = []
    statuses: Counter[int] = Counter()
    async with closing(FakeBackend(tokenizer)) as client:
        watch = LoopWatch()
        for one in inputs:
            watch.restart()
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                headers = {"content-type": "application/json"}
                status = (await client.post(one.path, content=one.body, headers=headers)).status_code
            num_turns = watch.num_turns
            await eventually(lambda num_turns=num_turns: watch.num_turns > num_turns)  # type: ignore[misc]
            statuses[status] += 1
            if status >= 500:
                complaints.append(f"{one.path} {one.name}: {status}")
            if watch.longest_s > MAX_STALL_S:
                complaints.append(f"{one.path} {one.name}: the event loop stood still for {watch.longest_s:.2f} s")
        watch.close()
    assert statuses[400] > len(statuses)
    assert statuses[200]
    return complaints


@pytest.fixture(autouse=True)
def settled_heap() -> None:
    """As in a process that serves: what other tests have made is nothing that the collector looks at."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("every", [pytest.param(1, id="all", marks=pytest.mark.slow), pytest.param(7, id="some")])
def test_every_field_with_every_odd_value_is_answered(tokenizer: Tokenizer, every: int) -> None:
    inputs = list(small_inputs(SEED))
    assert len(inputs) > 5000
    assert asyncio.run(attack(tokenizer, inputs[::every])) == [], f"seed {SEED}"


@pytest.mark.slow
def test_the_largest_bodies_are_answered_and_hold_nothing_up(tokenizer: Tokenizer) -> None:
    assert asyncio.run(attack(tokenizer, large_inputs())) == []
