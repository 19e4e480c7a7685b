"""How often the text of `/metrics` is built, and who sees what of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily

from tandem.frontend.http.app import RouterApp
from tandem.frontend.http.exposition import registry_text
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.shared_routes import add_operation_routes
from tandem.protocol.config import RouterConfig
from tests.support.apps import app_client
from tests.support.keys import api_keys_of


class Collected:
    def __init__(self) -> None:
        self.threads: list[int] = []

    def describe(self) -> list[GaugeMetricFamily]:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.threads.append(threading.get_ident())
        yield GaugeMetricFamily("tandem_counted", "reads", value=len(self.threads))


def client_of(registry: CollectorRegistry) -> httpx.AsyncClient:
    keys = api_keys_of({"sk-operator-0123": "*", "sk-tenant-012345": "search"})
    app = RouterApp(RouterConfig(), FrontendMetrics(registry), keys)

    async def no_pools() -> dict[str, object]:
        return {}

    add_operation_routes(
        app,
        not_ready=lambda: None,
        scrape=lambda: registry_text(registry, RouterConfig(), []),
        pools=no_pools,
        scrape_interval_s=0.0,
    )
    return app_client(app)


async def test_all_who_ask_at_the_same_time_get_one_text() -> None:
    registry, collected = CollectorRegistry(), Collected()
    registry.register(collected)
    async with client_of(registry) as client:
        answers = await asyncio.gather(*(client.get("/metrics") for _ in range(100)))
        assert len({answer.text for answer in answers}) <= 2
        num_read = len(collected.threads)
        assert num_read <= 2, "one for the first, and one for all who came during that"
        assert f"tandem_counted {num_read + 1}.0" in (await client.get("/metrics")).text
    assert set(collected.threads) == {threading.get_ident()}, "our collectors read what the event loop changes"


async def test_the_text_is_never_older_than_the_question() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("tandem_now", "now", registry=registry)
    async with client_of(registry) as client:
        for number in range(5):
            gauge.set(number)
            assert f"tandem_now {number}.0" in (await client.get("/metrics")).text


async def test_samples_of_a_tenant_or_a_key_are_for_operators() -> None:
    registry = CollectorRegistry()
    for label in ("tenant", "key_id", "kind"):
        Counter(f"tandem_of_{label}", "x", [label], registry=registry).labels("a").inc()
    async with client_of(registry) as client:
        for key, sees in (("", False), ("sk-tenant-012345", False), ("sk-operator-0123", True)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            text = (await client.get("/metrics", headers=headers)).text
            assert 'tandem_of_kind_total{kind="a"}' in text
            assert ('tenant="a"' in text) == ('key_id="a"' in text) == sees
