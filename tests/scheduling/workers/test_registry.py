from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.messages import Role, StepStats, WorkerLoad, WorkerState
from tandem.scheduling.cost_model import CPU_PRIOR, CostModel, StepModel
from tandem.scheduling.workers.bookings import Booking
from tandem.scheduling.workers.load import RequestLoad
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import RegisteredWorker, can_decode, can_prefill, queue_s
from tests.support.builders import add_ready, make_card, make_registry


def get(registry: Registry, worker_id: str) -> RegisteredWorker:
    worker = registry.get(worker_id)
    assert worker is not None
    return worker


def reserve(registry: Registry, prefill: str, decode: str, *, new: int = 100, context: int = 0) -> Booking:
    return registry.reserve(RequestLoad(prefill, decode, new, context, new + context + 50))


def booked(worker: RegisteredWorker) -> tuple[float, ...]:
    prefill = (worker.queued_prompt_tokens, worker.queued_attention, worker.computed_prompt_tokens)
    return (*prefill, worker.num_booked_seqs, worker.booked_kv_tokens)


def test_tells_listeners_each_change_and_forgets_the_dead() -> None:
    registry = Registry()
    changes: list[tuple[WorkerState, str]] = []
    registry.listen(lambda change: changes.append((change.worker.state, change.reason)))
    add_ready(registry, make_card("w0"))
    registry.set_state("w0", WorkerState.DRAINING, "scale down")
    registry.set_state("w0", WorkerState.DEAD, "silent")
    registry.set_state("w0", WorkerState.DEAD, "silent")
    states = [state for state, _ in changes]
    assert states == [WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING, WorkerState.DEAD]
    assert changes[-1] == (WorkerState.DEAD, "silent")
    assert len(registry) == 0
    assert registry.get("w0") is None


def test_refuses_impossible_transitions() -> None:
    registry = Registry()
    registry.add(make_card("w0"), now=0.0)
    with pytest.raises(AssertionError, match="cannot go from starting to draining"):
        registry.set_state("w0", WorkerState.DRAINING, "test")


def test_the_role_decides_what_a_ready_worker_gets() -> None:
    registry = make_registry("w0")
    worker = get(registry, "w0")
    assert (can_prefill(worker), can_decode(worker)) == (False, True)
    registry.set_role("w0", Role.PREFILL)
    assert (can_prefill(worker), can_decode(worker)) == (True, False)
    registry.set_role("w0", Role.COLOCATED)
    assert (can_prefill(worker), can_decode(worker)) == (False, True)
    registry.set_state("w0", WorkerState.DRAINING, "test")
    assert not can_decode(worker)


def test_a_booking_is_on_both_workers_until_released() -> None:
    registry = make_registry("p", "d")
    prefill, decode = get(registry, "p"), get(registry, "d")
    booking = reserve(registry, "p", "d", new=100, context=60)
    assert (decode.num_awaited_seqs, decode.awaited_kv_tokens, decode.num_incoming_seqs) == (1, 210, 1)
    assert booked(prefill) == (100, 100 * 110, 0, 0, 0)
    assert booked(decode) == (0, 0, 0, 1, 210)
    assert registry.queued_prompt_tokens == 100
    booking.prefill_done()
    assert (decode.num_awaited_seqs, decode.awaited_kv_tokens) == (0, 0)
    assert booked(prefill) == (0, 0, 0, 0, 0)
    booking.release()
    booking.release()
    assert booked(decode) == (0, 0, 0, 0, 0)
    assert registry.num_bookings == 0
    assert (prefill.num_placed_tokens, decode.num_placed_tokens) == (100, 210)


def test_steps_shorten_the_queue_before_the_first_token_comes() -> None:
    registry = make_registry("w0")
    worker = get(registry, "w0")
    model = StepModel(CPU_PRIOR)
    first, second = reserve(registry, "w0", "w0", new=1000), reserve(registry, "w0", "w0", new=200)
    full_s = queue_s(worker, model)
    registry.note_step("w0", StepStats(duration_s=0.1, num_prefill_tokens=512))
    assert worker.uncomputed_tokens == 688
    assert 0 < queue_s(worker, model) < full_s
    registry.note_step("w0", StepStats(duration_s=0.1, num_prefill_tokens=512))
    first.prefill_done()
    assert worker.uncomputed_tokens == 200 - 24
    registry.note_step("w0", StepStats(duration_s=0.1, num_prefill_tokens=10_000))
    assert worker.uncomputed_tokens == 0
    second.release()
    first.release()
    assert booked(worker) == (0, 0, 0, 0, 0)
    assert queue_s(worker, model) == 0


def test_a_booking_outlives_its_worker_harmlessly() -> None:
    registry = make_registry("p", "d")
    booking = reserve(registry, "p", "d")
    registry.set_state("p", WorkerState.DEAD, "test")
    registry.note_load("p", WorkerLoad(num_waiting=3), now=1.0)
    registry.note_step("p", StepStats(duration_s=0.1))
    booking.release()
    assert (registry.num_bookings, registry.queued_prompt_tokens) == (0, 0)


def test_the_table_follows_bookings_and_knows_a_restarted_worker() -> None:
    registry = make_registry("p", "d")
    booking = reserve(registry, "p", "d", new=1000)
    assert registry.table.uncomputed_tokens.tolist() == [1000, 0]
    assert registry.table.num_booked_seqs.tolist() == [0, 1]
    registry.note_step("p", StepStats(duration_s=0.1, num_prefill_tokens=512))
    costs = CostModel()
    assert registry.table.uncomputed_tokens.tolist() == [488, 0]
    assert registry.table.pace(costs).wait_s.tolist() == [queue_s(worker, costs.steps("cpu-1")) for worker in registry]
    registry.set_state("d", WorkerState.DEAD, "killed")
    add_ready(registry, make_card("d", epoch=2))
    reserve(registry, "d", "d", new=7)
    assert registry.table.rows == {"p": 0, "d": 1}
    booking.release()
    assert registry.table.num_booked_seqs.tolist() == [0, 1], "the booking was on its predecessor"
    assert registry.table.uncomputed_tokens.tolist() == [0, 7]


@given(
    actions=st.lists(
        st.tuples(
            st.sampled_from(["reserve", "prefill_done", "release", "step"]),
            st.integers(0, 5),
            st.sampled_from(["a", "b", "c"]),
            st.sampled_from(["a", "b", "c"]),
            st.integers(1, 5000),
        ),
        max_size=60,
    )
)
def test_bookings_always_return_to_zero(actions: list[tuple[str, int, str, str, int]]) -> None:
    registry = make_registry("a", "b", "c")
    bookings: list[Booking] = []
    for action, position, prefill, decode, num_tokens in actions:
        if action == "reserve":
            bookings.append(reserve(registry, prefill, decode, new=num_tokens, context=position * 16))
        elif action == "step":
            registry.note_step(prefill, StepStats(duration_s=0.1, num_prefill_tokens=num_tokens))
        elif bookings and action == "prefill_done":
            bookings[position % len(bookings)].prefill_done()
        elif bookings:
            bookings[position % len(bookings)].release()
        assert all(worker.uncomputed_tokens >= 0 for worker in registry)
    for booking in bookings:
        booking.release()
    assert registry.num_bookings == 0
    assert all(booked(worker) == (0, 0, 0, 0, 0) for worker in registry)
    assert all(
        worker.num_awaited_seqs == worker.awaited_kv_tokens == worker.num_incoming_seqs == 0 for worker in registry
    )


def test_a_worker_is_a_fallback_only_while_it_drains_and_says_so() -> None:
    registry = make_registry("w0")
    worker, reasons = get(registry, "w0"), []
    registry.listen(lambda change: reasons.append(change.reason))
    with pytest.raises(AssertionError, match="w0 is ready: no fallback"):
        registry.set_state("w0", WorkerState.READY, "test", is_fallback=True)
    registry.set_state("w0", WorkerState.DRAINING, "it leaves", is_fallback=True)
    assert (worker.is_fallback, can_decode(worker), registry.table.has_fallback) == (True, False, True)
    registry.set_state("w0", WorkerState.DRAINING, "its process ends")
    registry.set_state("w0", WorkerState.DRAINING, "its process ends")
    assert (worker.is_fallback, registry.table.has_fallback) == (False, False)
    registry.set_state("w0", WorkerState.DRAINING, "it leaves after all", is_fallback=True)
    registry.set_state("w0", WorkerState.READY, "it stays")
    assert not worker.is_fallback
    assert reasons == ["it leaves", "its process ends", "it leaves after all", "it stays"]
