from __future__ import annotations

import random
from collections.abc import Callable
from typing import TypeVar

import pytest

from tandem.protocol.errors import RateLimitExceeded
from tandem.scheduling.admission.answer_lengths import FIRST_GUESS_TOKENS
from tandem.scheduling.admission.key_limits import FIRST_DURATION_S, KeyLimiter, KeyLimits, KeyUsage

KEY = "k-1"
T = TypeVar("T")
GUESS = int(FIRST_GUESS_TOKENS)


def refusal(limiter: KeyLimiter, limits: KeyLimits, now: float) -> RateLimitExceeded:
    with pytest.raises(RateLimitExceeded) as raised:
        limiter.begin(KEY, limits, now)
    return raised.value


@pytest.mark.parametrize("limit", [1, 7, 60, 1001])
def test_a_minute_of_requests_is_served_at_once_and_the_next_when_told(limit: int) -> None:
    limiter, limits = KeyLimiter(), KeyLimits(requests_per_minute=limit)
    for _ in range(limit):
        limiter.begin(KEY, limits, 5.0)
    refused = refusal(limiter, limits, 5.0)
    assert refused.retry_after_s == pytest.approx(60.0 / limit)
    assert refused.message.startswith(f"The API key k-1 has used up its limit requests_per_minute={limit}; retry in ")
    assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
    assert refusal(limiter, limits, 5.0 + 0.99 * 60.0 / limit).retry_after_s == pytest.approx(0.6 / limit)
    limiter.begin(KEY, limits, 5.0 + refused.retry_after_s)
    refusal(limiter, limits, 5.0 + refused.retry_after_s)
    for _ in range(limit):  # after a pause: one minute's worth, not more
        limiter.begin(KEY, limits, 10_000.0)
    refusal(limiter, limits, 10_000.0)


def test_keys_have_limits_of_their_own() -> None:
    limiter, limits = KeyLimiter(), KeyLimits(requests_per_minute=1)
    limiter.begin("a", limits, 0.0)
    limiter.begin("b", limits, 0.0)
    with pytest.raises(RateLimitExceeded, match="The API key a "):
        limiter.begin("a", limits, 0.0)


def test_requests_at_one_time_are_counted_until_they_end() -> None:
    limiter, limits = KeyLimiter(), KeyLimits(concurrent_requests=2)
    first, second = limiter.begin(KEY, limits, 0.0), limiter.begin(KEY, limits, 0.4)
    refused = refusal(limiter, limits, 0.5)
    assert "concurrent_requests=2" in refused.message
    assert refused.retry_after_s == pytest.approx(FIRST_DURATION_S - 0.5)  # the first is expected to end then
    limiter.end(first, 0, 0, 0.6)
    limiter.end(first, 0, 0, 0.6)  # once is enough
    third = limiter.begin(KEY, limits, 0.6)
    refusal(limiter, limits, 50.0)
    for usage in (second, third):
        limiter.end(usage, 0, 0, 60.0)
    assert limiter.num_running(KEY) == 0


def test_a_refused_request_takes_nothing_of_the_other_limits() -> None:
    limiter, limits = KeyLimiter(), KeyLimits(requests_per_minute=2, concurrent_requests=1)
    first = limiter.begin(KEY, limits, 0.0)
    for _ in range(5):
        assert "concurrent_requests" in refusal(limiter, limits, 0.0).message
    limiter.end(first, 0, 0, 0.0)
    limiter.end(limiter.begin(KEY, limits, 0.0), 0, 0, 0.0)
    assert "requests_per_minute" in refusal(limiter, limits, 0.0).message


def charged(limiter: KeyLimiter, limits: KeyLimits, num_prompt: int, max_tokens: int, now: float) -> KeyUsage:
    usage = limiter.begin(KEY, limits, now)
    limiter.charge(usage, num_prompt, 1, max_tokens, now)
    return usage


@pytest.mark.parametrize(("num_tokens", "fits"), [(99, True), (100, True), (101, False)])
def test_the_last_tokens_fit_exactly(num_tokens: int, fits: bool) -> None:
    limiter, limits = KeyLimiter(), KeyLimits(tokens_per_minute=200)
    charged(limiter, limits, 90, 10, 0.0)
    if fits:
        charged(limiter, limits, num_tokens - 10, 10, 0.0)
        return
    usage = limiter.begin(KEY, limits, 0.0)
    with pytest.raises(RateLimitExceeded, match="tokens_per_minute=200") as raised:
        limiter.charge(usage, num_tokens - 10, 1, 10, 0.0)
    assert raised.value.retry_after_s == pytest.approx(1 * 60 / 200)
    limiter.charge(usage, num_tokens - 10, 1, 10, raised.value.retry_after_s)


def test_an_answer_is_charged_as_expected_and_corrected_at_its_end() -> None:
    limiter, limits = KeyLimiter(), KeyLimits(tokens_per_minute=1000)
    long, short = charged(limiter, limits, 100, 10_000, 0.0), charged(limiter, limits, 100, 10_000, 0.0)
    left = 1000 - 2 * (100 + GUESS)
    limiter.end(long, 100, 100 + GUESS, 0.0)
    limiter.end(short, 100, GUESS - 28, 0.0)
    left += -100 + 28
    charged(limiter, limits, left - 1, 1, 0.0)
    refusal(limiter, limits, 0.0)


def test_a_request_above_the_limit_waits_for_a_full_bucket_and_owes() -> None:
    limiter, limits = KeyLimiter(), KeyLimits(tokens_per_minute=100)
    usage = charged(limiter, limits, 250, 0, 0.0)
    limiter.end(usage, 250, 0, 0.0)
    assert refusal(limiter, limits, 0.0).retry_after_s == pytest.approx(250 * 0.6)
    again = limiter.begin(KEY, limits, 91.0)  # out of debt
    with pytest.raises(RateLimitExceeded) as raised:
        limiter.charge(again, 250, 1, 0, 91.0)
    assert 91.0 + raised.value.retry_after_s == pytest.approx(250 * 0.6)
    limiter.charge(again, 250, 1, 0, 150.0)


def test_a_refusal_by_one_limit_says_when_no_other_limit_refuses() -> None:
    limiter, limits = KeyLimiter(), KeyLimits(requests_per_minute=1, tokens_per_minute=600)
    limiter.end(charged(limiter, limits, 500, 100, 0.0), 500, 130, 0.0)  # 30 tokens of debt: 3 s
    refused = refusal(limiter, limits, 0.0)
    assert refused.retry_after_s == pytest.approx(63.0)  # the request in 60 s, and 630 tokens for another one like it
    second = limiter.begin(KEY, limits, 60.0)
    with pytest.raises(RateLimitExceeded, match="tokens_per_minute=600") as raised:  # it counts as a request
        limiter.charge(second, 590, 1, 10, 60.0)
    limiter.end(second, 0, 0, 60.0)
    assert raised.value.retry_after_s == pytest.approx(60.0)
    charged(limiter, limits, 590, 10, 120.0)


@pytest.mark.parametrize("seed", range(10))
def test_a_client_that_waits_as_told_is_served_at_its_next_attempt(seed: int) -> None:
    """It sends the same request repeatedly, whatever limits it meets."""
    rng = random.Random(seed)
    limits = KeyLimits(
        requests_per_minute=rng.choice([None, rng.randint(1, 60)]),
        tokens_per_minute=rng.choice([None, rng.randint(50, 5000)]),
        concurrent_requests=rng.choice([None, 1]),
    )
    limiter, now = KeyLimiter(), 0.0
    num_prompt, num_output = rng.randint(1, 400), rng.randint(1, 300)

    def ask(at: float) -> KeyUsage:
        usage = limiter.begin(KEY, limits, at)
        try:
            limiter.charge(usage, num_prompt, 1, num_output, at)
        except RateLimitExceeded:
            limiter.end(usage, 0, 0, at)
            raise
        return usage

    for _ in range(300):
        usage, now = as_soon_as_told(ask, now)  # raises if it is refused twice
        now += rng.expovariate(1.0)
        limiter.end(usage, num_prompt, num_output, now)


def test_a_late_request_is_not_asked_for_repeatedly() -> None:
    limiter, limits = KeyLimiter(), KeyLimits(concurrent_requests=3)
    for _ in range(3):
        limiter.begin(KEY, limits, 0.0)
    assert refusal(limiter, limits, 50.0).retry_after_s == pytest.approx(FIRST_DURATION_S / 4)


def test_a_limit_that_changes_counts_at_once_and_what_was_used_stays_used() -> None:
    limiter = KeyLimiter()
    for _ in range(10):
        limiter.begin(KEY, KeyLimits(requests_per_minute=10), 0.0)
    assert refusal(limiter, KeyLimits(requests_per_minute=60), 0.0).retry_after_s == pytest.approx(1.0)
    limiter.begin(KEY, KeyLimits(requests_per_minute=60), 1.0)
    limiter.begin(KEY, KeyLimits(requests_per_minute=1), 1000.0)
    refusal(limiter, KeyLimits(requests_per_minute=1), 1000.0)


def test_a_clock_that_goes_back_gives_nothing_away_and_blocks_nobody() -> None:
    limiter, limits = KeyLimiter(), KeyLimits(requests_per_minute=1)
    limiter.begin(KEY, limits, 1e6)
    assert refusal(limiter, limits, 5.0).retry_after_s == pytest.approx(60.0)
    limiter.begin(KEY, limits, 65.0)


def test_a_key_that_is_gone_is_forgotten_and_its_request_may_end() -> None:
    limiter, limits = KeyLimiter(), KeyLimits(requests_per_minute=1, tokens_per_minute=10, concurrent_requests=1)
    usage = limiter.begin(KEY, limits, 0.0)
    limiter.keep({"other"})
    limiter.end(usage, 5, 5, 0.0)
    limiter.begin(KEY, limits, 0.0)  # it is back, and limited as a new one
    with pytest.raises(RateLimitExceeded, match="requests_per_minute=1"):
        limiter.begin(KEY, limits, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_waiting_as_told_always_helps_and_gives_the_limit_and_no_more(seed: int) -> None:
    """One request after the other, each as soon as it may: the scarcer limit is used up, and none is exceeded."""
    rng = random.Random(seed)
    limits = KeyLimits(requests_per_minute=rng.randint(1, 60), tokens_per_minute=rng.randint(50, 5000))
    assert limits.requests_per_minute is not None
    assert limits.tokens_per_minute is not None
    limiter, now, num_begun, num_tokens = KeyLimiter(), 0.0, 0, 0
    while now < 6000.0:
        usage, now = as_soon_as_told(lambda at: limiter.begin(KEY, limits, at), now)
        num_begun += 1
        num_prompt, num_output = rng.randint(1, 400), rng.randint(0, 300)
        _, now = as_soon_as_told(lambda at: limiter.charge(usage, num_prompt, 1, 300, at), now)  # noqa: B023
        limiter.end(usage, num_prompt, num_output, now)
        num_tokens += num_prompt + num_output
    minutes = now / 60.0
    assert num_begun <= limits.requests_per_minute * (minutes + 1.0)
    assert num_tokens <= limits.tokens_per_minute * (minutes + 1.0) + 300  # what the last answer took unexpectedly
    used = max(num_begun / limits.requests_per_minute, num_tokens / limits.tokens_per_minute)
    assert used > 0.9 * minutes


def as_soon_as_told(ask: Callable[[float], T], now: float) -> tuple[T, float]:
    """The answer, and when it was given: now, or exactly as long after a refusal as that said."""
    try:
        return ask(now), now
    except RateLimitExceeded as exc:
        at = now + exc.retry_after_s
    return ask(at), at
