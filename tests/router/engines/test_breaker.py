from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.router.engines.breaker import Breaker, BreakerState


def make_breaker(*, max_failures: int = 3, open_s: float = 1.0, max_open_s: float = 4.0) -> Breaker:
    return Breaker(max_failures=max_failures, open_s=open_s, max_open_s=max_open_s)


def fail(breaker: Breaker, now: float, *, is_absent: bool = False) -> None:
    breaker.failed(now, trial=breaker.begin(now), is_absent=is_absent)


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


def test_an_open_breaker_may_be_bypassed_if_the_engine_is_reachable() -> None:
    breaker = make_breaker(max_failures=1)
    fail(breaker, 0.0)
    assert breaker.may_be_bypassed
    assert breaker.begin(0.5) == 0
    breaker.failed(0.5, trial=0)
    assert breaker.retry_in_s(0.5) == 0.5  # prolongs nothing
    assert breaker.begin(1.0) > 0
    assert breaker.begin(1.0) == 0  # the trial runs
    breaker.failed(1.0, trial=0, is_absent=True)
    assert not breaker.may_be_bypassed
    breaker.succeeded()
    assert breaker.may_be_bypassed


def test_a_stall_opens_at_once_and_nothing_goes_by_until_a_success() -> None:
    breaker = make_breaker()
    breaker.stalled(0.0)
    assert breaker.state(0.0) is BreakerState.OPEN
    assert not breaker.may_be_bypassed
    trial = breaker.begin(1.0)
    breaker.stalled(2.0)  # of the trial too: the time doubles
    breaker.failed(2.0, trial=trial)
    assert breaker.retry_in_s(2.0) == 2.0
    assert not breaker.may_be_bypassed
    assert breaker.has_stalled
    breaker.succeeded()
    assert breaker.state(2.0) is BreakerState.CLOSED
    assert breaker.may_be_bypassed
    assert not breaker.has_stalled


def test_failed_trials_double_the_time_and_success_resets_it() -> None:
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
    breaker.failed(0.9, trial=old)
    assert breaker.retry_in_s(0.9) == 1.0 - 0.9
    trial = breaker.begin(1.0)
    breaker.failed(1.1, trial=old)
    assert not breaker.allows(1.1)  # the trial still runs
    breaker.abandoned(trial=old)
    assert not breaker.allows(1.1)
    breaker.abandoned(trial=trial)
    assert breaker.allows(1.1)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["wait", "begin", "begin", "begin", "succeed", "fail", "fail", "absent", "abandon"]),
        st.integers(0, 128).map(lambda n: n / 64),  # seconds that add up without rounding
        st.integers(0, 100),
    ),
    min_size=20,
    max_size=80,
)


@given(STEPS)
def test_a_breaker_has_one_trial_and_is_open_no_longer_than_the_limit(steps: list[tuple[str, float, int]]) -> None:
    breaker = make_breaker(max_failures=2, open_s=0.5, max_open_s=3.0)
    now, current = 0.0, 0
    running: list[int] = []  # trial of each request, 0 = none
    for action, wait_s, which in steps:
        if action == "wait":
            now += wait_s
        elif action == "begin":
            if breaker.allows(now):
                trial = breaker.begin(now)
                running.append(trial)
                current = trial or current
        elif running:
            trial = running.pop(which % len(running))
            num_opened = breaker.num_opened
            if action == "succeed":
                breaker.succeeded()
                assert breaker.state(now) is BreakerState.CLOSED
            elif action == "abandon":
                breaker.abandoned(trial=trial)
                assert breaker.num_opened == num_opened
            else:
                was_closed = breaker.state(now) is BreakerState.CLOSED
                breaker.failed(now, trial=trial, is_absent=action == "absent")
                if (trial and trial == current) or (was_closed and action == "absent"):
                    assert breaker.state(now) is BreakerState.OPEN
                elif not was_closed:
                    assert breaker.num_opened == num_opened
            current = 0 if action == "succeed" or trial == current else current
        assert breaker.retry_in_s(now) <= 3.0
        assert not (current and breaker.allows(now))
        assert breaker.allows(now) == (breaker.state(now) is not BreakerState.OPEN and not current)
    # Whatever happened: once all requests have ended, one may go out after the longest time.
    for trial in running:
        breaker.abandoned(trial=trial)
    assert breaker.allows(now + 3.0)
