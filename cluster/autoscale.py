"""Lets the autoscaler decide while a cluster serves, and carries out its moves: flips, added and removed workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial

from ray.exceptions import RayError

from tandem.cluster.draining import Drains
from tandem.cluster.member import Member, MemberState, first_line, member_of
from tandem.cluster.role_flips import RoleFlips
from tandem.protocol.config import ClusterConfig
from tandem.protocol.errors import AddRefused, DrainRefused, WorkerNotFound
from tandem.protocol.messages import Role
from tandem.runtime.background import BackgroundTasks
from tandem.scheduling.autoscaling.autoscaler import decide
from tandem.scheduling.autoscaling.in_flight import AutoscalerState
from tandem.scheduling.autoscaling.moves import Move, ScalingDecision
from tandem.scheduling.autoscaling.observation import Fleet, observe
from tandem.scheduling.autoscaling.policy import DEFAULT_POLICY, AutoscalerPolicy
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.workers.registry import Registry

logger = logging.getLogger(__name__)

# Grace for answers that cannot move. It ends before the move's deadline, so that no removal under way is withdrawn.
_GRACE_S = 240.0
_LEAST_START_S = 1.0


def policy_of(config: ClusterConfig) -> AutoscalerPolicy:
    """What the autoscaler may do, and within which bounds. It only advises what it may not do."""
    acts = {"flip"} | ({"add"} if config.max_workers else set()) | ({"remove"} if config.min_workers else set())
    return replace(
        DEFAULT_POLICY,
        interval_s=config.autoscale_interval_s,
        acts=frozenset(acts),
        min_workers=config.min_workers or DEFAULT_POLICY.min_workers,
        max_workers=config.max_workers or DEFAULT_POLICY.max_workers,
    )


class Autoscale:
    """The autoscaler of one cluster: decides at intervals, and begins what was decided."""

    def __init__(
        self,
        config: ClusterConfig,
        registry: Registry,
        costs: CostModel,
        members: Mapping[str, Member],
        flips: RoleFlips,
        drains: Drains,
        background: BackgroundTasks,
        *,
        add: Callable[[Role, str], Awaitable[dict[str, object]]],
    ) -> None:
        """`add` begins to start a worker and raises `AddRefused`."""
        self._interval_s = config.autoscale_interval_s
        self._policy = policy_of(config)
        self._is_joined = bool(config.ray_address)
        self._registry = registry
        self._costs = costs
        self._members = members
        self._flips = flips
        self._drains = drains
        self._background = background
        self._begin_to_add = add
        self._added: list[dict[str, object]] = []  # the joins of the latest move
        self._refused = ""  # why a part of the latest move did not begin
        self.decision: dict[str, object] = {}  # the latest, as `/v1/pools` shows it

    async def run(self, mean_output_tokens: Callable[[], float]) -> None:
        """Decide at intervals, forever. `mean_output_tokens` is the expected length of an answer."""
        state = AutoscalerState()
        while True:
            await asyncio.sleep(self._interval_s)
            observation = observe(self._registry, self._costs, mean_output_tokens(), self.fleet)
            decision, state = decide(observation, time.monotonic(), state, self._present_policy())
            reason = self._begin(decision)
            self.decision = decision.as_dict() | {"reason": reason}
            if decision.move is not None or decision.withdrawn is not None:
                logger.info("%s", reason)

    @property
    def fleet(self) -> Fleet:
        """What the router does not know about the workers."""
        members = self._members.values()
        waiting = {record["worker"] for record in self._added if not record.keys() & {"serving_after_s", "withdrawn"}}
        failed = (f"{one['worker']} was not added: {one['withdrawn']}" for one in self._added if "withdrawn" in one)
        return Fleet(
            coming=frozenset(one.worker_id for one in members if one.is_coming),
            num_unplaced=sum(one.worker_id in waiting and one.process is None for one in members),
            setback=self._refused or next(failed, ""),
            # The machine of a worker that was there from the start stays reserved when it leaves.
            spared=frozenset(one.worker_id for one in members if self._is_joined and not one.is_added),
        )

    def _begin(self, decision: ScalingDecision) -> str:
        """Begin what was decided, without waiting for it. Returns the reason to show, with what was refused."""
        reason, refusals = decision.reason, []
        if decision.withdrawn is not None and decision.withdrawn.num_added:
            self._withdraw(reason)
        if (move := decision.move) is None:
            return reason
        for worker_id in move.worker_ids if move.kind == "flip" else ():
            member = member_of(self._members, worker_id)
            if member is not None and member.fixed_role:
                refusals.append(member.fixed_role)
            else:
                self._flips.flip(worker_id, move.role, reason)
        if move.num_added:
            self._forget_move()
            self._background.start(str(move), partial(self._add, move, reason))
        for worker_id in move.worker_ids if move.kind == "remove" else ():
            self._remove(worker_id, reason)
        return f"{reason}, but {refusals[0]}" if refusals else reason

    def _withdraw(self, reason: str) -> None:
        """Give up the workers that were to be added and do not serve yet."""
        for record in self._added:
            member = self._members.get(str(record["worker"]))
            if member is not None and member.is_coming and not member.has_served:
                member.give_up(reason)
        self._forget_move()

    def _remove(self, worker_id: str, reason: str) -> None:
        """Begin to drain a worker, so its answers move to others."""
        self._forget_move()
        try:
            self._check(worker_id)
            self._drains.begin(worker_id, _GRACE_S, restart=False, reason=reason)
        except (DrainRefused, WorkerNotFound) as exc:
            self._refused = str(exc)

    async def _add(self, move: Move, reason: str) -> None:
        try:
            for _ in range(move.num_added):
                self._added.append(await self._begin_to_add(move.role, reason))
        except (AddRefused, RayError) as exc:
            self._refused = first_line(exc)

    def _check(self, worker_id: str) -> None:
        """Raise DrainRefused for the last worker of its role, even if others could cover for it."""
        role = self._members[worker_id].role if worker_id in self._members else None
        others = [one for one in self._members.values() if one.role is role and one.worker_id != worker_id]
        if role is not None and not any(one.state is MemberState.UP for one in others):
            raise DrainRefused(f"{worker_id} is now the last {role} worker.")

    def _forget_move(self) -> None:
        self._added, self._refused = [], ""

    def _present_policy(self) -> AutoscalerPolicy:
        """The policy with the time that the latest worker took to start."""
        started = [one for one in self._members.values() if one.start_s]
        if not started:  # all of them were taken over
            return self._policy
        latest = max(started, key=lambda one: one.up_since)
        return replace(self._policy, start_s=max(latest.start_s, _LEAST_START_S))
