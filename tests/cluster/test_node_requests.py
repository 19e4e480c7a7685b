"""What Ray's autoscaler is asked for. Ray is a fake."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tandem.cluster.node_requests import NodeRequests, Resources
from tests.support.waiting import eventually


class FakeRay:
    def __init__(self) -> None:
        self.requests: list[list[Resources]] = []
        self.num_failures = 0

    def send(self, service: str, bundles: Sequence[Resources]) -> None:
        assert service == "s"
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("the GCS does not answer")
        self.requests.append(list(bundles))


async def test_each_change_is_sent_once_and_the_end_withdraws() -> None:
    fake = FakeRay()
    requests = NodeRequests("s", fake.send)
    running = asyncio.create_task(requests.run())
    for bundles, num in (([{"CPU": 1.0}] * 2, 1), ([{"CPU": 1.0}] * 2, 1), ([{"CPU": 1.0}] * 3, 2)):
        requests.want(bundles)
        await eventually(lambda: not requests._is_changed.is_set())
        await eventually(lambda num=num: len(fake.requests) == num)  # type: ignore[misc]
    running.cancel()
    await requests.close()
    assert fake.requests == [[{"CPU": 1.0}] * 2, [{"CPU": 1.0}] * 3, []]
    await requests.close()
    assert len(fake.requests) == 3, "nothing is left to withdraw"


async def test_what_did_not_reach_ray_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.cluster.node_requests._AGAIN_S", 0.001)
    fake = FakeRay()
    fake.num_failures = 2
    requests = NodeRequests("s", fake.send)
    running = asyncio.create_task(requests.run())
    requests.want([{"GPU": 1.0}])
    await eventually(lambda: fake.requests == [[{"GPU": 1.0}]])
    fake.num_failures = 1
    requests.want([])
    await eventually(lambda: (fake.requests, requests._sent) == ([[{"GPU": 1.0}], []], []))
    running.cancel()
    await requests.close()
    assert len(fake.requests) == 2, "nothing is left to withdraw"


async def test_a_request_of_unknown_fate_is_withdrawn_too(caplog: pytest.LogCaptureFixture) -> None:
    """Ray may have heard it although its answer was lost."""
    fake = FakeRay()
    fake.num_failures = 1
    requests = NodeRequests("s", fake.send)
    running = asyncio.create_task(requests.run())
    requests.want([{"CPU": 1.0}])
    await eventually(lambda: "Ray was not told" in caplog.text)
    running.cancel()
    await requests.close()
    assert fake.requests == [[]]


async def test_what_an_earlier_server_left_is_replaced() -> None:
    fake = FakeRay()
    requests = NodeRequests("s", fake.send)
    requests.forget()
    await requests.close()
    assert fake.requests == [[]]
