"""Why KV left: totals by reason, the latest actions with their ages, and never more than a heartbeat may hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tandem.engine.block_pool import BlockPool
from tandem.engine.scheduler import Scheduler
from tandem.protocol.messages import MAX_ACTIONS, Heartbeat, TierLoad, WorkerLoad, decode_message, encode_message
from tandem.worker.kv.action_log import ActionLog


@pytest.fixture
def engine() -> Any:
    pool = BlockPool(8)
    scheduler = Scheduler(pool, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
    return SimpleNamespace(pool=pool, scheduler=scheduler)


def preempt(engine: Any, name: str, reason: str = "no free block") -> None:
    sequence = SimpleNamespace(request_id=name, blocks=[1, 2], num_computed_tokens=7, status=None)
    engine.scheduler.blocks = SimpleNamespace(take_back=lambda _: None)
    engine.scheduler.preempt(sequence, reason)


def host(num_evictions: int) -> list[TierLoad]:
    return [TierLoad(name="host", num_evictions=num_evictions)]


def test_each_action_is_told_once_with_its_age(engine: Any) -> None:
    log = ActionLog(engine)
    assert log.look(host(0), 10.0).evictions == []
    preempt(engine, "a")
    engine.pool.num_evicted["unused"] += 3
    log.look(host(2), 11.0)
    preempt(engine, "b", "room for another tenant")
    actions = log.look(host(2), 13.5)
    assert [(one.request_id, one.reason, one.age_s) for one in actions.preemptions] == [
        ("b", "room for another tenant", 0.0),
        ("a", "no free block", 2.5),
    ]
    assert (actions.preemptions[0].num_blocks, actions.preemptions[0].num_tokens) == (2, 7)
    assert [(one.place, one.reason, one.num_blocks, one.age_s) for one in actions.evictions] == [
        ("host", "full", 2, 2.5),
        ("pool", "unused", 3, 2.5),
    ]
    assert actions.num_preemptions == {"no free block": 1, "room for another tenant": 1}
    assert actions.num_evicted_blocks == {"pool": {"unused": 3, "pinned": 0}, "host": {"full": 2}}


@pytest.mark.parametrize("num_at_once", [1, 7, 100])
def test_under_pressure_the_latest_are_kept_and_fit_a_heartbeat(engine: Any, num_at_once: int) -> None:
    log, names = ActionLog(engine), [f"r{number}" for number in range(200)]
    for number in range(0, 200, num_at_once):
        for name in names[number : number + num_at_once]:
            preempt(engine, name)
        engine.pool.num_evicted["pinned"] += 1
        actions = log.look(host(number), float(number))
    assert [one.request_id for one in actions.preemptions] == names[: -MAX_ACTIONS - 1 : -1]
    assert len(actions.evictions) <= MAX_ACTIONS
    assert sum(actions.num_preemptions.values()) == 200
    beat = Heartbeat(worker_id="w", epoch=1, progress_age_s=0.0, load=WorkerLoad(), actions=actions)
    assert decode_message(encode_message(beat)) == beat
    more = msgspec.structs.replace(actions, preemptions=actions.preemptions * 2)
    with pytest.raises(msgspec.ValidationError):
        decode_message(encode_message(msgspec.structs.replace(beat, actions=more)))


def test_counts_of_a_tier_that_begins_again_are_no_eviction(engine: Any) -> None:
    log = ActionLog(engine)
    log.look(host(50), 1.0)
    assert len(log.look(host(0), 2.0).evictions) == 1
