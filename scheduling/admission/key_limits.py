"""How much one API key may use: requests and tokens in a minute, and requests at one time.

Each rate is a bucket of one minute's worth that fills continuously. No I/O and no clock: the time is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Annotated, NoReturn

import msgspec
from msgspec import Meta

from tandem.protocol.errors import RateLimitExceeded
from tandem.scheduling.admission.answer_lengths import AnswerLengths

MAX_LIMIT = 10**12
MINUTE_S = 60.0
FIRST_DURATION_S = 1.0  # expected duration of a key's first requests
NEWEST_WEIGHT = 0.2  # weight of the latest request in the mean duration
MIN_WAIT_S = 0.05
SLACK = 1e-9  # share of an amount that may be missing because of rounding

Limit = Annotated[int, Meta(ge=1, le=MAX_LIMIT)]


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of one API key; None = no limit."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None  # of prompts and answers together
    concurrent_requests: Limit | None = None
    pins: Annotated[int, Meta(ge=0, le=MAX_LIMIT)] | None = None  # pins that live at one time; 0 = it may pin nothing

    @property
    def is_any_on_requests(self) -> bool:
        """Whether requests are limited at all."""
        return not (self.requests_per_minute is self.tokens_per_minute is self.concurrent_requests is None)


NO_LIMITS = KeyLimits()


@dataclass(eq=False, slots=True)
class _Bucket:
    """The amount that may be used now: at most one minute's worth; negative if more was used than was expected."""

    level: float = math.inf  # more than full until it is first looked at
    looked_at_s: float = 0.0

    def wait_s(self, amount: float, limit: int, now: float) -> float:
        """Seconds until this amount may be used. For an amount above the limit: seconds until the bucket is full."""
        self.level = min(self.level + max(now - self.looked_at_s, 0.0) * limit / MINUTE_S, limit)
        self.looked_at_s = now
        needed = min(amount, limit)
        missing = needed - self.level
        return missing * MINUTE_S / limit if missing > SLACK * needed else 0.0


@dataclass(eq=False, slots=True)
class _KeyState:
    """What a key has used."""

    requests: _Bucket = field(default_factory=_Bucket)
    tokens: _Bucket = field(default_factory=_Bucket)
    running: set[KeyUsage] = field(default_factory=set)
    mean_duration_s: float = FIRST_DURATION_S
    latest_tokens: int = 1  # tokens of the latest request whose prompt was read


@dataclass(eq=False, slots=True)
class KeyUsage:
    """One request that runs with a key. Only `KeyLimiter` changes it."""

    key_id: str
    limits: KeyLimits  # as they were when it began
    began_s: float
    state: _KeyState
    num_charged_tokens: int = 0
    num_answers: int = 1


class KeyLimiter:
    """What all keys have used."""

    def __init__(self) -> None:
        self._states: dict[str, _KeyState] = {}
        self._lengths = AnswerLengths()

    def num_running(self, key_id: str) -> int:
        """Requests that run with a key."""
        return len(self._states[key_id].running) if key_id in self._states else 0

    def begin(self, key_id: str, limits: KeyLimits, now: float) -> KeyUsage:
        """A request begins; its caller calls `end` on every path. Raises `RateLimitExceeded`."""
        state = self._states.setdefault(key_id, _KeyState())
        waits = _waits(state, limits, 1, now)  # one token: how many it needs is known once its prompt is read
        if limits.concurrent_requests is not None and len(state.running) >= limits.concurrent_requests:
            waits["concurrent_requests"] = _wait_for_end(state, now)
        if waits:
            name = max(waits, key=waits.__getitem__)
            _refuse(key_id, limits, name, waits | _waits(state, limits, state.latest_tokens, now))
        if limits.requests_per_minute is not None:
            state.requests.level -= 1
        usage = KeyUsage(key_id, limits, now, state)
        state.running.add(usage)
        return usage

    def charge(self, usage: KeyUsage, num_prompt_tokens: int, num_answers: int, max_tokens: int, now: float) -> None:
        """Charge a request for its prompt and the expected length of its answers, together at most `max_tokens`.

        Called once; `end` corrects the charge. Raises `RateLimitExceeded`.
        """
        limit = usage.limits.tokens_per_minute
        if limit is None:
            return
        usage.num_answers = max(num_answers, 1)
        expected = min(usage.num_answers * self._lengths.expected(usage.key_id, max_tokens), max_tokens)
        num_tokens = usage.state.latest_tokens = num_prompt_tokens + expected
        if usage.state.tokens.wait_s(num_tokens, limit, now) > 0.0:
            waits = _waits(usage.state, usage.limits, num_tokens, now)  # it is counted as a request, and needs another
            _refuse(usage.key_id, usage.limits, "tokens_per_minute", waits)
        usage.state.tokens.level -= num_tokens
        usage.num_charged_tokens = num_tokens

    def end(self, usage: KeyUsage, num_prompt_tokens: int, num_output_tokens: int, now: float) -> None:
        """The request is over, and took this many tokens. A later call changes nothing."""
        state = usage.state
        if usage not in state.running:
            return
        state.running.remove(usage)
        state.mean_duration_s += NEWEST_WEIGHT * (max(now - usage.began_s, 0.0) - state.mean_duration_s)
        if usage.limits.tokens_per_minute is not None:
            state.tokens.level += usage.num_charged_tokens - num_prompt_tokens - num_output_tokens
            if num_output_tokens:
                self._lengths.note(usage.key_id, round(num_output_tokens / usage.num_answers))

    def keep(self, key_ids: Container[str]) -> None:
        """Forget all other keys. Their requests that run are not disturbed."""
        self._states = {key_id: state for key_id, state in self._states.items() if key_id in key_ids}


def _waits(state: _KeyState, limits: KeyLimits, num_tokens: int, now: float) -> dict[str, float]:
    """Seconds until a request of this many tokens may begin, for each rate that does not let it begin now."""
    waits: dict[str, float] = {}
    if limits.tokens_per_minute is not None:
        waits["tokens_per_minute"] = state.tokens.wait_s(num_tokens, limits.tokens_per_minute, now)
    if limits.requests_per_minute is not None:
        waits["requests_per_minute"] = state.requests.wait_s(1, limits.requests_per_minute, now)
    return {name: wait_s for name, wait_s in waits.items() if wait_s > 0.0}


def _wait_for_end(state: _KeyState, now: float) -> float:
    """Seconds until one of the running requests is expected to end.

    The one that has run longest is expected to end after the mean duration. If it is late, the ends are assumed to be
    spread evenly.
    """
    wait_s = min(usage.began_s for usage in state.running) + state.mean_duration_s - now
    return max(wait_s if wait_s > 0.0 else state.mean_duration_s / (len(state.running) + 1), MIN_WAIT_S)


def _refuse(key_id: str, limits: KeyLimits, name: str, waits: dict[str, float]) -> NoReturn:
    """Refuse a request because of the limit `name`. It is told to wait until no limit would refuse it."""
    wait_s = max(waits.values())
    raise RateLimitExceeded(
        f"The API key {key_id} has used up its limit {name}={getattr(limits, name)}; retry in {wait_s:.2f} s.",
        retry_after_s=wait_s,
    )
