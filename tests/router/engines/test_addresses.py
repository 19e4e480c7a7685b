from __future__ import annotations

import asyncio
import socket
import time
from contextlib import closing
from typing import Any

import pytest

from tandem.protocol.errors import ConfigError
from tandem.router.engines import addresses as addresses_module
from tandem.router.engines.addresses import AddressRefused, check_addresses, is_local, public_addresses
from tandem.router.engines.config import spec_from
from tandem.router.engines.probe_client import ProbeClient, ProbeFailed
from tandem.router.engines.upstream import Unreachable, Upstream
from tests.support.engines_harness import routing, spec_of
from tests.support.fake_openai import FakeServer
from tests.support.waiting import eventually

TOKEN = {"authorization": "Bearer secret"}

LOCAL = [
    *("127.0.0.1", "127.1.2.3", "0.0.0.0", "0.1.2.3", "169.254.169.254", "::1", "::", "fe80::1", "fe80::1%eth0"),
    *("::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
    *("2002:7f00:1::", "fd00:ec2::254", "100.100.100.200", "168.63.129.16", "224.0.0.1", "ff02::1"),
]
PUBLIC = ["10.0.0.5", "192.168.1.2", "172.16.0.1", "8.8.8.8", "fd00::5", "2001:db8::1", "::ffff:10.0.0.5", "100.64.0.1"]


@pytest.mark.parametrize(("address", "expected"), [*((one, True) for one in LOCAL), *((one, False) for one in PUBLIC)])
def test_local_addresses_are_known_however_they_are_wrapped(address: str, expected: bool) -> None:
    assert is_local(address) == expected


@pytest.mark.parametrize(
    "url",
    [
        *(
            f"http://{host}:8831"
            for host in ("127.0.0.1", "localhost", "2130706433", "0x7f000001", "127.1", "0177.0.0.1")
        ),
        *(f"http://{host}:8831" for host in ("[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "0", "[::]")),
        *("http://localhost", "https://localhost/v1"),
    ],
)
async def test_an_engine_on_this_machine_cannot_be_added_at_run_time(url: str) -> None:
    async with routing(admin_token="secret", allow_local_engines=False) as router:
        response = await router.client.post("/v1/engines", json={"name": "x", "url": url}, headers=TOKEN)
        assert response.status_code == 400
        assert "--allow-local-engines" in response.json()["error"]["message"]
        assert router.fleet.engines == []


@pytest.mark.parametrize(
    "endpoints",
    [
        {"kv_events": "ipc:///run/other"},
        {"kv_events": "tcp://127.0.0.1:5557"},
        {"kv_events": "tcp://[::1]:5557"},
        {"kv_events": "tcp://localhost:5557"},  # ZMQ resolves names by itself, whenever it connects
        {"kv_events": "tcp://127.1:5557"},
        {"kv_events": "tcp://10.0.0.9:0;127.0.0.1:5557"},
        {"kv_events": "tcp://10.0.0.9:5557", "kv_replay": "tcp://169.254.169.254:80"},
    ],
)
async def test_kv_events_of_a_runtime_engine_come_from_no_local_address(endpoints: dict[str, str]) -> None:
    good = {"name": "x", "url": "http://10.0.0.9:1", "model": "m"}
    await check_addresses(spec_from(good | {"kv_events": "tcp://10.0.0.9:5557"}, "test"), 5.0)
    with pytest.raises(ConfigError, match="numeric address"):
        await check_addresses(spec_from(good | endpoints, "test"), 5.0)


async def test_engines_of_the_operators_file_may_be_local(fake_a: FakeServer) -> None:
    async with routing(spec_of(fake_a, "a"), admin_token="secret", allow_local_engines=False) as router:
        again = {"name": "b", "url": fake_a.url}  # at the address that the file names
        assert (await router.client.post("/v1/engines", json=again, headers=TOKEN)).status_code == 201
        await router.all_ready("a", "b")


async def test_a_name_that_turns_local_is_not_connected_to(fake_a: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The addresses that the name of the engine resolves to change during the test."""
    port = int(fake_a.url.rpartition(":")[2])
    meant, local = ["127.0.0.1"], set[str]()
    asked: list[str] = []

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in meant]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(addresses_module, "is_local", local.__contains__)
    url = f"http://engine.example:{port}"
    with closing(ProbeClient(url, {}, public_addresses)) as client:
        upstream = Upstream(url, {}, connect_timeout_s=5.0, resolve=public_addresses)
        assert (await client.get("/health", 5.0)).status == 200
        reply = await upstream.post("/v1/completions", b'{"prompt": "a", "max_tokens": 1, "stream": false}', "r")
        assert reply.status == 200
        reply.close()
        upstream.close()
        await asyncio.sleep(0)  # the connections close in the next turn of the event loop
        assert set(asked) == {"engine.example"}  # what was checked is what was connected to
        for meant[:], now_local in ((["127.0.0.1"], "127.0.0.1"), (["127.0.0.1", "127.0.0.9"], "127.0.0.9")):
            local.clear()
            local.add(now_local)
            with pytest.raises(Unreachable, match="--allow-local-engines"):
                await upstream.post("/", b"", "r")
            with pytest.raises(AddressRefused):
                await public_addresses("engine.example", port)
    with (
        closing(ProbeClient(url, {}, public_addresses)) as client,
        pytest.raises(ProbeFailed, match="--allow-local-engines") as refused,
    ):
        await client.get("/health", 5.0)
    assert refused.value.is_absent


async def test_a_redirect_is_not_followed(fake_a: FakeServer) -> None:
    fake_a.health = 302
    async with routing(spec_of(fake_a, "a"), wait=False) as router:
        await eventually(lambda: router.engine("a").reason == "its health check answered 302")


async def test_probes_are_bounded_in_size_and_time(fake_a: FakeServer) -> None:
    fake_a.metrics = "x" * (9 << 20)
    with closing(ProbeClient(fake_a.url, {}, None)) as client:
        with pytest.raises(ProbeFailed, match="larger than"):
            await client.get("/metrics", 10.0)
        fake_a.health_pause.clear()
        with pytest.raises(ProbeFailed):
            await client.get("/health", 0.1)
        fake_a.resume()


async def test_a_probe_answered_while_this_process_was_paused_counts(fake_a: FakeServer) -> None:
    with closing(ProbeClient(fake_a.url, {}, None)) as client:
        asking = asyncio.create_task(client.get("/health", 0.3))
        await asyncio.sleep(0)
        time.sleep(0.6)  # noqa: ASYNC251 - this event loop itself must stall
        assert (await asking).status == 200
