"""Decides when a worker changes its role: a pure function of what is observed, the clock and a little state.

Compares the predicted waiting seconds of the prefill and the decode pool, and moves one worker at a time to the pool
that waits longer, if that shortens the longer wait. The caller applies the decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role, WorkerState
from tandem.scheduling.cost_model import CostModel, StepCosts
from tandem.scheduling.workers.workers import RegisteredWorker, queue_s

__all__ = [
    "AutoscalerPolicy",
    "AutoscalerState",
    "Flip",
    "Observation",
    "ScalingDecision",
    "WorkerView",
    "decide",
    "observe",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscalerPolicy:
    """When the autoscaler acts. A wait is the time that a request loses to the load of its pool."""

    min_ratio: float = 2.0  # longer wait / shorter wait
    min_wait_s: float = 0.25  # least longer wait; below it a flip helps little
    num_agreeing: int = 3  # observations in a row that want the same
    cooldown_s: float = 15.0  # between two flips

    def __post_init__(self) -> None:
        if self.min_ratio <= 1 or self.num_agreeing < 1:
            raise ConfigError(
                f"min_ratio={self.min_ratio} must be above 1 and num_agreeing={self.num_agreeing} at least 1; "
                "less lets roles flip back and forth"
            )


DEFAULT_POLICY = AutoscalerPolicy()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What the autoscaler knows of one worker."""

    worker_id: str
    role: Role
    is_ready: bool = True
    num_running: int = 0  # requests that a flip would leave unfinished in the old role
    num_queued_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Load of the two pools, and the learned costs that turn it into seconds."""

    workers: tuple[WorkerView, ...]
    queued_prompt_tokens: int  # uncached and not computed yet, over all workers
    prefill_tokens_per_s: float  # speed of one prefill worker
    # Sequences of the decode pool that have their first token, or whose prompt is computed and waits for room.
    num_decode_seqs: int
    num_decode_kv_tokens: int
    num_waiting_seqs: int  # sequences among them that do not run yet, for lack of memory or seats
    decode_costs: StepCosts
    expected_output_tokens: float


@dataclass(frozen=True, slots=True)
class Flip:
    """Move this worker to another role."""

    worker_id: str
    to_role: Role


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """What to do now, if anything, and why."""

    flip: Flip | None
    reason: str
    prefill_wait_s: float = 0.0
    decode_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AutoscalerState:
    """What is remembered between two decisions."""

    wanted: Role | None = None  # the pool that should grow by the latest observations
    num_wanted: int = 0  # number of these observations in a row
    moving: Flip | None = None  # decided, and not complete at the latest observation
    last_flip_s: float = field(default=-math.inf)


def decide(
    observation: Observation, now: float, state: AutoscalerState, policy: AutoscalerPolicy = DEFAULT_POLICY
) -> tuple[ScalingDecision, AutoscalerState]:
    """Flip one worker or hold, and the state for the next call."""
    waits = _Waits.of(observation)
    proposal = _proposal(observation, waits, state, policy)
    if isinstance(proposal, str):
        is_done = state.moving is not None and not _is_in_flight(state.moving, observation)
        calm = replace(state, wanted=None, num_wanted=0, moving=None if is_done else state.moving)
        return waits.decision(None, f"hold: {proposal}; {waits}"), calm

    grow, shrink = proposal.grow, proposal.shrink
    num_wanted = state.num_wanted + 1 if state.wanted == grow else 1
    state = replace(state, wanted=grow, num_wanted=num_wanted, moving=None)
    if num_wanted < policy.num_agreeing:
        reason = f"{grow} should grow, seen {num_wanted} of num_agreeing={policy.num_agreeing} times"
        return waits.decision(None, f"hold: {reason}; {waits}"), state
    if now - state.last_flip_s < policy.cooldown_s:
        reason = f"{grow} should grow, {now - state.last_flip_s:.1f} of cooldown_s={policy.cooldown_s} over"
        return waits.decision(None, f"hold: {reason}; {waits}"), state
    pool = _pool(observation, shrink)
    worker = min(pool, key=lambda view: (view.num_running, view.num_queued_tokens, view.worker_id))
    flip = Flip(worker.worker_id, grow)
    reason = (
        f"flip {worker.worker_id} from {shrink} to {grow}: {waits}; longer wait after the flip {proposal.wait_s:.2f} s"
    )
    return waits.decision(flip, reason), AutoscalerState(moving=flip, last_flip_s=now)


def observe(workers: Iterable[RegisteredWorker], costs: CostModel, expected_output_tokens: float) -> Observation:
    """What `decide` needs, from the router's registry and cost model."""
    views: list[WorkerView] = []
    prefillers: list[RegisteredWorker] = []
    decoders: list[RegisteredWorker] = []
    queued = 0
    for worker in workers:
        queued += worker.uncomputed_tokens
        views.append(
            WorkerView(
                worker_id=worker.worker_id,
                role=worker.role,
                is_ready=worker.state == WorkerState.READY,
                num_running=worker.num_booked_seqs,
                num_queued_tokens=worker.uncomputed_tokens,
            )
        )
        if worker.state == WorkerState.READY:
            (prefillers if worker.role == Role.PREFILL else decoders).append(worker)
    pool = prefillers or decoders
    rates = [_prefill_tokens_per_s(worker, costs) for worker in pool]
    num_awaited = sum(worker.num_awaited_seqs for worker in decoders)
    awaited_kv_tokens = sum(worker.awaited_kv_tokens for worker in decoders)
    num_for_room = sum(worker.load.num_waiting_for_room for worker in decoders)
    num_held = min(num_for_room, num_awaited)  # their prompts are computed, so they wait for the decode pool
    num_decoding = sum(worker.num_booked_seqs for worker in decoders) - num_awaited + num_held
    kv_tokens = sum(worker.booked_kv_tokens for worker in decoders) - awaited_kv_tokens
    num_waiting = max(sum(worker.load.num_waiting for worker in decoders) - num_awaited, num_for_room)
    return Observation(
        workers=tuple(views),
        queued_prompt_tokens=queued,
        prefill_tokens_per_s=sum(rates) / len(rates) if rates else 0.0,
        num_decode_seqs=num_decoding,
        num_decode_kv_tokens=kv_tokens + awaited_kv_tokens * num_held // max(num_awaited, 1),
        num_waiting_seqs=min(num_waiting, num_decoding),
        decode_costs=_mean_costs([costs.steps(worker.card.kind).costs for worker in decoders or pool]),
        expected_output_tokens=expected_output_tokens,
    )


class _Waits(NamedTuple):
    """Predicted waiting seconds and size of the two pools."""

    prefill_s: float
    decode_s: float
    num_prefill: int
    num_decode: int

    @classmethod
    def of(cls, observation: Observation) -> _Waits:
        num_prefill, num_decode = len(_pool(observation, Role.PREFILL)), len(_pool(observation, Role.DECODE))
        prefill_s, decode_s = _prefill_wait_s(observation, num_prefill), _decode_wait_s(observation, num_decode)
        return cls(prefill_s, decode_s, num_prefill, num_decode)

    def __str__(self) -> str:
        return (
            f"prefill waits {self.prefill_s:.2f} s on {self.num_prefill} workers, "
            f"decode {self.decode_s:.2f} s on {self.num_decode}"
        )

    def decision(self, flip: Flip | None, reason: str) -> ScalingDecision:
        return ScalingDecision(flip, reason, self.prefill_s, self.decode_s)


class _Proposal(NamedTuple):
    """A move of one worker that would help now."""

    grow: Role
    shrink: Role
    wait_s: float  # the longer wait after the move


def _proposal(
    observation: Observation, waits: _Waits, state: AutoscalerState, policy: AutoscalerPolicy
) -> _Proposal | str:
    """The move to make if further observations agree, or why there is none."""
    if state.moving is not None and _is_in_flight(state.moving, observation):
        return f"{state.moving.worker_id} is moving to {state.moving.to_role}"
    if waits.num_prefill + waits.num_decode < 3:
        return "fewer than three workers leave nothing to move"
    grow, shrink, num_left, step = Role.PREFILL, Role.DECODE, waits.num_decode, 1
    longer_s, shorter_s = waits.prefill_s, waits.decode_s
    if waits.decode_s > waits.prefill_s:
        grow, shrink, num_left, step = Role.DECODE, Role.PREFILL, waits.num_prefill, -1
        longer_s, shorter_s = shorter_s, longer_s
    if longer_s < policy.min_wait_s:
        return f"no wait reaches min_wait_s={policy.min_wait_s}"
    if longer_s < policy.min_ratio * shorter_s:
        return f"waits differ by less than min_ratio={policy.min_ratio}"
    if num_left <= 1:
        return f"the last {shrink} worker stays"
    after_s = max(
        _prefill_wait_s(observation, waits.num_prefill + step), _decode_wait_s(observation, waits.num_decode - step)
    )
    if after_s >= longer_s:
        return f"one more {grow} worker would make the longer wait {after_s:.2f} s"
    return _Proposal(grow, shrink, after_s)


def _pool(observation: Observation, role: Role) -> list[WorkerView]:
    return [view for view in observation.workers if view.role == role and view.is_ready]


def _is_in_flight(move: Flip, observation: Observation) -> bool:
    """Whether the worker is still there and not yet serving in its new role."""
    return any(
        view.worker_id == move.worker_id and not (view.role == move.to_role and view.is_ready)
        for view in observation.workers
    )


def _prefill_wait_s(observation: Observation, num_workers: int) -> float:
    """Seconds until the prompts queued now are computed."""
    if observation.queued_prompt_tokens <= 0:
        return 0.0
    rate = num_workers * observation.prefill_tokens_per_s
    return observation.queued_prompt_tokens / rate if rate > 0 else math.inf


def _decode_wait_s(observation: Observation, num_workers: int) -> float:
    """How much longer an answer takes than alone on a decode worker, in seconds: slower steps, and waiting for room."""
    num_seqs = observation.num_decode_seqs
    if num_seqs <= 0:
        return 0.0
    if num_workers <= 0:
        return math.inf
    costs = observation.decode_costs
    seq_s = costs.decode_seq_s + costs.kv_token_s * observation.num_decode_kv_tokens / num_seqs
    num_beside = max(num_seqs / num_workers - 1, 0.0)
    slower_s = observation.expected_output_tokens * num_beside * seq_s
    # Waiting for room is waiting for other sequences to end; with more workers there is room for more at once.
    lifetime_s = observation.expected_output_tokens * (costs.base_s + (num_beside + 1) * seq_s)
    num_now = max(len(_pool(observation, Role.DECODE)), 1)
    num_slots = max(num_seqs - observation.num_waiting_seqs, 1) * num_workers / num_now
    num_without_room = max(num_seqs - num_slots, 0.0) if observation.num_waiting_seqs else 0.0
    return slower_s + num_without_room / num_slots * lifetime_s


def _prefill_tokens_per_s(worker: RegisteredWorker, costs: CostModel) -> float:
    """Speed at the prompts queued there now, or at one full chunk."""
    model = costs.steps(worker.card.kind)
    if worker.uncomputed_tokens > 0:
        return worker.uncomputed_tokens / max(queue_s(worker, model), 1e-6)
    chunk = worker.card.max_num_batched_tokens
    return chunk / max(model.prefill_s(chunk, 0, chunk), 1e-6)


def _mean_costs(costs: list[StepCosts]) -> StepCosts:
    if not costs:
        return StepCosts(0.0, 0.0, 0.0, 0.0, 0.0)
    return StepCosts(*(sum(column) / len(costs) for column in zip(*costs, strict=True)))
