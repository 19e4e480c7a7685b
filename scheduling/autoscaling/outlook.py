"""Predictions for today's pools and for their neighbours: some workers flipped, added or removed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.protocol.messages import Role
from tandem.scheduling.autoscaling.moves import Move
from tandem.scheduling.autoscaling.observation import Observation, Server, cheapest_servers, pool_of
from tandem.scheduling.autoscaling.policy import AutoscalerPolicy
from tandem.scheduling.autoscaling.prediction import LOST_S, Pools, Prediction, Sizing, predict
from tandem.scheduling.autoscaling.traffic import Traffic

# How far predictions look ahead: at least `_SOON_S`, and `_STARTS` times the start of a worker, so that an added worker
# can pay off.
_SOON_S = 120.0
_STARTS = 4.0


class Neighbour(NamedTuple):
    """A neighbour of today's pools."""

    move: Move
    prediction: Prediction


@dataclass(frozen=True, slots=True)
class Outlook:
    """Today's pools, and predictions for others."""

    observation: Observation
    sizing: Sizing
    policy: AutoscalerPolicy
    pools: Pools
    now: float

    @classmethod
    def of(cls, observation: Observation, traffic: Traffic, policy: AutoscalerPolicy, now: float) -> Outlook:
        """The outlook at `now`."""
        sizing = Sizing(
            traffic=traffic,
            capacity=observation.capacity,
            backlog=observation.backlog,
            output_tokens=traffic.output_tokens or observation.expected_output_tokens,
            horizon_s=_SOON_S + _STARTS * policy.start_s,
            start_s=policy.start_s,
        )
        pools = Pools(len(pool_of(observation, Role.PREFILL)), len(pool_of(observation, Role.DECODE)))
        return cls(observation, sizing, policy, pools, now)

    @property
    def sizes(self) -> str:
        """The pools in words."""
        return f"{self.pools.num_prefill} prefill + {self.pools.num_decode} decode workers"

    @property
    def num_alive(self) -> int:
        """Processes that run or are being started. The autoscaler adds none beyond `max_workers`."""
        return len(self.observation.servers)

    @property
    def num_ready(self) -> int:
        """Processes that serve and are not about to leave. The autoscaler removes none below `min_workers`."""
        return len({view.server for view in self.observation.workers if view.is_ready})

    def describe(self, prediction: Prediction) -> str:
        """A prediction for today's pools in one line."""
        rate = self.sizing.traffic.rate(self.now, 0.0)
        outcome = f"{prediction.attainment:.1%} in time on {self.sizes}, {rate:.2f} requests/s"
        if 0 in self.pools:  # the predicted times only stand for "never"
            return outcome
        return (
            f"{outcome}, prefill waits {prediction.prefill_wait_s:.2f} s at load {prediction.load:.2f}, "
            f"decode {prediction.decode_wait_s:.2f} s, ITL {1e3 * prediction.itl_s:.0f} ms"
        )

    def predict(
        self,
        pools: Pools,
        *,
        later: Pools | None = None,
        later_s: float = 0.0,
        extra_s: float = 0.0,
        lost_s: float = 0.0,
    ) -> Prediction:
        """As `prediction.predict`, for this traffic."""
        return predict(self.sizing, pools, self.now, later=later, later_s=later_s, extra_s=extra_s, lost_s=lost_s)

    def flips(self) -> Iterator[Neighbour]:
        """Predictions with some workers flipped at once. Those that leave prefill take their cache along."""
        for grow, shrink in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            servers = cheapest_servers(self.observation, shrink)
            num_free = len(servers) - 1
            least = 1 if self._of(grow) else 0  # an empty pool gets a worker
            if not least and not servers:
                continue
            for num in _sizes(min(num_free, max(self.num_alive // 4, 1))):
                num_ranks = sum(server.num_ranks for server in servers[:num])
                lost_s = self._lost_cache_s(num_ranks) if shrink == Role.PREFILL else 0.0
                after = self.predict(self._with(grow, num_ranks, shrink), lost_s=lost_s)
                yield Neighbour(Move("flip", grow, tuple(server.name for server in servers[:num])), after)

    def adds(self) -> Iterator[Neighbour]:
        """Predictions with added workers, which serve once they have started."""
        for role in (Role.PREFILL, Role.DECODE):
            for num in _sizes(min(self.policy.max_workers - self.num_alive, 2 * self.num_alive)):
                later = self._with(role, num * self._num_ranks(role))
                after = self.predict(self.pools, later=later, later_s=self.policy.start_s)
                yield Neighbour(Move("add", role, num_added=num), after)

    def removes(self) -> Iterator[Neighbour]:
        """Predictions with fewer workers, for more traffic than forecast. What the leaving ones run is computed again.

        Yields only removals after which the target is met at all times, the cost of the move itself left out.
        """
        roomier = self.with_headroom
        for role in (Role.PREFILL, Role.DECODE):
            servers = cheapest_servers(self.observation, role)
            num_most = min(len(servers) - 1, self.num_ready - self.policy.min_workers, max(self.num_alive // 8, 1))
            for num in _sizes(num_most):
                gone = servers[:num]
                num_ranks = sum(server.num_ranks for server in gone)
                moved_s = self.sizing.capacity.costs.prefill_token_s * sum(server.num_kv_tokens for server in gone)
                lost_s = self._lost_cache_s(num_ranks) if role == Role.PREFILL else 0.0
                pools = self._with(role, -num_ranks)
                if roomier.predict(pools).least < self.policy.target:
                    continue
                after = roomier.predict(pools, extra_s=moved_s, lost_s=lost_s)
                yield Neighbour(Move("remove", role, tuple(server.name for server in gone)), after)

    @property
    def with_headroom(self) -> Outlook:
        """The same outlook for more traffic than forecast."""
        return replace(self, sizing=replace(self.sizing, demand_factor=self.policy.headroom))

    def _num_ranks(self, role: Role) -> int:
        """Ranks of one more process, if it is like those of its role."""
        servers = cheapest_servers(self.observation, role) or [Server("", 1)]
        return max(sum(server.num_ranks for server in servers) // len(servers), 1)

    def _of(self, role: Role) -> int:
        return self.pools.num_prefill if role == Role.PREFILL else self.pools.num_decode

    def _with(self, grow: Role, num: int, shrink: Role | None = None) -> Pools:
        change = {grow: num} | ({shrink: -num} if shrink is not None else {})
        return Pools(
            self.pools.num_prefill + change.get(Role.PREFILL, 0), self.pools.num_decode + change.get(Role.DECODE, 0)
        )

    def _lost_cache_s(self, num: int) -> float:
        """Worker-seconds to compute again what the caches of `num` prefill workers would have hit in a minute."""
        traffic = self.sizing.traffic
        share = num / max(self.pools.num_prefill, 1)
        tokens_per_s = traffic.rate(self.now, 0.0) * traffic.cached_tokens
        return LOST_S * share * tokens_per_s * self.sizing.capacity.costs.prefill_token_s


def _sizes(num_most: int) -> Iterator[int]:
    """1, 2, 4 and so on, and finally the largest."""
    num = 1
    while num < num_most:
        yield num
        num *= 2
    if num_most > 0:
        yield num_most
