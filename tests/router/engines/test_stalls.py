"""Engines whose HTTP server answers while their core hangs: their requests go on elsewhere, and they come back."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.protocol.config import RouterConfig
from tandem.protocol.messages import WorkerState
from tandem.router.engines.config import spec_from
from tests.frontend.relay.test_moves import (
    CHAT_BODY,
    COMPLETION_BODY,
    SCRIPT,
    TEXT,
    ask,
    assert_whole,
    error_of,
    text_of,
)
from tests.support.engines_harness import CHAT, Deciding, Router, routing, routing_by_decider, spec_of
from tests.support.fake_backend import SlowClient
from tests.support.fake_openai import FakeServer
from tests.support.scripted_engine import Script, ScriptedEngine, script_on
from tests.support.waiting import eventually

STALL_S = 1.0
ROOT = Path(__file__).parents[3]
PLAIN = {"prompt": "hi", "max_tokens": 50}
LONG = Script([b"word "] * 60)


def fields_of(fake: FakeServer, name: str) -> dict[str, Any]:
    return {"name": name, "url": fake.url, "kind": "vllm"}


async def probed(fake: FakeServer, num_probes: int) -> None:
    """Wait until the engine has been probed this many more times; it is probed every 20 ms at most."""
    enough = fake.num_probes["/health"] + num_probes
    await eventually(lambda: fake.num_probes["/health"] >= enough)


async def begin(router: Router, engine: ScriptedEngine, *bodies: dict[str, Any]) -> list[asyncio.Task[httpx.Response]]:
    """Send requests, all of whose streams then stall."""
    num_streams = engine.num_standing + sum(bool(body.get("stream")) for body in bodies)
    tasks = [asyncio.create_task(ask(router, body)) for body in bodies]
    await eventually(lambda: engine.num_standing == num_streams)
    return tasks


async def stalled(router: Deciding, name: str, times: int = 1) -> None:
    await eventually(lambda: router.engine(name).num_stalls == times)


async def test_requests_of_a_stalled_engine_go_on_elsewhere(fake_a: FakeServer, fake_b: FakeServer) -> None:
    one = script_on(fake_a, SCRIPT, hung_at=5)
    script_on(fake_b, SCRIPT)
    async with routing(spec_of(fake_a, "a"), engine_stall_s=STALL_S) as router:
        answers = await begin(router, one, CHAT_BODY, COMPLETION_BODY, CHAT_BODY, PLAIN, CHAT_BODY | {"seed": 7})
        await eventually(lambda: len(fake_a.requests) == 5)
        await router.dispatcher.add_engine(fields_of(fake_b, "b"))
        await router.all_ready("b")
        *moved, plain, seeded = await asyncio.gather(*answers)
        for answer in moved:
            assert_whole(answer)
        assert plain.json()["choices"][0]["text"] == TEXT
        error = error_of(seeded)
        assert error["code"] == "engine_failed"
        assert error["message"].startswith("engine a: it has stalled: it computed nothing for ")
        assert "(engine_stall_s=1)" in error["message"]
        assert error["message"].endswith("'seed' is set")
        shown = router.engine("a").to_json(router.dispatcher.now())
        assert shown["state"] == "dead"
        assert shown["circuit"] != "closed"
        assert "it has stalled" in shown["reason"]
        metrics = (await router.client.get("/metrics")).text
        assert 'tandem_engine_stalls_total{engine="a"} 1.0' in metrics
        assert 'tandem_engine_stalls_total{engine="b"} 0.0' in metrics
        # It answers its probes, and one question waits; no client's request goes there.
        await probed(fake_a, 30)
        assert router.engine("a").state is WorkerState.DEAD
        assert one.num_questions == 1
        num_requests = len(fake_a.requests)
        assert_whole(await ask(router, CHAT_BODY))
        assert len(fake_a.requests) == num_requests
        one.hung_at = None
        await router.all_ready("a")
        assert router.engine("a").breaker.allows(router.dispatcher.now())


@pytest.mark.parametrize(
    "filler", [b": keep-alive\n\n", b"x", b"data: {}\n\n"], ids=["comments", "parts of an event", "empty events"]
)
async def test_bytes_that_are_not_tokens_show_no_step(fake_a: FakeServer, fake_b: FakeServer, filler: bytes) -> None:
    one = script_on(fake_a, SCRIPT, hung_at=4, filler=filler)
    script_on(fake_b, SCRIPT)
    async with routing(spec_of(fake_a, "a"), engine_stall_s=STALL_S) as router:
        (answer,) = await begin(router, one, CHAT_BODY)
        await router.dispatcher.add_engine(fields_of(fake_b, "b"))
        assert text_of(await answer) == TEXT
        assert router.engine("a").num_stalls == 1
        one.hung_at = None


@pytest.mark.parametrize(("hung_at", "stall_s"), [(1, 0.2), (5, 0.0)], ids=["only the role", "the rule is off"])
async def test_a_long_first_token_is_not_a_stall(fake_a: FakeServer, hung_at: int, stall_s: float) -> None:
    engine = script_on(fake_a, SCRIPT, hung_at=hung_at)
    async with routing(spec_of(fake_a, "a"), engine_stall_s=stall_s) as router:
        (answer,) = await begin(router, engine, CHAT_BODY)
        await probed(fake_a, 40)
        assert router.engine("a").num_stalls == 0
        engine.hung_at = None
        assert_whole(await answer)


STANDING = """\
vllm:num_requests_running{engine="0"} 1
vllm:num_requests_waiting{engine="0"} 0
vllm:iteration_tokens_total_count{engine="0"} 7
vllm:generation_tokens_total{engine="0"} 7
"""


async def test_counters_that_stand_still_show_a_stall(fake_a: FakeServer, fake_b: FakeServer) -> None:
    one = script_on(fake_a, SCRIPT, hung_at=0)
    script_on(fake_b, SCRIPT)
    fake_a.metrics = STANDING
    async with routing(spec_of(fake_a, "a"), engine_stall_s=STALL_S) as router:
        answers = await begin(router, one, CHAT_BODY, PLAIN)
        await router.dispatcher.add_engine(fields_of(fake_b, "b"))
        moved, plain = await asyncio.gather(*answers)
        assert_whole(moved)
        assert plain.json()["choices"][0]["text"] == TEXT
        assert router.engine("a").num_stalls == 1
        fake_a.metrics = STANDING.replace("7", "8")  # it shows a step: no answer to the question is needed
        await router.all_ready("a")
        assert one.num_questions <= 1
        one.hung_at = None


async def test_clients_are_told_at_once_if_all_engines_stalled(fake_a: FakeServer, fake_b: FakeServer) -> None:
    engines = [script_on(fake, SCRIPT, hung_at=5) for fake in (fake_a, fake_b)]
    async with routing(spec_of(fake_a, "a"), spec_of(fake_b, "b"), engine_stall_s=STALL_S) as router:
        answers = [asyncio.create_task(ask(router, CHAT_BODY)) for _ in range(6)]
        for answer in await asyncio.gather(*answers):
            assert "it has stalled" in error_of(answer)["message"]
        await stalled(router, "a")
        await stalled(router, "b")
        refused = await ask(router, PLAIN)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"].count("it has stalled") == 2
        assert (await router.client.get("/ready")).status_code == 503
        for engine in engines:
            engine.hung_at = None
        await router.all_ready("a", "b")
        assert_whole(await ask(router, CHAT_BODY))


async def test_a_stalled_engine_can_be_removed(fake_a: FakeServer, fake_b: FakeServer) -> None:
    one = script_on(fake_a, SCRIPT, hung_at=5)
    script_on(fake_b, SCRIPT)
    async with routing(spec_of(fake_a, "a"), engine_stall_s=STALL_S) as router:
        (answer,) = await begin(router, one, CHAT_BODY)
        await router.dispatcher.add_engine(fields_of(fake_b, "b"))
        assert_whole(await answer)
        await eventually(lambda: one.num_questions == 1)
        await router.dispatcher.remove_engine("a")
        await eventually(lambda: router.fleet.get("a") is None)
        one.hung_at = None


async def test_an_engine_that_drains_is_watched_too(fake_a: FakeServer, fake_b: FakeServer) -> None:
    one = script_on(fake_a, SCRIPT, hung_at=5)
    script_on(fake_b, SCRIPT)
    config = RouterConfig(request_timeout_s=20.0, drain_timeout_s=1000.0)
    async with routing(spec_of(fake_a, "a"), engine_stall_s=STALL_S, config=config) as router:
        (answer,) = await begin(router, one, CHAT_BODY)
        await router.dispatcher.add_engine(fields_of(fake_b, "b"))
        await router.all_ready("b")
        await router.dispatcher.remove_engine("a")
        assert_whole(await answer)
        await eventually(lambda: router.fleet.get("a") is None)
        one.hung_at = None


async def test_an_engine_that_cannot_be_asked_is_tried_by_a_request(fake_a: FakeServer, fake_b: FakeServer) -> None:
    one = script_on(fake_a, SCRIPT, hung_at=5, has_plain_answers=False)
    script_on(fake_b, SCRIPT, delay_s=0.005)
    limits: dict[str, Any] = {"engine_stall_s": STALL_S, "breaker_open_s": 0.05, "breaker_max_open_s": 0.05}
    async with routing(spec_of(fake_a, "a"), **limits) as router:
        (answer,) = await begin(router, one, CHAT_BODY)
        await router.dispatcher.add_engine(fields_of(fake_b, "b"))
        assert_whole(await answer)
        one.hung_at = 0  # nothing comes of the trial, and it goes on elsewhere
        while router.engine("a").num_stalls < 3:
            for body in await asyncio.gather(*(ask(router, CHAT_BODY) for _ in range(4))):
                assert_whole(body)
        one.hung_at = None
        while router.engine("a").breaker.has_stalled:
            for body in await asyncio.gather(*(ask(router, CHAT_BODY) for _ in range(4))):
                assert_whole(body)


async def test_the_streams_of_all_frontends_count(fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path) -> None:
    one = script_on(fake_a, LONG, delay_s=0.02, how="hang")
    script_on(fake_b, LONG)
    async with routing_by_decider(tmp_path, spec_of(fake_a, "a"), engine_stall_s=1.5) as decider:
        left, right = await decider.frontend("one"), await decider.frontend("two")
        one.breaks.append(4)
        still = asyncio.create_task(ask(left, COMPLETION_BODY))
        await eventually(lambda: one.num_broken == 1)
        for _ in range(2):  # streams of the other process go on for longer than the limit
            await ask(right, COMPLETION_BODY | {"max_tokens": 60})
        assert decider.engine("a").num_stalls == 0
        one.hung_at = 10
        answers = await begin(right, one, COMPLETION_BODY, COMPLETION_BODY)
        await decider.dispatcher.add_engine(fields_of(fake_b, "b"))
        for answer in await asyncio.gather(still, *answers):
            assert text_of(answer) == "word " * 50
        assert decider.engine("a").num_stalls == 1
        one.hung_at = None


@pytest.mark.parametrize("is_remote", [False, True], ids=["alone", "frontend process"])
async def test_a_client_that_takes_nothing_is_not_a_stall(fake_a: FakeServer, tmp_path: Path, is_remote: bool) -> None:
    script_on(fake_a, LONG, delay_s=0.005)

    async def check(router: Router) -> None:
        client = SlowClient(router.app, CHAT, CHAT_BODY)
        await asyncio.wait_for(client.got_body.wait(), 5)
        await probed(fake_a, 60)
        assert router.engine("a").num_stalls == 0
        client.may_go_on.set()
        await asyncio.wait_for(client.task, 10)
        assert b"".join(part.get("body", b"") for part in client.sent).endswith(b"data: [DONE]\n\n")

    if is_remote:
        async with routing_by_decider(tmp_path, spec_of(fake_a, "a"), engine_stall_s=0.3) as decider:
            await check(await decider.frontend("one"))
    else:
        async with routing(spec_of(fake_a, "a"), engine_stall_s=0.3) as router:
            await check(router)


@pytest.fixture
def engine_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process with a scripted engine, and its URL."""
    program = ROOT / "tests" / "support" / "scripted_engine_process.py"
    process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


async def test_a_stopped_engine_process_is_found_by_its_probes(
    engine_process: tuple[subprocess.Popen[str], str], fake_b: FakeServer
) -> None:
    process, url = engine_process
    words = Script([f"w{number} ".encode() for number in range(200)])
    script_on(fake_b, words)
    config = RouterConfig(worker_timeout_s=1.0)
    limits: dict[str, Any] = {"probe_timeout_s": 0.3, "engine_stall_s": 0, "config": config}
    async with routing(spec_from({"name": "a", "url": url, "kind": "vllm"}, "test"), **limits) as router:
        body = COMPLETION_BODY | {"max_tokens": 200}
        movable = [asyncio.create_task(ask(router, body)) for _ in range(4)]
        others = [asyncio.create_task(ask(router, body | {"seed": seed})) for seed in range(2)]
        await eventually(lambda: sum(one.has_answer for one in router.engine("a").running) == 6)
        process.send_signal(signal.SIGSTOP)
        await router.dispatcher.add_engine(fields_of(fake_b, "b"))
        for answer in await asyncio.gather(*movable):
            assert text_of(answer) == "".join(f"w{number} " for number in range(200))
        for answer in await asyncio.gather(*others):
            assert "it stopped answering (no whole answer within 0.3 s)" in error_of(answer)["message"]
        assert router.engine("a").state is WorkerState.DEAD
        process.send_signal(signal.SIGCONT)
        await router.all_ready("a")


async def test_a_request_unsent_at_a_stall_leaves_nothing(fake_a: FakeServer, recwarn: pytest.WarningsRecorder) -> None:
    script_on(fake_a, SCRIPT)
    async with routing(spec_of(fake_a, "a")) as router:
        engine = router.engine("a")
        begin_it = engine.begin

        def begin_and_abort(request: Any, now: float) -> None:
            begin_it(request, now)
            request.abort("a", "it has stalled")

        engine.begin = begin_and_abort
        answer = await ask(router, CHAT_BODY)
        assert (answer.status_code, answer.json()["error"]["message"]) == (502, "engine a: it has stalled")
        assert not fake_a.requests
    assert not [str(one.message) for one in recwarn if "never awaited" in str(one.message)]
