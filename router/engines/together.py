"""What `tandem route` shows of itself, whichever of its processes is asked: metrics and pools of all of them."""

from __future__ import annotations

from typing import Any

import orjson
from prometheus_client import CollectorRegistry

from tandem.router.engines.fleet import EngineFleet
from tandem.router.engines.queues import Queues
from tandem.router.processes.shared_metrics import SharedMetrics
from tandem.router.processes.sibling_bus import PeerRouterBus
from tandem.scheduling.decisions import MAX_DECISIONS

__all__ = ["ClusterView"]

METRICS, RETIRED_METRICS, POOLS, DECISIONS = "metrics", "retired metrics", "pools", "decisions"
# Of an engine, what each process has or has counted for itself. State and circuit are shown as this process sees them.
_SUMMED = ("num_running", "num_requests", "num_failures", "num_circuit_openings")


class ClusterView:
    """One process speaking for all. Without a bus it is the only one."""

    def __init__(
        self, fleet: EngineFleet, queues: Queues, registry: CollectorRegistry, bus: PeerRouterBus | None
    ) -> None:
        self._fleet = fleet
        self._queues = queues
        self._metrics = SharedMetrics(registry)
        self._bus = bus

    async def start(self) -> None:
        """Join the siblings."""
        bus = self._bus
        if bus is None:
            return
        bus.answers = {
            METRICS: self._metrics.own,
            RETIRED_METRICS: lambda: self._metrics.retired(self._living()),
            POOLS: lambda: orjson.dumps(self._own_pools()),
            DECISIONS: lambda: orjson.dumps(self._queues.decisions()),
        }
        bus.listeners = {METRICS: self._note_metrics}
        await bus.start()
        for content in (await bus.ask(RETIRED_METRICS)).values():
            self._metrics.note_retired(content)

    async def close(self) -> None:
        """Leave the siblings."""
        if self._bus is not None:
            await self._bus.close()

    async def metrics(self) -> bytes:
        """Prometheus' text of all processes."""
        await self._ask(METRICS)
        return self._metrics.exposition(self._living())

    async def pools(self) -> dict[str, Any]:
        """Body of `/v1/pools`."""
        own = self._own_pools()
        others = {name: orjson.loads(answer) for name, answer in (await self._ask(POOLS)).items()}
        processes = {self._fleet.siblings.name: own} | others
        if self._bus is not None:
            own["processes"] = {
                name: {"num_requests": pools["num_requests"], "admission": pools["admission"]}
                for name, pools in sorted(processes.items())
            }
        own["num_requests"] = sum(pools["num_requests"] for pools in processes.values())
        for engine in own["engines"]:
            same = [one for pools in others.values() for one in pools["engines"] if one["name"] == engine["name"]]
            for field in _SUMMED:
                engine[field] += sum(one[field] for one in same)
        return own

    async def decisions(self) -> list[dict[str, Any]]:
        """The latest decisions of all, newest first."""
        found = self._queues.decisions()
        for answer in (await self._ask(DECISIONS)).values():
            found += orjson.loads(answer)
        return sorted(found, key=_age_s)[:MAX_DECISIONS]

    async def _ask(self, topic: str) -> dict[str, bytes]:
        return {} if self._bus is None else await self._bus.ask(topic)

    def _note_metrics(self, name: str, epoch: int, content: bytes) -> None:
        self._metrics.note(name, epoch, content, self._living())

    def _living(self) -> set[tuple[str, int]]:
        siblings = self._fleet.siblings
        return {(name, siblings.epoch_of(name) or 0) for name in siblings.living}

    def _own_pools(self) -> dict[str, Any]:
        fleet = self._fleet
        now = fleet.clock()
        return {
            "engines": [engine.to_json(now) for engine in fleet.engines],
            "costs": fleet.costs.export(),
            "queued_prompt_tokens": fleet.registry.queued_prompt_tokens,
            "num_requests": sum(len(engine.running) for engine in fleet.engines),
            "num_indexed_blocks": len(fleet.index),
            "mean_output_tokens": fleet.lengths.mean_output_tokens,
            "admission": self._queues.report(),
        }


def _age_s(decision: dict[str, Any]) -> float:
    return float(decision["age_s"])
