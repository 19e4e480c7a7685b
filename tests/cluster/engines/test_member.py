"""What the supervisor does with an engine server, and what the router's fleet then has. Ray is a fake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.responses import JSONResponse
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError

from tandem.cluster.bundles import Bundle
from tandem.cluster.engines.actor import EngineEnd, EngineStarted
from tandem.cluster.engines.member import EngineFacts, EngineMember
from tandem.cluster.engines.server import EngineServer, Parallelism
from tandem.cluster.process_end import own_identity
from tandem.cluster.restarts import RestartBudget
from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import Role, WorkerState
from tandem.router.engines.engine_fleet import EngineFleet
from tandem.router.engines.local_dispatcher import LocalDispatcher
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry
from tests.support.fake_openai import FakeServer, fake_openai
from tests.support.fake_vllm import METRICS
from tests.support.managed import engine_server
from tests.support.waiting import eventually

SERVER = engine_server()
RANKED = replace(SERVER, parallelism=Parallelism(data=2))


@dataclass
class Placed:
    member: EngineMember
    fleet: EngineFleet
    engine: FakeServer
    end: asyncio.Future[EngineEnd]  # of the server
    ray: FakeRay

    async def start(self) -> None:
        async with asyncio.timeout(60):
            self.member.begin()
            await self.member.start(on_no_room=lambda _: None, on_placed=lambda: None)

    async def die(self, reason: str) -> None:
        """What the supervisor does after a death."""
        self.member.die(reason)
        await self.member.leave(reason)

    def roles(self) -> dict[str, tuple[Role, WorkerState]]:
        return {worker.worker_id: (worker.role, worker.state) for worker in self.fleet.registry}


@asynccontextmanager
async def placed(
    monkeypatch: pytest.MonkeyPatch, server: EngineServer = SERVER, outcome: EngineEnd | None = None
) -> AsyncIterator[Placed]:
    with fake_openai() as engine:
        engine.model, engine.metrics, engine.key = "toy", METRICS, "secret"
        started = outcome or EngineStarted(1, engine.url, "", "")
        end: asyncio.Future[EngineEnd] = asyncio.get_running_loop().create_future()
        fake_ray = FakeRay(started, end)
        monkeypatch.setattr("tandem.cluster.engines.member.ray", fake_ray)
        fleet = EngineFleet(
            registry=Registry(),
            index=PrefixIndex(),
            costs=CostModel(),
            config=RouterConfig(),
            engines=ExternalEnginesConfig(allow_local_engines=True, probe_interval_s=0.05),
        )
        member = EngineMember(server, Role.PREFILL, RestartBudget(3), fleet, EngineFacts("cpu", 1000))
        member.supervise(Bundle(1.0, 0.0, "DEFAULT"), None)
        try:
            yield Placed(member, fleet, engine, end, fake_ray)
        finally:
            await fleet.aclose()


class FakeRequest:
    has_answer = True

    def __init__(self) -> None:
        self.reasons: list[str] = []  # of its abortion

    def abort(self, engine: str, reason: str) -> None:
        self.reasons.append(reason)


class FakeRay:
    def __init__(self, started: EngineStarted | EngineEnd, end: asyncio.Future[EngineEnd]) -> None:
        self._answers = {"identity": own_identity("node"), "start": started, "stop": None}
        self._end = end
        self.num_dead_nodes = 0  # nodes that Ray chooses before it notices that they are dead

    def remote(self, _: type) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._actor))

    def _actor(self, _: EngineServer, terms: object) -> Any:
        methods = {name: SimpleNamespace(remote=lambda name=name: self._answer(name)) for name in self._answers}
        return SimpleNamespace(**methods, watch=SimpleNamespace(remote=lambda _: self._end))

    async def _answer(self, name: str) -> Any:
        if name == "identity" and self.num_dead_nodes:
            self.num_dead_nodes -= 1
            raise ActorDiedError(ActorDiedErrorContext(actor_id=b"a" * 16, never_started=True))
        return self._answers[name]


async def test_a_server_that_serves_joins_the_fleet_and_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with placed(monkeypatch) as here:
        await here.start()
        assert here.member.is_up
        assert here.roles() == {"prefill-0": (Role.PREFILL, WorkerState.READY)}
        engine = here.fleet["prefill-0"]
        assert engine.spec.request_headers()["authorization"] == "Bearer secret"
        assert engine.card is not None
        assert (engine.card.block_size, engine.card.block_bytes) == (16, 16_000)
        await here.die("it died")
        assert here.roles() == {}
        assert here.fleet.engines == []
        await here.die("it died")


async def test_a_worker_is_placed_again_after_ray_chose_a_node_that_was_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.member._PLACE_AGAIN_S", 0.0)
    async with placed(monkeypatch) as here:
        here.ray.num_dead_nodes = 2
        await here.start()
        assert here.member.is_up
        await here.die("a test")
        here.ray.num_dead_nodes = 3
        with pytest.raises(ActorDiedError, match="never ran"):
            await here.start()


async def test_a_server_that_comes_up_while_the_service_drains_still_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    async with placed(monkeypatch) as here:
        async with LocalDispatcher(here.fleet, [], {}).running():
            pass  # HTTP has ended
        await here.start()
        assert here.roles() == {"prefill-0": (Role.PREFILL, WorkerState.READY)}


async def test_each_rank_is_an_engine_and_all_flip_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async with placed(monkeypatch, RANKED) as here:
        await here.start()
        assert here.roles() == dict.fromkeys(("prefill-0.dp0", "prefill-0.dp1"), (Role.PREFILL, WorkerState.READY))
        assert await here.member.switch_role(Role.DECODE, "a test") == frozenset()
        assert here.roles() == dict.fromkeys(("prefill-0.dp0", "prefill-0.dp1"), (Role.DECODE, WorkerState.READY))
        await here.die("it died")
        assert here.roles() == {}


async def test_a_server_lives_on_in_its_new_role(monkeypatch: pytest.MonkeyPatch) -> None:
    async with placed(monkeypatch) as here:
        await here.start()
        await here.member.switch_role(Role.DECODE, "a test")
        request = FakeRequest()
        here.fleet["prefill-0"].begin(request, 0.0)
        await here.die("it died")
        assert request.reasons == ["it died"], "requests of a lost server are aborted with the reason"
        await here.start()
        assert here.roles() == {"prefill-0": (Role.DECODE, WorkerState.READY)}


async def test_requests_of_the_old_role_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with placed(monkeypatch) as here:
        await here.start()
        request, later = FakeRequest(), FakeRequest()
        here.fleet["prefill-0"].begin(request, 0.0)
        left = await here.member.switch_role(Role.DECODE, "a test")
        assert left == {request}
        finishing = asyncio.create_task(here.member.finish(left))
        here.fleet["prefill-0"].begin(later, 0.0)  # of its new role: not waited for
        here.fleet["prefill-0"].end(request)
        await finishing
        assert "1 requests run" in await here.member.check_integrity()


async def test_a_server_that_did_not_start_says_why_and_shows_its_last_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with placed(monkeypatch, outcome=EngineEnd("vllm ended with code 1: ValueError: no", ["a line"])) as here:
        with pytest.raises(WorkerError, match="vllm ended with code 1: ValueError: no"):
            await here.start()
        assert "the last lines of prefill-0:\n  a line" in caplog.text
        assert here.fleet.engines == []


async def test_the_end_of_a_server_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    async with placed(monkeypatch) as here:
        await here.start()
        ended = asyncio.create_task(here.member.ended(lambda: None))
        here.end.set_result(EngineEnd("vllm was ended by signal 9"))
        assert await ended == "vllm was ended by signal 9"


async def test_a_server_that_the_router_cannot_use_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.engines.member._JOIN_TIMEOUT_S", 0.3)
    async with placed(monkeypatch) as here:
        here.engine.health = 500
        with pytest.raises(WorkerError, match="the router cannot use the server at http://127"):
            await here.start()
        assert not here.member.is_up
        await here.die("it did not start")
        here.engine.health = 200
        await here.start()
        await eventually(lambda: here.member.is_up)


# -- halves of SGLang pairs -------------------------------------------------------------------------------

SWITCH = ("--disaggregation-transfer-backend", "mooncake", "--enable-pd-role-switch")
HALF = replace(SERVER, kind="sglang", arguments=SWITCH)


def switches(here: Placed, status: int, **content: Any) -> None:
    here.engine.replies["/pd_role_switch"] = lambda *_: JSONResponse(content, status)


async def test_half_of_a_pair_flips_when_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    async with placed(monkeypatch, HALF) as here:
        await here.start()
        switches(here, 200, success=True)
        request = FakeRequest()
        here.fleet["prefill-0"].begin(request, 0.0)
        flip = asyncio.create_task(here.member.switch_role(Role.DECODE, "a test"))
        await eventually(lambda: here.roles() == {"prefill-0": (Role.PREFILL, WorkerState.DRAINING)})
        assert not here.engine.requests
        here.fleet["prefill-0"].end(request)
        assert await flip == frozenset()
        assert here.engine.requests[0]["new_role"] == "decode"
        assert here.roles() == {"prefill-0": (Role.DECODE, WorkerState.READY)}
        assert here.member.role is Role.DECODE


@pytest.mark.parametrize(
    ("is_safe", "state"), [(True, WorkerState.READY), (False, WorkerState.DRAINING)], ids=["serves on", "starts again"]
)
async def test_half_a_pair_does_not_switch(monkeypatch: pytest.MonkeyPatch, is_safe: bool, state: WorkerState) -> None:
    """One that refused serves on. One that lost its role gets no request and is started again."""
    async with placed(monkeypatch, HALF) as here:
        await here.start()
        switches(here, 400, success=False, message="no headroom", safe_to_restore=is_safe)
        kills: list[bool] = []
        monkeypatch.setattr(here.member, "kill", lambda: kills.append(True))
        with pytest.raises(WorkerError, match="no headroom"):
            await here.member.switch_role(Role.DECODE, "a test")
        assert kills == [True] * (not is_safe)
        assert here.roles() == {"prefill-0": (Role.PREFILL, state)}
        assert here.member.role is Role.PREFILL


async def test_half_of_a_pair_without_a_switch_keeps_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    async with placed(monkeypatch, replace(HALF, arguments=())) as here:
        await here.start()
        assert "--enable-pd-role-switch" in here.member.fixed_role
        with pytest.raises(WorkerError, match="an SGLang server keeps its role"):
            await here.member.switch_role(Role.DECODE, "a test")
        assert here.roles() == {"prefill-0": (Role.PREFILL, WorkerState.READY)}
        assert not here.member.can_cover
