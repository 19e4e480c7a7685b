"""Sizes pools while a trace is served: our autoscaler, and the rules that other projects publish.

A scaler is asked at intervals of virtual time, and its moves are carried out: flips at once, new workers after their
start, leaving ones when their work has ended. Rules of others are simplified to what their docstrings say.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tandem.protocol.messages import Role, WorkerState
from tandem.scheduling.autoscaling.autoscaler import decide
from tandem.scheduling.autoscaling.in_flight import AutoscalerState
from tandem.scheduling.autoscaling.moves import Move
from tandem.scheduling.autoscaling.observation import Observation, observe
from tandem.scheduling.autoscaling.policy import AutoscalerPolicy
from tandem.scheduling.autoscaling.traffic import Traffic
from tandem.scheduling.cost_model import CostModel, prefill_attention
from tandem.scheduling.workers.registry import Registry
from tandem.simulator.worker import Job

_P, _D = Role.PREFILL, Role.DECODE


class Scene(NamedTuple):
    """What a scaler may see."""

    registry: Registry
    costs: CostModel
    mean_output_tokens: float
    now: float
    done: Sequence[Job]  # answered since it was asked last


class Scaler(Protocol):
    """Sizes the pools."""

    def decide(self, scene: Scene) -> Sequence[Move]:
        """What to do now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPlan:
    """A scaler, and how its moves take effect."""

    scaler: Scaler
    slo: tuple[float, float]  # limits of TTFT and of the mean gap between tokens, in seconds
    interval_s: float = 5.0
    start_s: float = 60.0  # until a new worker serves


@dataclass(slots=True)
class TandemScaler:
    """scheduling/autoscaling: flips first, then workers."""

    policy: AutoscalerPolicy
    state: AutoscalerState = field(default_factory=AutoscalerState)

    def decide(self, scene: Scene) -> Sequence[Move]:
        """The product's decision."""
        observation = observe(scene.registry, scene.costs, scene.mean_output_tokens)
        decision, self.state = decide(observation, scene.now, self.state, self.policy)
        return (decision.move,) if decision.move is not None else ()


@dataclass(slots=True)
class _Resizing:
    """The part that the rules of others share: they size each pool alone, by new and by leaving workers."""

    slo: tuple[float, float]
    max_workers: int
    last_s: dict[tuple[Role, bool], float] = field(default_factory=dict)  # by role, and whether it grew
    traffic: Traffic = field(default_factory=Traffic)

    def _to_size(self, scene: Scene, role: Role, num: int) -> list[Move]:
        """Make a pool as large, within 1 and what the budget leaves."""
        alive = [one for one in scene.registry if one.state != WorkerState.DRAINING]
        pool = [one for one in alive if one.role == role]
        num = min(max(num, 1), len(pool) + self.max_workers - len(list(scene.registry)))
        if num > len(pool):
            self.last_s[role, True] = scene.now
            return [Move("add", role, num_added=num - len(pool))]
        ready = sorted((one for one in pool if one.state == WorkerState.READY), key=lambda one: one.num_booked_seqs)
        gone = ready[: min(len(pool) - num, len(ready) - 1)]
        if not gone:
            return []
        self.last_s[role, False] = scene.now
        return [Move("remove", role, tuple(one.worker_id for one in gone))]

    def _since(self, scene: Scene, role: Role, *, grew: bool) -> float:
        return scene.now - self.last_s.get((role, grew), -math.inf)

    def _observe(self, scene: Scene) -> tuple[Observation, int, int]:
        seen = observe(scene.registry, scene.costs, scene.mean_output_tokens)
        self.traffic = self.traffic.updated(seen.demand, scene.now)
        ready = [one for one in seen.workers if one.is_ready]
        return seen, sum(one.role == _P for one in ready), sum(one.role == _D for one in ready)

    def _num_all(self, scene: Scene, role: Role) -> int:
        return sum(one.role == role and one.state != WorkerState.DRAINING for one in scene.registry)


@dataclass(slots=True)
class Threshold(_Resizing):
    """Reactive thresholds: a worker more where prompts wait for half the TTFT SLO or steps take the ITL SLO; one less
    below a tenth and 0.4 of it. At most one in 15 s up and in 60 s down.
    """

    def decide(self, scene: Scene) -> Sequence[Move]:
        """Decide by what is queued and running now."""
        seen, num_prefill, num_decode = self._observe(scene)
        costs, backlog = seen.capacity.costs, seen.backlog
        wait_s = backlog.prompt_tokens * costs.prefill_token_s / max(num_prefill, 1)
        batch = backlog.num_seqs / max(num_decode, 1)
        itl_s = costs.step_s(batch, batch * backlog.kv_tokens_per_seq)
        moves: list[Move] = []
        for role, level, high, low in (
            (_P, wait_s, 0.5 * self.slo[0], 0.1 * self.slo[0]),
            (_D, itl_s, self.slo[1], 0.4 * self.slo[1]),
        ):
            num = self._num_all(scene, role)
            if level > high and self._since(scene, role, grew=True) >= 15:
                moves += self._to_size(scene, role, num + 1)
            elif level < low and min(self._since(scene, role, grew=grew) for grew in (True, False)) >= 60:
                moves += self._to_size(scene, role, num - 1)
        return moves


@dataclass(slots=True)
class DynamoPlanner(_Resizing):
    """Dynamo's planner with the target `sla` and both loops. Every 180 s the throughput loop sets a floor: requests per
    second of the last interval over what one worker can do within the SLO, prompts less their hits. The load loop, here
    at each tick: one more when all workers of a pool miss the SLO, one less when the others could take its part at 80 %
    of the SLO; nothing while a move is pending. Left out: its ARIMA (the last interval is repeated), and its profile
    (the learned costs stand for it).
    """

    floor: dict[Role, int] = field(default_factory=lambda: {_P: 1, _D: 1})
    planned_s: float = 0.0
    planned_num: float = 0.0

    def decide(self, scene: Scene) -> Sequence[Move]:
        """Run both loops."""
        seen, num_prefill, num_decode = self._observe(scene)
        moves: list[Move] = []
        if scene.now - self.planned_s >= 180:
            self._plan(scene, seen)
            for role in (_P, _D):
                if self._num_all(scene, role) < self.floor[role]:
                    moves += self._to_size(scene, role, self.floor[role])
        if moves or any(one.state != WorkerState.READY for one in scene.registry):
            return moves
        costs, (ttft_slo_s, itl_slo_s) = seen.capacity.costs, self.slo
        own_s = _prefill_s(seen, self.traffic)
        waits_s = [one.num_queued_tokens * costs.prefill_token_s for one in seen.workers if one.role == _P]
        if waits_s and min(waits_s) + own_s > ttft_slo_s:
            moves += self._to_size(scene, _P, num_prefill + 1)
        elif num_prefill > self.floor[_P] and num_prefill > 1:
            share = num_prefill / (num_prefill - 1)
            if max(waits_s) * share < 0.8 * (ttft_slo_s - own_s):
                moves += self._to_size(scene, _P, num_prefill - 1)
        decoders = [one for one in seen.workers if one.role == _D]
        itls_s = [costs.step_s(float(one.num_running), float(one.num_kv_tokens)) for one in decoders]
        if itls_s and min(itls_s) > itl_slo_s:
            moves += self._to_size(scene, _D, num_decode + 1)
        elif num_decode > self.floor[_D] and num_decode > 1:
            share = num_decode / (num_decode - 1)
            most_kv = max(one.num_kv_tokens for one in decoders)
            most_itl_s = max(costs.step_s(one.num_running * share, one.num_kv_tokens * share) for one in decoders)
            if most_kv * share < 0.8 * seen.capacity.kv_tokens and most_itl_s < 0.8 * itl_slo_s:
                moves += self._to_size(scene, _D, num_decode - 1)
        return moves

    def _plan(self, scene: Scene, seen: Observation) -> None:
        rate = (seen.demand.num_requests - self.planned_num) / max(scene.now - self.planned_s, 1e-9)
        self.planned_s, self.planned_num = scene.now, seen.demand.num_requests
        costs, (ttft_slo_s, itl_slo_s) = seen.capacity.costs, self.slo
        own_s = _prefill_s(seen, self.traffic)
        per_prefill = max(1 - own_s / ttft_slo_s, 0.05) / max(own_s, 1e-6)
        context = self.traffic.prompt_tokens + scene.mean_output_tokens / 2
        seq_s = costs.decode_seq_s + costs.kv_token_s * context
        batch = max((itl_slo_s - costs.base_s) / max(seq_s, 1e-9), 1.0)
        batch = min(batch, seen.capacity.kv_tokens / max(context, 1.0))
        per_decode = batch / (scene.mean_output_tokens * costs.step_s(batch, batch * context))
        self.floor = {_P: max(math.ceil(rate / per_prefill), 1), _D: max(math.ceil(rate / per_decode), 1)}


@dataclass(slots=True)
class LlmdRules(_Resizing):
    """llm-d's rules for an SLO (KEDA and HPA), every 15 s. s = mean over 45 s of min(2, P90 / SLO); above 0.55 the pool
    is sized by s / 0.55, below 0.4 by s / 0.4; up at most twofold (or by four) in 60 s after 30 s of need, down by one
    in 120 s after 180 s. llm-d states one pool; here TTFT sizes the prefill pool, and TPOT the decode pool.
    """

    answers: deque[tuple[float, float, float]] = field(default_factory=deque)  # time, TTFT / SLO, TPOT / SLO
    levels: dict[Role, deque[tuple[float, float]]] = field(default_factory=lambda: {_P: deque(), _D: deque()})
    wants: dict[Role, deque[tuple[float, int]]] = field(default_factory=lambda: {_P: deque(), _D: deque()})
    asked_s: float = 0.0

    def decide(self, scene: Scene) -> Sequence[Move]:
        """Size both pools, each by its own ratio."""
        self._note(scene)
        if scene.now - self.asked_s < 15:
            return ()
        self.asked_s = scene.now
        moves: list[Move] = []
        for column, role in ((1, _P), (2, _D)):
            ratios = sorted(one[column] for one in self.answers)
            level = min(2.0, ratios[int(0.9 * (len(ratios) - 1))]) if ratios else 0.0
            levels, wants = self.levels[role], self.wants[role]
            levels.append((scene.now, level))
            _forget(levels, scene.now - 45)
            mean = sum(one for _, one in levels) / len(levels)
            num = self._num_all(scene, role)
            num_ready = sum(one.role == role and one.state == WorkerState.READY for one in scene.registry)
            wanted = num
            if mean > 0.55:
                wanted = num + max(math.ceil(num * (mean * num_ready / max(num, 1) / 0.55 - 1)), 0)
            elif mean < 0.40:
                wanted = num - math.floor(num * (1 - mean / 0.40))
            wants.append((scene.now, wanted))
            _forget(wants, scene.now - 180)
            up = min(want for at_s, want in wants if at_s >= scene.now - 30)
            down = max(want for _, want in wants)
            if up > num and self._since(scene, role, grew=True) >= 60:
                moves += self._to_size(scene, role, min(up, num + max(num, 4)))
            elif down < num and scene.now >= 180 and self._since(scene, role, grew=False) >= 120:
                moves += self._to_size(scene, role, num - 1)
        return moves

    def _note(self, scene: Scene) -> None:
        for job in scene.done:
            assert job.first_token_s is not None
            assert job.end_s is not None
            ttft = (job.first_token_s - job.arrival_s) / self.slo[0]
            tpot = (job.end_s - job.first_token_s) / max(job.num_output_tokens - 1, 1) / self.slo[1]
            self.answers.append((scene.now, ttft, tpot))
        while self.answers and self.answers[0][0] < scene.now - 45:
            self.answers.popleft()


def _prefill_s(seen: Observation, traffic: Traffic) -> float:
    """Seconds to compute the mean prompt, less its hits."""
    tokens = max(traffic.prompt_tokens - traffic.cached_tokens, 1.0)
    costs = seen.capacity.costs
    num_steps = math.ceil(tokens / seen.capacity.step_tokens)
    return num_steps * costs.base_s + costs.prefill_work_s(tokens, prefill_attention(tokens, traffic.cached_tokens))


def _forget(entries: deque[tuple[float, float]] | deque[tuple[float, int]], before_s: float) -> None:
    while entries and entries[0][0] < before_s:
        entries.popleft()
