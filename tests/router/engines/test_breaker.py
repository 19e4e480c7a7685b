from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.engines.breaker import Breaker, BreakerState


def make_breaker(*, max_failures: int = 3, open_s: float = 1.0, max_open_s: float = 4.0) -> Breaker:
    return Breaker(max_failures=max_failures, open_s=open_s, max_open_s=max_open_s)


def fail(breaker: Breaker, now: float, *, is_absent: bool = False) -> None:
    breaker.failed(now, is_trial=breaker.begin(now), is_absent=is_absent)


def test_opens_after_failures_in_a_row_and_lets_one_trial_through() -> None:
    breaker = make_breaker()
    for now in (0.0, 0.1):
        fail(breaker, now)
        assert breaker.allows(now)
    fail(breaker, 0.2)
    assert breaker.state(0.2) is BreakerState.OPEN
    assert not breaker.allows(1.19)
    assert breaker.state(1.2) is BreakerState.HALF_OPEN
    assert breaker.begin(1.2)
    assert not breaker.allows(1.2)


def test_a_success_between_failures_keeps_it_closed() -> None:
    breaker = make_breaker()
    for now in range(10):
        fail(breaker, now)
        breaker.begin(now)
        breaker.succeeded()
    assert breaker.state(10) is BreakerState.CLOSED


def test_nobody_there_opens_at_once() -> None:
    breaker = make_breaker()
    fail(breaker, 0.0, is_absent=True)
    assert breaker.state(0.0) is BreakerState.OPEN


def test_each_failed_trial_doubles_the_time_up_to_the_limit_and_success_resets_it() -> None:
    breaker = make_breaker(max_failures=1)
    now, waits = 0.0, []
    for _ in range(5):
        fail(breaker, now)
        waits.append(breaker.retry_in_s(now))
        now += waits[-1]
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]
    breaker.begin(now)
    breaker.succeeded()
    assert breaker.state(now) is BreakerState.CLOSED
    fail(breaker, now)
    assert breaker.retry_in_s(now) == 1.0


def test_late_failures_of_old_requests_prolong_nothing() -> None:
    breaker = make_breaker(max_failures=1)
    old = breaker.begin(0.0)
    fail(breaker, 0.0)
    breaker.failed(0.9, is_trial=old)
    assert breaker.retry_in_s(0.9) == 1.0 - 0.9
    trial = breaker.begin(1.0)
    breaker.failed(1.1, is_trial=old)
    assert not breaker.allows(1.1)  # the trial still runs
    breaker.abandoned(is_trial=old)
    assert not breaker.allows(1.1)
    breaker.abandoned(is_trial=trial)
    assert breaker.allows(1.1)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_never_more_than_one_trial_and_never_shut_for_longer_than_the_limit(data: st.DataObject) -> None:
    breaker = make_breaker(max_failures=2, open_s=0.5, max_open_s=3.0)
    now = 0.0
    running: list[bool] = []  # is_trial of each
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["wait", "begin", "succeed", "fail", "absent", "abandon"]))
        if action == "wait":
            now += data.draw(st.floats(0.0, 2.0))
        elif action == "begin":
            if breaker.allows(now):
                running.append(breaker.begin(now))
        elif running:
            is_trial = running.pop(data.draw(st.integers(0, len(running) - 1)))
            if action == "succeed":
                breaker.succeeded()
                assert breaker.state(now) is BreakerState.CLOSED
            elif action == "abandon":
                breaker.abandoned(is_trial=is_trial)
            else:
                breaker.failed(now, is_trial=is_trial, is_absent=action == "absent")
                if action == "absent" or is_trial:
                    assert breaker.state(now) is not BreakerState.CLOSED or not is_trial
        assert 0.0 <= breaker.retry_in_s(now) <= 3.0
        if breaker.state(now) is BreakerState.OPEN:
            assert not breaker.allows(now)
        if breaker.state(now) is BreakerState.CLOSED:
            assert breaker.allows(now)
    # Whatever happened: once all requests have ended, one may go out after the longest time.
    for is_trial in running:
        breaker.abandoned(is_trial=is_trial)
    assert breaker.allows(now + 3.0)
