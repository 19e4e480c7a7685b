"""A supervisor over actors that Ray seems to run: their processes are children of the test."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.exceptions import RayActorError

from tandem.cluster.bundles import Bundle
from tandem.cluster.draining import Timing
from tandem.cluster.owned_actor import OrphanedWorker, WatchNews, WorkerClaim
from tandem.cluster.ownership import Place
from tandem.cluster.process_end import ProcessIdentity
from tandem.cluster.restarts import RestartBudget
from tandem.cluster.supervisor import Supervisor
from tandem.cluster.worker_layout import worker_configs
from tandem.cluster.worker_member import WorkerMember
from tandem.protocol.config import ClusterConfig, EngineConfig, WorkerConfig
from tandem.protocol.errors import ConfigError, WorkerError
from tandem.protocol.messages import PeerAddress, Role, WorkerCard, WorkerState
from tandem.protocol.process import process_of
from tandem.runtime.backoff import Backoff
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.workers.registry import Registry
from tests.support.builders import add_ready, make_card
from tests.support.waiting import eventually


class FakeRay:
    """Actors whose processes are children of ours. Ray's verdict comes before they are gone."""

    def __init__(self, *, num_bad_starts: int = 0) -> None:
        self.num_bad_starts = num_bad_starts
        self.is_node_alive = True
        self.num_looks_at_nodes = 0
        self.placed = asyncio.Event()  # set while there is room for a new actor
        self.placed.set()
        self.loaded = asyncio.Event()  # set unless a model takes long to load
        self.loaded.set()
        self.stops = asyncio.Event()  # set unless workers do not end when they are told to
        self.stops.set()
        self.actors: list[FakeActor] = []
        self.told: list[tuple[str, str, PeerAddress, bool]] = []  # by whom, what, of whom, is its process gone

    def remote(self, _: type) -> SimpleNamespace:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.start))

    def kill(self, actor: FakeActor, *, no_restart: bool) -> None:
        """May be called in a thread, as Ray's own."""
        loop = actor.ended.get_loop()
        if asyncio._get_running_loop() is loop:
            actor.die()
        else:
            loop.call_soon_threadsafe(actor.die)

    def nodes(self) -> list[dict[str, object]]:
        self.num_looks_at_nodes += 1
        return [{"NodeID": "node", "Alive": self.is_node_alive}]

    def cluster_resources(self) -> dict[str, float]:
        return {}

    available_resources = cluster_resources

    def latest(self, worker_id: str) -> FakeActor:
        return [actor for actor in self.actors if actor.config.worker_id == worker_id][-1]

    def close(self) -> None:
        for actor in self.actors:
            actor.process.kill()
            actor.process.wait()

    def start(self, config: WorkerConfig, terms: object) -> FakeActor:
        actor = FakeActor(self, config, epoch=len(self.actors) + 1)
        self.actors.append(actor)
        return actor


_STRATEGY = SimpleNamespace(
    placement_group=SimpleNamespace(id=SimpleNamespace(hex=lambda: "group")), placement_group_bundle_index=0
)


class FakeBundles:
    """Ray's placement group."""

    def __init__(self, needs: Sequence[tuple[float, float]], owner: object = None, taken: object = ()) -> None:
        self.needs = needs
        self.free: list[Bundle] = []
        self.num_asked_for = 0
        self.has_room = True
        self.is_removed = False

    def bundle(self, number: int, num_cpus: float, num_gpus: float) -> Bundle:
        assert self.needs[number] == (num_cpus, num_gpus)
        return Bundle(num_cpus, num_gpus, _STRATEGY)

    def at(self, place: Place, num_cpus: float, num_gpus: float) -> Bundle:
        return Bundle(num_cpus, num_gpus, _STRATEGY)

    def another(self, num_cpus: float, num_gpus: float) -> Bundle:
        self.num_asked_for += not self.free
        return self.free.pop() if self.free else Bundle(num_cpus, num_gpus, _STRATEGY)

    def room(self) -> dict[str, float]:
        return {}

    def has_room_for(self, num_cpus: float, num_gpus: float, room: dict[str, float]) -> bool:
        return self.has_room or bool(self.free)

    def give_back(self, bundle: Bundle) -> None:
        self.free.append(bundle)

    def remove(self) -> None:
        self.is_removed = True


class FakeActor:
    def __init__(self, fake_ray: FakeRay, config: WorkerConfig, epoch: int) -> None:
        self.config = config
        self.ray = fake_ray
        self.card = make_card(config.worker_id, config.role, epoch=epoch)
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended.add_done_callback(lambda ended: ended.exception())
        self.news: asyncio.Queue[WatchNews] = asyncio.Queue()
        self.num_deaf_calls = 0
        self.num_stops = 0
        self.status_ = SimpleNamespace(
            request_ids=frozenset(), num_open_handoffs=0, num_open_leases=0, num_open_reads=0
        )
        process = process_of(self.process.pid)
        assert process is not None
        self.identity_ = ProcessIdentity("node", process)
        calls = ("identity", "start", "watch", "stop", "set_role", "status", "peer_given_up", "peer_died", "renew")
        for name in calls:
            setattr(self, name, SimpleNamespace(remote=partial(self._call, name)))

    @property
    def is_gone(self) -> bool:
        return self.process.poll() is not None

    def die(self) -> None:
        if not self.ended.done():
            self.ended.set_exception(RayActorError())

    async def _call(self, name: str, *args: Any) -> Any:
        if name == "identity":
            await self.ray.placed.wait()
            await eventually(lambda: psutil.Process(self.process.pid).status() != psutil.STATUS_STOPPED)
            return self.identity_
        if name == "start" and self.ray.num_bad_starts:
            self.ray.num_bad_starts -= 1
            raise ConfigError("no such model")
        if name == "start":
            await self.ray.loaded.wait()
            return self.card.address
        if name == "watch":
            news = asyncio.create_task(self.news.get())
            await asyncio.wait([news, self.ended], return_when=asyncio.FIRST_COMPLETED)
            if news.done():
                return news.result()
            news.cancel()
            return await asyncio.shield(self.ended)
        if name == "status":
            return self.status_
        if name == "stop":
            self.num_stops += 1
            await self.ray.stops.wait()
            if not self.ended.done():
                self.ended.set_result("stopped")
        if name.startswith("peer_"):
            if self.num_deaf_calls:
                self.num_deaf_calls -= 1
                raise WorkerError("it did not answer in 10 s")
            dead = next(actor for actor in self.ray.actors if actor.card.address == args[0])
            self.ray.told.append((self.config.worker_id, name, args[0], dead.is_gone))
        return None


class FakeWorkers:
    """The router's links."""

    def __init__(self, registry: Registry, fake_ray: FakeRay) -> None:
        self.registry = registry
        self.ray = fake_ray
        self.lost: list[str] = []  # workers that the supervisor told it to give up

    async def add_worker(self, address: PeerAddress) -> WorkerCard:
        actor = next(actor for actor in self.ray.actors if actor.card.address == address)
        add_ready(self.registry, actor.card)
        return actor.card

    def mark_dead(self, worker_id: str, reason: str) -> None:
        self.lost.append(worker_id)
        self.registry.set_state(worker_id, WorkerState.DEAD, reason)


@dataclass
class Supervised:
    config: ClusterConfig
    supervisor: Supervisor
    ray: FakeRay
    registry: Registry
    workers: FakeWorkers

    def roles(self) -> dict[str, Role]:
        return {worker.worker_id: worker.role for worker in self.registry}

    def die(self, worker_id: str) -> None:
        actor = self.ray.latest(worker_id)
        actor.process.kill()
        actor.process.wait()
        self.ray.kill(actor, no_restart=True)

    def orphan(self, worker_id: str, role: Role) -> OrphanedWorker:
        """A worker that an earlier server left, in this role."""
        [config] = [one for one in worker_configs(self.config) if one.worker_id == worker_id]
        actor = self.ray.start(replace(config, role=role), None)
        claim = WorkerClaim(
            process=actor.identity_,
            place=Place("group", len(self.ray.actors)),
            is_added=False,
            role=role,
            config=config,
            started=actor.card.address,
        )
        return OrphanedWorker(actor, claim)

    async def is_served(self, worker_id: str, epoch_above: int) -> None:
        await eventually(lambda: (w := self.registry.get(worker_id)) is not None and w.card.address.epoch > epoch_above)


QUICK = Timing(drain_poll_s=0.005, quiet_s=0.02)


@asynccontextmanager
async def supervised(
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_bad_starts: int = 0,
    max_restarts: int = 1,
    starts: bool = True,
    backoff: Backoff = Backoff(0.01, 60.0),
    timing: Timing = QUICK,
    **pools: Any,
) -> AsyncIterator[Supervised]:
    monkeypatch.setattr("tandem.cluster.worker_member._TELL_AGAIN_S", 0.01)
    monkeypatch.setattr("tandem.cluster.process_end._GRACE_S", 0.05)  # these actors' processes end by force alone
    fake_ray, registry = FakeRay(num_bad_starts=num_bad_starts), Registry()
    for module in ("member", "worker_member", "adoption"):
        monkeypatch.setattr(f"tandem.cluster.{module}.ray", fake_ray)
    monkeypatch.setattr("tandem.cluster.supervisor.WorkerBundles", FakeBundles)
    for name, answer in (("put", False), ("del", None), ("exists", False)):  # Ray's key-value store
        monkeypatch.setattr(f"tandem.cluster.node_requests._internal_kv_{name}", lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr("tandem.cluster.adoption._internal_kv_put", lambda *_, **__: False)
    config = ClusterConfig(engine=EngineConfig(model="m"), max_restarts=max_restarts, **({"autoscale": False} | pools))
    workers = FakeWorkers(registry, fake_ray)
    links: Any = workers
    budgets = ((one, RestartBudget(max_restarts, backoff)) for one in worker_configs(config))
    members = [WorkerMember(one, budget, links, registry) for one, budget in budgets]
    supervisor = Supervisor(config, registry, CostModel(), members, on_progress=lambda _: None, timing=timing)
    try:
        async with asyncio.timeout(60):
            if starts:
                await supervisor.start(lambda: 100.0)
            yield Supervised(config, supervisor, fake_ray, registry, workers)
    finally:
        await supervisor.close()
        fake_ray.close()
