"""Leases of workers that outlive their server, and what becomes of these workers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from tandem.cluster import adoption
from tandem.cluster.adoption import adopt_orphans, give_to_members, renew_leases
from tandem.cluster.owned_actor import OrphanedWorker, OwnedActor, WatchNews, WorkerClaim
from tandem.cluster.ownership import LEASE_S, LeaseTerms, Owner, Ownership, Place, owner_of
from tandem.cluster.process_end import ProcessIdentity
from tandem.cluster.restarts import RestartBudget
from tandem.cluster.worker_layout import worker_configs
from tandem.cluster.worker_member import WorkerMember
from tandem.protocol.config import ClusterConfig, EngineConfig, WorkerConfig
from tandem.protocol.errors import ConfigError, WorkerError
from tandem.protocol.messages import Role
from tandem.protocol.process import own_process

OWNER = Owner(service="s", orphan_timeout_s=60.0, name="us")


def test_a_worker_is_anothers_only_once_the_lease_has_run_out() -> None:
    ownership = Ownership("a", 0.0)
    assert ownership.claim("b", LEASE_S - 0.1) == "a"
    assert ownership.renew("a", LEASE_S - 0.1)
    assert ownership.claim("b", LEASE_S + 0.1) == "a", "it was renewed"
    assert ownership.claim("b", 2 * LEASE_S) == ""
    assert ownership.is_of("b")
    assert not ownership.renew("a", 2 * LEASE_S + 0.1), "the stalled one is told"
    assert ownership.claim("a", 2 * LEASE_S + 0.1) == "b"
    assert ownership.claim("b", 2 * LEASE_S + 0.2) == "", "an owner may claim again"


def test_a_lease_that_ran_out_is_renewed_unless_another_has_the_worker() -> None:
    ownership = Ownership("a", 0.0)
    assert ownership.orphaned_s(LEASE_S + 5.0) == 5.0
    assert ownership.renew("a", LEASE_S + 5.0)
    assert ownership.orphaned_s(LEASE_S + 5.0) == -LEASE_S


def test_a_worker_that_is_about_to_end_is_nobodys_any_more() -> None:
    """Its claimer would go on with a process that ends, and whose place is given back."""
    ownership = Ownership("a", 0.0)
    assert not ownership.end(5.0, LEASE_S + 4.9)
    assert ownership.claim("b", LEASE_S + 4.9) == ""
    assert not ownership.end(5.0, LEASE_S + 5.1), "it was claimed in time"
    assert ownership.end(5.0, 2 * LEASE_S + 10.0)
    with pytest.raises(WorkerError, match="it ends, as no server asked for it in time"):
        ownership.claim("c", 2 * LEASE_S + 10.0)


class PlainActor(OwnedActor):
    """An actor in the process of the test. `os._exit` is replaced."""

    def identity(self) -> ProcessIdentity:
        return ProcessIdentity("node", own_process())

    def _obey(self, router_key: str) -> tuple[Any, Any, Role]:
        return None, "address", Role.DECODE

    def stop(self) -> None:
        pass

    def news(self, owner: str) -> WatchNews | None:
        """What the `watch` of a real actor would return now."""
        return self._news(owner)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The exit codes of this process, which goes on. Actors think that they have it for themselves."""
    codes: list[int] = []
    monkeypatch.setattr("tandem.cluster.owned_actor.ray.is_initialized", lambda: True)
    monkeypatch.setattr("tandem.cluster.owned_actor.os._exit", codes.append)
    monkeypatch.setattr("tandem.cluster.owned_actor._UNHEARD_S", 1e6)
    former = signal.signal(signal.SIGTERM, lambda *_: codes.append(-signal.SIGTERM))
    yield codes
    signal.signal(signal.SIGTERM, former)


def test_a_second_sigterm_ends_a_worker_at_once(exits: list[int]) -> None:
    actor = PlainActor(None)
    signal.raise_signal(signal.SIGTERM)
    assert actor.news("") is WatchNews.ASKED_TO_LEAVE
    assert actor.news("") is None
    assert exits == []
    signal.raise_signal(signal.SIGTERM)
    assert exits == [1]


def test_the_next_server_hears_of_a_sigterm_to_the_dead_one(monkeypatch: pytest.MonkeyPatch, exits: list[int]) -> None:
    monkeypatch.setattr("tandem.cluster.ownership.LEASE_S", 0.0)
    actor = PlainActor(LeaseTerms(owner=replace(OWNER, orphan_timeout_s=1e6), place=Place("ab", 0), is_added=False))
    assert isinstance(actor.claim("next", "key"), WorkerClaim)
    assert actor.news("next") is None
    signal.raise_signal(signal.SIGTERM)
    assert actor.news("next") is WatchNews.ASKED_TO_LEAVE
    assert isinstance(actor.claim("next but one", "key"), WorkerClaim)
    assert actor.news("next but one") is WatchNews.ASKED_TO_LEAVE
    assert exits == []


def test_only_workers_of_a_joined_cluster_outlive_their_server() -> None:
    config = ClusterConfig(engine=EngineConfig(model="m"))
    assert owner_of(config) is None
    joined = replace(config, ray_address="auto", service_name="x")
    owner = owner_of(joined)
    assert owner is not None
    assert owner.namespace == "tandem/x"
    assert owner_of(replace(joined, orphan_timeout_s=0.0)) is None


class Actors:
    """Named actors of a cluster, by name: what each answers to a claim."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
        self.answers = answers
        self.killed: list[str] = []
        listed = [{"name": name, "namespace": "tandem/s"} for name in answers] + [{"name": "x", "namespace": "other"}]
        monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: listed)
        monkeypatch.setattr(ray, "get_actor", self._get_actor)
        monkeypatch.setattr(ray, "kill", lambda actor, no_restart: self.killed.append(actor.name))
        self.store: dict[str, bytes] = {}  # Ray's
        monkeypatch.setattr(adoption, "_internal_kv_get", lambda key, **_: self.store.get(key))
        monkeypatch.setattr(adoption, "_internal_kv_put", lambda key, value, **_: self.store.update({key: value}))
        monkeypatch.setattr(adoption, "_ASK_AGAIN_S", 0.01)

    def _get_actor(self, name: str, namespace: str) -> SimpleNamespace:
        if self.answers[name] is None:
            raise ValueError("it has ended")
        return SimpleNamespace(name=name, claim=SimpleNamespace(remote=lambda *_: self._claim(name)))

    async def _claim(self, name: str) -> Any:
        answer = self.answers[name]
        if callable(answer):
            return await answer()
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def config_of(worker_id: str = "decode-0", **engine: Any) -> WorkerConfig:
    cluster = ClusterConfig(engine=EngineConfig(model="m", **engine), ray_address="auto")
    [config] = [one for one in worker_configs(cluster) if one.role is Role.DECODE]
    return replace(config, worker_id=worker_id)


def claim_of(config: WorkerConfig | None = None, **fields: Any) -> WorkerClaim:
    claim = WorkerClaim(
        process=ProcessIdentity("node", own_process()),
        place=Place("ab", 1),
        is_added=False,
        role=Role.DECODE,
        config=config or config_of(),
        started="address",
    )
    return replace(claim, **fields)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[ProcessIdentity]:
    """Processes whose end was waited for."""
    ends: list[ProcessIdentity] = []

    async def until_gone(process: ProcessIdentity) -> None:
        ends.append(process)

    monkeypatch.setattr(adoption, "until_gone", until_gone)
    return ends


async def test_the_useful_are_claimed_and_others_end(
    monkeypatch: pytest.MonkeyPatch, ended: list[ProcessIdentity]
) -> None:
    good = claim_of()
    actors = Actors(
        monkeypatch,
        good=["pid 7 on h", "pid 7 on h", good],  # its server's lease runs out meanwhile
        dead=RayActorError(),
        gone=None,
        loading=claim_of(started=None),
        old=claim_of(wire_version=1),
        deaf=WorkerError("it did not answer in 10 s"),
    )
    claimed: list[OrphanedWorker] = []
    await adopt_orphans(OWNER, "key", claimed)
    [orphan] = claimed
    assert orphan.claim is good
    assert sorted(actors.killed) == ["dead", "deaf", "loading", "old"]
    assert len(ended) == 2, "of those that told their process"


async def test_a_server_that_lives_keeps_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "_WAIT_FOR_LEASE_S", 0.05)
    actors = Actors(monkeypatch, one="pid 7 on h")
    with pytest.raises(ConfigError, match=r"has this name: pid 7 on h.*--service-name"):
        await adopt_orphans(OWNER, "key", [])
    assert actors.killed == []


@pytest.mark.parametrize(
    ("signs", "is_refused"),
    [([40, 41, 42], True), ([40, 40], False), ([40, 41, 41], False)],
    ids=["alive", "dead", "died just now"],
)
async def test_workers_that_wait_for_room_are_their_servers_while_it_lives(
    monkeypatch: pytest.MonkeyPatch, signs: list[int], is_refused: bool
) -> None:
    monkeypatch.setattr(adoption, "_CLAIM_TIMEOUT_S", 0.01)
    monkeypatch.setattr(adoption, "RENEW_S", 0.01)

    async def claim() -> None:
        await asyncio.get_running_loop().create_future()

    actors = Actors(monkeypatch, waits=claim)
    monkeypatch.setattr(adoption, "_internal_kv_get", lambda *_, **__: f"pid 7 on h {signs.pop(0)}".encode())
    if is_refused:
        with pytest.raises(ConfigError, match=r"has this name: pid 7 on h\. .*--service-name"):
            await adopt_orphans(OWNER, "key", [])
    else:
        await adopt_orphans(OWNER, "key", [])
    assert actors.killed == ([] if is_refused else ["waits"])
    assert signs == []


async def test_workers_that_do_not_answer_are_waited_for_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that found no room for sixteen workers would cost the next one minutes."""
    may_answer, num_asked = asyncio.Event(), 0

    async def claim() -> WorkerClaim:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:
            may_answer.set()
        await may_answer.wait()
        return claim_of()

    actors = Actors(monkeypatch, a=claim_of(), b=claim, c=claim, d=claim_of())
    claimed: list[OrphanedWorker] = []
    await asyncio.wait_for(adopt_orphans(OWNER, "key", claimed), 5)
    assert (len(claimed), actors.killed) == (4, [])


def member(config: WorkerConfig) -> WorkerMember:
    unused: Any = None
    return WorkerMember(config, RestartBudget(1), unused, unused)


async def test_a_member_adopts_a_worker_of_its_name_that_is_as_it_would_start_it(
    monkeypatch: pytest.MonkeyPatch, ended: list[ProcessIdentity]
) -> None:
    actors = Actors(monkeypatch)

    def orphan(name: str, claim: WorkerClaim) -> OrphanedWorker:
        return OrphanedWorker(SimpleNamespace(name=name), claim)

    members: dict[str, Any] = {"decode-0": member(config_of()), "decode-1": member(config_of("decode-1"))}
    same = replace(config_of(), router_key="another router's", role=Role.PREFILL)
    found = [
        orphan("same", claim_of(same, role=Role.PREFILL)),
        orphan("twice", claim_of()),
        orphan("other", claim_of(config_of("decode-1", block_size=8))),
        orphan("surplus", claim_of(config_of("decode-2"))),
        orphan("added", claim_of(config_of("decode-3"), is_added=True)),
        orphan("added-other", claim_of(config_of("decode-4", block_size=8), is_added=True)),
        orphan("colocated", claim_of(replace(config_of("colocated-1"), role=Role.COLOCATED), is_added=True)),
    ]
    added = await give_to_members(found, members)
    assert [one.actor.name for one in added] == ["added"]
    assert members["decode-0"].orphan is found[0]
    assert members["decode-1"].orphan is None
    assert (sorted(actors.killed), len(ended)) == (["added-other", "colocated", "other", "surplus", "twice"], 5)


async def test_a_server_lets_go_of_claimed_workers_but_not_of_late_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "RENEW_S", 0.01)
    signs = Actors(monkeypatch).store
    one, other = member(config_of()), member(config_of("decode-1"))
    one.process = other.process = ProcessIdentity("node", own_process())
    answers: list[bool] = [True, True, False]
    told: list[WorkerError] = []

    async def renew(_: str) -> bool:
        return answers.pop(0)

    async def never(_: str) -> bool:
        return await asyncio.get_running_loop().create_future()

    one.actor = SimpleNamespace(renew=SimpleNamespace(remote=renew))
    other.actor = SimpleNamespace(renew=SimpleNamespace(remote=never))
    await asyncio.wait_for(renew_leases(OWNER, {"a": one, "b": other}, told.append), 30)
    assert answers == []
    assert str(signs["server/s"]).startswith("us ")
    assert "another server has claimed the workers of service_name='s'" in str(told[0])
