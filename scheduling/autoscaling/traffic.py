"""Arrivals as they are and as they are expected: level, trend, time of the day, burstiness, mix. A state of fixed size.

The forecast begins with the mean of some minutes. What the last two minutes, the last half minute and its trend say
beyond that counts only as far as chance cannot explain it: in bursty traffic a burst says nothing new, in even traffic
a small rise does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tandem.scheduling.autoscaling.burstiness import Burstiness
from tandem.scheduling.workers.demand import NUM_BUCKETS, Bucket, Demand

DAY_S = 86_400.0
NUM_SEASONS = 48  # half hours
# Time constants of smoothing.
LEVELS_S = (480.0, 120.0, 30.0)
TREND_S, MIX_S, ANSWERS_S = 120.0, 300.0, 60.0
TREND_REACH_S = 60.0  # a trend is expected to continue for about this long
MAX_GROWTH = 3.0  # forecast / present level
MAX_SEASON = 4.0
_DOUBT = 2.0  # deviations up to this many standard deviations are put down to chance


@dataclass(frozen=True, slots=True)
class Traffic:
    """What is known of arrivals. Rates are per second. `updated` returns the next state."""

    at_s: float | None = None
    since_s: float | None = None  # of the first tick
    total: Demand = field(default_factory=Demand)  # at `at_s`
    levels: tuple[float, ...] = (0.0,) * len(LEVELS_S)  # requests per second without the time of the day
    trend: float = 0.0  # growth of the last level per second
    bursts: Burstiness = field(default_factory=Burstiness)
    day_level: float = 0.0  # mean rate over a day
    seasons: tuple[float, ...] = (1.0,) * NUM_SEASONS  # rate / mean rate, by time of the day
    season_since: tuple[int, ...] = (-1,) * NUM_SEASONS  # day on which each was learned first; -1 = never
    # Means of recent requests, each a share or a sum per request.
    buckets: tuple[Bucket, ...] = (Bucket(),) * NUM_BUCKETS
    cached_tokens: float = 0.0
    prompt_tokens: float = 0.0
    prompt_squares: float = 0.0
    itl_slo_s: float = 0.0
    num_seen: float = 0.0
    output_tokens: float = 0.0  # of recent answers; 0 = none has ended
    num_answered: float = 0.0

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that are cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens > 0 else 0.0

    @property
    def length_variation(self) -> float:
        """Variance of the lengths of prompts / mean^2."""
        return max(self.prompt_squares / self.prompt_tokens**2 - 1, 0.0) if self.prompt_tokens > 0 else 0.0

    def rate(self, now: float, ahead_s: float) -> float:
        """Expected requests per second in `ahead_s` seconds; never negative, and never a multiple of today's."""
        return self._plain_rate(ahead_s) * self._season(now + ahead_s, _day(now))

    def updated(self, total: Demand, now: float) -> Traffic:
        """The state after a tick. No arrivals are a rate of zero, not a missing value."""
        if self.at_s is None or now <= self.at_s or total.num_requests < self.total.num_requests:
            return replace(self, at_s=now, since_s=now if self.since_s is None else self.since_s, total=total)
        elapsed_s = now - self.at_s
        num = total.num_requests - self.total.num_requests
        state = self._with_rate(num / elapsed_s, elapsed_s, now)
        if num > 0:
            state = state._with_mix(total, num, elapsed_s)
        if total.num_answers > self.total.num_answers:
            state = state._with_answers(total, elapsed_s)
        return replace(state, at_s=now, total=total)

    def _plain_rate(self, ahead_s: float) -> float:
        """Expected requests per second, without the effect of the time of the day."""
        rate = self.levels[0]
        for level, mean_s in zip(self.levels[1:], LEVELS_S[1:], strict=True):
            rate += self._significant_change(rate, level, mean_s)
        mean_s, noise = LEVELS_S[-1], max(rate, self.levels[-1]) * self.bursts.dispersion(2 * LEVELS_S[-1])
        # The variance of white noise that is smoothed by both time constants and differentiated between.
        trend = _beyond_chance(self.trend, math.sqrt(noise / (2 * mean_s * TREND_S * (mean_s + TREND_S))))
        growth = trend * (mean_s + TREND_REACH_S * (1 - math.exp(-ahead_s / TREND_REACH_S)))
        return min(max(rate + growth, 0.0), MAX_GROWTH * rate)

    def _significant_change(self, rate: float, level: float, mean_s: float) -> float:
        """How far a mean over `mean_s` differs from the forecast `rate`, beyond chance."""
        noise = max(rate, level) * self.bursts.dispersion(2 * mean_s)  # variance of arrivals per second
        return _beyond_chance(level - rate, math.sqrt(noise / (2 * mean_s)))

    def _with_rate(self, rate: float, elapsed_s: float, now: float) -> Traffic:
        assert self.since_s is not None, "the first tick only sets the time"
        plain = rate / self._season(now, _day(now))
        age_s = now - self.since_s  # a young mean is the mean since the start
        weights = [max(_weight(elapsed_s, mean_s), elapsed_s / age_s) for mean_s in LEVELS_S]
        levels = [old + weight * (plain - old) for old, weight in zip(self.levels, weights, strict=True)]
        growth = (levels[-1] - self.levels[-1]) / elapsed_s if age_s > LEVELS_S[-1] else 0.0
        day_level = self.day_level or rate
        day_level += _weight(elapsed_s, DAY_S) * (rate - day_level)
        seasons, since = self._learned_season(rate, day_level, elapsed_s, now)
        return replace(
            self,
            levels=tuple(levels),
            trend=self.trend + _weight(elapsed_s, TREND_S) * (growth - self.trend),
            bursts=self.bursts.updated(plain * elapsed_s, elapsed_s),
            day_level=day_level,
            seasons=seasons,
            season_since=since,
        )

    def _with_mix(self, total: Demand, num: float, elapsed_s: float) -> Traffic:
        """Update lengths, hits and SLOs. A tick with many requests counts more than one with few."""
        num_seen = self.num_seen * math.exp(-elapsed_s / MIX_S) + num
        weight = num / num_seen

        def mean(old: float, new_sum: float, old_sum: float) -> float:
            return old + weight * ((new_sum - old_sum) / num - old)

        old, before = self, self.total
        buckets = tuple(
            Bucket(*(mean(*three) for three in zip(mine, new, last, strict=True)))
            for mine, new, last in zip(old.buckets, total.buckets, before.buckets, strict=True)
        )
        return replace(
            self,
            buckets=buckets,
            cached_tokens=mean(old.cached_tokens, total.cached_tokens, before.cached_tokens),
            prompt_tokens=mean(old.prompt_tokens, total.prompt_tokens, before.prompt_tokens),
            prompt_squares=mean(old.prompt_squares, total.prompt_squares, before.prompt_squares),
            itl_slo_s=mean(old.itl_slo_s, total.itl_slo_s, before.itl_slo_s),
            num_seen=num_seen,
        )

    def _with_answers(self, total: Demand, elapsed_s: float) -> Traffic:
        """Update the mean over a minute. A shorter one would follow the last answers of a burst, its longest."""
        num = total.num_answers - self.total.num_answers
        mean = (total.output_tokens - self.total.output_tokens) / num
        num_answered = self.num_answered * math.exp(-elapsed_s / ANSWERS_S) + num
        output_tokens = self.output_tokens + num / num_answered * (mean - self.output_tokens)
        return replace(self, output_tokens=output_tokens, num_answered=num_answered)

    def _learned_season(
        self, rate: float, day_level: float, elapsed_s: float, now: float
    ) -> tuple[tuple[float, ...], tuple[int, ...]]:
        if day_level <= 0:
            return self.seasons, self.season_since
        idx = _season_idx(now)
        ratio = min(max(rate / day_level, 1 / MAX_SEASON), MAX_SEASON)
        seasons, since = list(self.seasons), list(self.season_since)
        seasons[idx] += _weight(elapsed_s, DAY_S / NUM_SEASONS) * (ratio - seasons[idx])
        if since[idx] < 0:
            since[idx] = int(_day(now))
        return tuple(seasons), tuple(since)

    def _season(self, at_s: float, today: float) -> float:
        """Factor for the time of the day. It needs an earlier day: today's rates are in the level already."""
        idx = _season_idx(at_s)
        return self.seasons[idx] if 0 <= self.season_since[idx] < today else 1.0


def _weight(elapsed_s: float, time_constant_s: float) -> float:
    return 1 - math.exp(-elapsed_s / time_constant_s)


def _season_idx(at_s: float) -> int:
    return int(at_s % DAY_S / DAY_S * NUM_SEASONS)


def _day(at_s: float) -> float:
    return at_s // DAY_S


def _beyond_chance(deviation: float, std: float) -> float:
    """A deviation without what chance explains: 0 within `_DOUBT` standard deviations, nearly all of a clear one."""
    if abs(deviation) <= _DOUBT * std:
        return 0.0
    return deviation * (1 - (_DOUBT * std / deviation) ** 4)
