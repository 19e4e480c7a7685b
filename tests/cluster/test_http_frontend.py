from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send

from tandem.cluster import frontend
from tandem.cluster.frontend import drain, stop_serving
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.serve_app import create_app
from tandem.protocol.config import RouterConfig
from tandem.runtime.signals import StopSignals
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_worker import fake_cluster, first_token, one_token
from tests.support.quick_server import http_server
from tests.support.toy_tokenizer import build_tokenizer
from tests.support.waiting import eventually


@pytest.mark.parametrize("is_hurried", [False, True], ids=["deadline", "second signal"])
@pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "plain"])
def test_answers_that_do_not_end_in_time_end_with_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_hurried: bool, is_stream: bool
) -> None:
    tokenizer = Tokenizer(build_tokenizer(tmp_path))
    timeout_s = 600.0 if is_hurried else 0.05
    told: list[str] = []

    async def scenario() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with fake_cluster(prefill=first_token, decode=one_token) as cluster, asyncio.timeout(20):
            app = create_app(cluster.flow, tokenizer, RouterConfig(), CollectorRegistry(), api_keys=ApiKeys())
            async with (
                app.router.lifespan_context(app),
                http_server(app, RouterConfig(), listener, CollectorRegistry()) as server,
                httpx.AsyncClient(base_url=base_url) as client,
            ):
                body = {"model": "toy", "prompt": "hello " * 20, "max_tokens": 9, "stream": is_stream}
                request = client.build_request("POST", "/v1/completions", json=body)
                asking = asyncio.create_task(client.send(request, stream=True))
                if is_stream:
                    await asyncio.wait({asking})  # the first token is here
                await eventually(lambda: cluster.registry.num_bookings == 2)  # this one and the readiness probe
                stop_now = asyncio.Event()
                if is_hurried:
                    stop_now.set()
                await drain(server, stop_now, cluster.flow.shut_down, timeout_s, told.append)
                answer = await asking
                text = (await answer.aread()).decode()
                assert "the server is shutting down" in text
                assert '"code":"shutting_down"' in text
                assert answer.status_code == (200 if is_stream else 503)
                assert server.serving.done()
            cluster.assert_nothing_left()

    asyncio.run(scenario())
    assert told == [f"stopping: waiting up to {timeout_s:g} s for 1 answer (a second signal stops now)"]
    assert "Traceback" not in caplog.text


async def test_frontend_processes_end_before_requests_do() -> None:
    """A frontend process may still read a request, or end an answer, of which the deciding process knows nothing."""
    happened: list[str] = []

    class Frontends:
        is_serving, num_running = True, 0

        def __init__(self) -> None:
            self.serving: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def drain(self) -> None:
            def end() -> None:
                happened.append("frontends ended")
                self.serving.set_result(None)

            asyncio.get_running_loop().call_later(0.05, end)

    flow: Any = SimpleNamespace(shut_down=lambda: happened.append("flow ended"))
    await drain(Frontends(), asyncio.Event(), flow.shut_down, 20.0, happened.append)
    assert happened == ["stopping", "frontends ended", "flow ended"]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([signal.SIGINT], ["drain", 2.0, "flow ended"]),
        ([signal.SIGTERM], ["leave", 7.0, "drain", 9.0, "flow ended"]),
        ([signal.SIGINT, signal.SIGTERM], ["drain", 2.0, "flow ended"]),
    ],
    ids=["Ctrl-C", "SIGTERM", "SIGTERM after Ctrl-C"],
)
async def test_sigterm_gives_load_balancers_and_answers_time_and_ctrl_c_does_not(
    monkeypatch: pytest.MonkeyPatch, numbers: list[int], expected: list[str | float]
) -> None:
    happened: list[str | float] = []

    async def wait(*_: Any, timeout_s: float) -> None:
        happened.append(timeout_s)

    served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    served.set_result(None)
    server: Any = SimpleNamespace(
        leave=lambda: happened.append("leave"), drain=lambda: happened.append("drain"), num_running=1, serving=served
    )
    monkeypatch.setattr(frontend, "wait_for_any", wait)
    signals = StopSignals()
    for number in numbers:
        signals.note(number)
    assert signals.stop_now.is_set() == (len(numbers) > 1)
    config = RouterConfig(drain_timeout_s=2.0, shutdown_delay_s=7.0, shutdown_grace_s=9.0)
    await stop_serving(server, signals, lambda: happened.append("flow ended"), config, lambda _: None)
    assert happened == expected


def test_a_client_that_does_not_read_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the client is gone."""
        assert scope["type"] == "http"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        gone = asyncio.create_task(_gone(receive))
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)

    async def scenario() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        async with asyncio.timeout(20):
            async with http_server(endless, RouterConfig(), listener, CollectorRegistry()) as server:
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                await eventually(lambda: server.num_running == 1)
            assert server.serving.done()
            writer.close()

    asyncio.run(scenario())
    assert "Traceback" not in caplog.text


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
