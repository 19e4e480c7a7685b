"""A real Ray without room for a third worker: nodes are asked for, then the request is withdrawn."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
from ray.experimental.internal_kv import _internal_kv_get

from tandem.cluster import autoscale
from tandem.cluster.node_requests import NodeRequests, has_left_request, withdraw_left_request
from tandem.cluster.ownership import LeaseTerms
from tandem.cluster.process_end import ProcessIdentity
from tandem.cluster.supervisor import Supervisor
from tandem.protocol.config import ClusterConfig, EngineConfig
from tandem.protocol.messages import Role
from tandem.protocol.process import process_of
from tandem.scheduling.autoscaling.policy import AutoscalerPolicy
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.workers.registry import Registry
from tests.support.plain_member import PlainMember
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

CORE = {"CPU": 1.0}
DEADLINE_S = 4.0


class Actor:
    def identity(self) -> ProcessIdentity:
        process = process_of(os.getpid())
        assert process is not None
        return ProcessIdentity(ray.get_runtime_context().get_node_id(), process)

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    async def watch(self, owner: str) -> str:
        await asyncio.Event().wait()
        return ""


class RayMember(PlainMember):
    """A process in a bundle of Ray."""

    def _create_actor(self, options: dict[str, Any], terms: LeaseTerms | None) -> Any:
        return ray.remote(Actor).options(**options).remote()


@pytest.fixture
def two_cores() -> Iterator[None]:
    """Ray as other tests of this process start it: a process keeps the token that its first Ray had."""
    with tempfile.TemporaryDirectory(
        prefix="t-", ignore_cleanup_errors=True
    ) as folder:  # short: Ray puts sockets in it
        ray.init(address="local", num_cpus=2, include_dashboard=False, _temp_dir=folder, logging_level="ERROR")
        try:
            yield
        finally:
            ray.shutdown()


def requested() -> list[dict[str, float]] | None:
    """What Ray's autoscaler reads; None if nobody has asked for anything."""
    text = _internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL)
    return None if text is None else list(json.loads(text))


async def arrive(registry: Registry) -> None:
    """Far more prompts than the workers can compute in time."""
    while True:
        registry.demand.note(4000, 0, 1.0, 0.1)
        await asyncio.sleep(0.2)  # the pace of the prompts


def is_pending(group: dict[str, Any]) -> bool:
    return group["state"] == "PENDING"


@pytest.mark.usefixtures("two_cores")
async def test_what_a_server_that_died_has_asked_for_is_known_and_withdrawn() -> None:
    requests = NodeRequests("s")
    requests.want([CORE] * 3)
    assert await requests._told()  # and it dies
    assert requested() == [CORE] * 3
    withdraw_left_request("another")
    assert requested() == [CORE] * 3
    assert has_left_request("s")
    withdraw_left_request("s")
    assert requested() == []
    assert not has_left_request("s")


@pytest.mark.usefixtures("two_cores")
async def test_a_worker_without_room_is_requested_and_then_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = AutoscalerPolicy(acts=frozenset({"add"}), max_workers=3, move_deadline_s=DEADLINE_S, start_deadlines=0.0)
    monkeypatch.setattr(autoscale, "policy_of", lambda _: policy)
    config = ClusterConfig(
        engine=EngineConfig(model="m"),
        max_workers=3,
        num_cpus_per_worker=1.0,
        autoscale_interval_s=0.2,
        ray_address="auto",  # as if this Ray were a cluster that may grow
        orphan_timeout_s=0.0,
    )
    registry = Registry()
    members = [RayMember("prefill-0", Role.PREFILL, registry), RayMember("decode-0", Role.DECODE, registry)]
    supervisor = Supervisor(config, registry, CostModel(), members, on_progress=lambda _: None)
    try:
        await supervisor.start(lambda: 100.0)
        await eventually(lambda: requested() == [])  # what another server may have left
        arriving = asyncio.create_task(arrive(registry))
        await eventually(lambda: requested() == [CORE] * 3)
        (arrival,) = supervisor.joins.latest
        await eventually(lambda: requested() == [])
        assert "Ray has found no room by its deadline" in str(arrival["withdrawn"])
        assert set(supervisor.members) == {"prefill-0", "decode-0"}
        await eventually(lambda: not [one for one in ray.util.placement_group_table().values() if is_pending(one)])
        arriving.cancel()
    finally:
        await supervisor.close()
    assert requested() == []
