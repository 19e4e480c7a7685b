"""Processes that relay and one that decides: requests are served as by one, and nothing is left of what ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tandem.frontend.processes import wire
from tandem.frontend.processes.deciding_client import JoinSettings
from tandem.frontend.processes.methods import invocation
from tandem.frontend.processes.remote_dispatcher import RemoteDispatcher, Reservations
from tandem.frontend.relay.connections import EngineConnections
from tandem.frontend.relay.prompt_forms import chat_form
from tandem.frontend.relay.prompts import PromptReader
from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.protocol.digest import EVERYONE, token_bytes
from tandem.protocol.errors import NoWorker
from tandem.router.engines.dispatcher import DispatchRequest, EngineReservation
from tandem.router.engines.local_dispatcher import LocalReservation
from tandem.scheduling.request import ServiceClass
from tests.support.busy_engine import one_runs, order, prompt_of, small, start
from tests.support.engines_harness import COMPLETIONS, Decider, completion, routing, routing_by_decider, spec_of
from tests.support.fake_backend import RawClient, events
from tests.support.fake_openai import FakeServer, fake_openai
from tests.support.raw_frontend import RawFrontend
from tests.support.waiting import eventually

ADMIN = {"authorization": "Bearer secret"}


def num_waiting(decider: Decider) -> int:
    return sum(work.num_requests for work in decider.dispatcher.queues.queued().values())


def num_retries(decider: Decider) -> float:
    value = decider.metrics.get_sample_value("tandem_engine_retries_total")
    assert value is not None
    return value


def routing_request(prompt: str = "a b c d") -> DispatchRequest:
    tokens = PromptReader().read(chat_form({"prompt": prompt}), EVERYONE, 1 << 20).token_ids
    return DispatchRequest(
        request_id="r",
        model="fake-model",
        prompt=token_bytes(tokens),
        cache_scope=EVERYONE,
        max_tokens=4,
        is_stream=True,
        service_class=ServiceClass(),
    )


def hold(number: int, request: DispatchRequest) -> wire.Call[Any]:
    return wire.Call(number, invocation(Reservations.hold, request))


# -- as by one process ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_frontend_answers_as_a_process_alone_would(fake_a: FakeServer, tmp_path: Path, stream: bool) -> None:
    fake_a.capabilities = {"chat": True}
    async with routing(spec_of(fake_a, "a")) as alone, routing_by_decider(tmp_path, spec_of(fake_a, "a")) as decider:
        frontend = await decider.frontend("frontend")
        for body in (completion("x" * 400, stream=stream), completion(42, stream=stream), {"model": "none"}):
            first, second = [await one.client.post(COMPLETIONS, json=body) for one in (alone, frontend)]
            assert (first.status_code, first.text) == (second.status_code, second.text)
            for name in ("x-tandem-engine", "x-tandem-expected-cached-tokens", "content-type"):
                assert first.headers.get(name) == second.headers.get(name)
        models = [(await one.client.get("/v1/models")).json()["data"][0] for one in (alone, frontend)]
        start = {"created": 0, "created_at": ""}  # the two begin in different seconds, maybe
        assert (models[0] | start, models[1]["capabilities"]) == (models[1] | start, {"chat": True})


async def test_a_prompt_of_one_frontend_is_expected_in_the_cache_by_all(fake_a: FakeServer, tmp_path: Path) -> None:
    async with routing_by_decider(tmp_path, spec_of(fake_a, "a")) as decider:
        frontends = [await decider.frontend(f"frontend-{number}") for number in range(3)]
        expected = []
        for frontend in frontends:
            answer = await start(frontend, "x" * 4000)
            expected.append(int(answer.headers["x-tandem-expected-cached-tokens"]))
        assert expected == [0, 992, 992]


async def test_streams_teach_the_decider_costs_and_lengths(
    fake_a: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaps, gap = list[float](), LocalReservation.gap
    monkeypatch.setattr(LocalReservation, "gap", lambda self, *told: (gaps.append(told[0]), gap(self, *told)))
    async with routing_by_decider(tmp_path, spec_of(fake_a, "a")) as decider:
        frontend = await decider.frontend("frontend")
        model, length = decider.fleet.costs.steps("vllm fake-model"), decider.fleet.lengths.mean_output_tokens
        fake_a.pause.clear()
        stream = start(frontend, max_tokens=8)
        await eventually(lambda: any(request.has_answer for request in decider.engine("a").running))
        assert model.num_measurements == 0
        fake_a.resume()
        assert (await stream).status_code == 200
        async with asyncio.timeout(30):
            while model.num_measurements == 0 or not gaps:  # tokens that arrive together teach nothing
                assert (await start(frontend, max_tokens=8)).status_code == 200
        await eventually(lambda: decider.fleet.lengths.mean_output_tokens < length)


async def test_a_pair_teaches_what_a_transfer_costs(fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path) -> None:
    specs = [
        spec_of(fake_a, "p", role="prefill", model="fake-model"),
        spec_of(fake_b, "d", role="decode", model="fake-model"),
    ]
    async with routing_by_decider(tmp_path, *specs, config=RouterConfig(routing="cost,pairs")) as decider:
        answer = await start(await decider.frontend("frontend"))
        assert (answer.status_code, answer.headers["x-tandem-engine"]) == (200, "d")
        assert fake_b.requests[0]["kv_transfer_params"]["do_remote_prefill"] is True
        learned = ["vllm fake-model -> vllm fake-model"]
        await eventually(lambda: list(decider.fleet.costs.export()["transfers"]) == learned)


# -- admission ------------------------------------------------------------------------------------------------------


async def test_tenants_are_served_in_one_fair_order_at_any_frontend_process(fake_a: FakeServer, tmp_path: Path) -> None:
    async with routing_by_decider(tmp_path, small(fake_a, "a")) as decider:
        one, two = await decider.frontend("one"), await decider.frontend("two")
        tasks = [await one_runs(one, fake_a)]
        # A tenant with many requests at one frontend, and another with a few at the other frontend.
        for number, (frontend, name, options) in enumerate(
            [
                *((one, f"many-{i}", {}) for i in range(4)),
                (two, "few-0", {"x-tandem-tenant": "other"}),
                (two, "few-1", {"x-tandem-tenant": "other"}),
                (two, "urgent", {"priority": -1}),
            ]
        ):
            tasks.append(start(frontend, prompt_of(name), **options))
            await eventually(lambda number=number: num_waiting(decider) == number + 1)  # type: ignore[misc]
        fake_a.resume()
        assert [(await task).status_code for task in tasks] == [200] * 8
        served = order(fake_a)
        assert served.index("few-0") < served.index("many-0")
        assert served.index("few-1") < served.index("many-1")
        assert served.index("urgent") < served.index("many-0") < served.index("many-1") < served.index("many-2")


async def test_decisions_are_told_by_any_frontend(fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path) -> None:
    async with routing_by_decider(tmp_path, spec_of(fake_a, "a"), spec_of(fake_b, "b")) as decider:
        one, two = await decider.frontend("one"), await decider.frontend("two")
        answer = await start(one, **{"x-tandem-explain": "1"})
        told = httpx.Response(200, text=answer.headers["x-tandem-explain"]).json()
        assert told["placement"]["candidates"][0]["decode_worker"] == answer.headers["x-tandem-engine"]
        await eventually(lambda: decider.process.num_running == 0)
        [kept] = (await two.client.get("/v1/route/decisions")).json()["data"]
        assert kept["request_id"] == answer.headers["x-request-id"]
        assert kept["actual_ttft_s"] > 0
        explained = await two.client.post("/v1/route/explain", json=completion())
        assert (explained.json()["data"][0]["outcome"], decider.fleet.registry.num_bookings) == ("admitted", 0)


# -- failures and retries ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_go_elsewhere(fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path, stream: bool) -> None:
    fake_a.status = 500
    specs = [spec_of(fake_a, "a"), spec_of(fake_b, "b")]
    async with routing_by_decider(tmp_path, *specs, breaker_failures=1000) as decider:
        frontend = await decider.frontend("frontend")
        answers = [await start(frontend, f"{number} {'x' * 400}", stream=stream) for number in range(6)]
        assert [answer.text for answer in answers if answer.status_code != 200] == []
        assert {answer.headers["x-tandem-engine"] for answer in answers} == {"b"}
        assert (await frontend.client.post(COMPLETIONS, json=completion(model="none"))).status_code == 404
        await eventually(lambda: decider.process.num_running == 0)
        assert frontend.remote.num_open == 0
        assert decider.engine("a").num_failures == len(fake_a.requests) == num_retries(decider) > 0


async def test_engines_that_ask_to_wait_are_left_alone_by_all_frontends(fake_a: FakeServer, tmp_path: Path) -> None:
    fake_a.status, fake_a.headers = 429, {"retry-after": "7"}
    async with routing_by_decider(tmp_path, spec_of(fake_a, "a")) as decider:
        one, two = await decider.frontend("one"), await decider.frontend("two")
        answers = [await start(frontend) for frontend in (one, two)]
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in answers} == {(429, "engine_busy")}
        assert all(5 <= int(answer.headers["retry-after"]) <= 7 for answer in answers)
        assert (len(fake_a.requests), decider.engine("a").num_failures) == (1, 0)


async def test_where_nobody_listens_the_circuit_is_open_for_all_frontend_processes(tmp_path: Path) -> None:
    with fake_openai() as fake:
        async with routing_by_decider(tmp_path, spec_of(fake, "a"), probe_interval_s=60.0) as decider:
            one, two = await decider.frontend("one"), await decider.frontend("two")
            await asyncio.to_thread(fake.stop)
            assert (await start(one)).status_code == 502
            await eventually(lambda: decider.engine("a").breaker.num_opened == 1)
            refused = await start(two)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
            assert "circuit open" in refused.json()["error"]["message"]
            assert decider.engine("a").num_failures == 1


async def test_a_late_abort_does_not_end_a_new_target(fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path) -> None:
    """The deciding process gives an engine up when the frontend process has already left it."""
    fake_a.status = 500
    async with routing_by_decider(tmp_path, spec_of(fake_a, "a")) as decider:
        frontend = await decider.frontend("frontend")
        aborted: list[tuple[str, str]] = []
        reservation = frontend.remote.reserve(routing_request(), lambda *why: aborted.append(why))
        target = await reservation.place()
        assert target.decode == "a"
        decider.fleet.add(spec_of(fake_b, "b"))
        await decider.all_ready("b")
        [running] = decider.engine("a").running
        running.abort("a", "it is gone")
        reservation.failed("a")
        target = await reservation.place_elsewhere()  # the abort comes first, and is about the earlier target
        assert (target.decode, aborted) == ("b", [])
        [running] = decider.engine("b").running
        running.abort("b", "so is this")
        await eventually(lambda: aborted == [("b", "so is this")])
        reservation.release()


# -- clients, frontends and deciders that leave ------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["queued", "before", "within"])
async def test_a_client_that_leaves_gives_everything_back(fake_a: FakeServer, tmp_path: Path, when: str) -> None:
    async with routing_by_decider(tmp_path, small(fake_a, "a")) as decider:
        frontend = await decider.frontend("frontend")
        running = await one_runs(frontend, fake_a) if when == "queued" else None
        (fake_a.pause if when == "within" else fake_a.headers_pause).clear()
        client = RawClient(frontend.app, COMPLETIONS, completion(prompt_of("gone"), stream=True))
        if when == "queued":
            await eventually(lambda: num_waiting(decider) == 1)
        elif when == "before":
            await eventually(lambda: len(fake_a.requests) == 1)
        else:
            await asyncio.wait_for(client.got_body.wait(), 5)
        client.leave()
        await asyncio.wait_for(client.task, 5)
        await eventually(lambda: decider.process.num_running == (running is not None))
        assert num_waiting(decider) == 0
        fake_a.resume()
        if running is not None:
            assert (await running).status_code == 200
            assert order(fake_a) == ["running"]


async def test_a_frontend_process_that_dies_loses_its_own_requests(fake_a: FakeServer, tmp_path: Path) -> None:
    async with routing_by_decider(tmp_path, small(fake_a, "a")) as decider:
        one, two = await decider.frontend("one"), await decider.frontend("two")
        lost = [await one_runs(one, fake_a)]
        lost.append(start(one, prompt_of("queued")))
        await eventually(lambda: num_waiting(decider) == 1)
        kept = start(two, prompt_of("kept"))
        await eventually(lambda: num_waiting(decider) == 2)
        decider.process.drop("one")
        await eventually(lambda: len(fake_a.requests) == 2)  # the other frontend's, for which there is room now
        assert (order(fake_a)[-1], decider.fleet.registry.num_bookings) == ("kept", 1)
        pools = (await two.client.get("/v1/pools")).json()
        assert pools["processes"] == {"two": {"num_requests": 1}}
        for task in lost:
            task.cancel()
        await asyncio.gather(*lost, return_exceptions=True)
        fake_a.resume()
        assert (await kept).status_code == 200


async def test_events_of_a_dead_process_or_about_nothing_change_nothing(
    fake_a: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with routing_by_decider(tmp_path, spec_of(fake_a, "a")) as decider:
        with RawFrontend(decider.endpoint, "one") as one, RawFrontend(decider.endpoint, "two") as two:
            decider.process.expect("one")
            decider.process.expect("two")
            one.join()
            two.join()
            two.send(hold(3, routing_request()))
            await eventually(lambda: len(decider.engine("a").running) == 1)
            for event in (
                invocation(EngineReservation.failed, "a"),
                invocation(EngineReservation.ended, 5, 5),
                invocation(EngineReservation.first_token, 0.0),
            ):
                one.send(wire.Events([(3, event), (77, event)]))  # another process's call, and none
            one.send(["Call", 5, ["Reservations.hold", ["no request"]]])
            one.send_bytes(b"\x93nonsense")
            await eventually(lambda: caplog.text.count("is not a message") == 2)
            assert (decider.engine("a").num_failures, decider.process.num_running) == (0, 1)
            two.send(wire.Events([(3, invocation(EngineReservation.failed, "a"))]))  # they have not been read yet
            two.send(hold(9, routing_request()))
            decider.process.drop("two")
            await eventually(lambda: two.take() is not None and two.is_closed)
            assert (decider.engine("a").num_failures, decider.process.num_running) == (0, 0)


async def test_an_event_that_cannot_be_handled_ends_its_own_call_only(
    fake_a: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with routing_by_decider(tmp_path, small(fake_a, "a")) as decider:
        with RawFrontend(decider.endpoint, "frontend") as frontend:
            decider.process.expect("frontend")
            frontend.join()
            frontend.send(hold(1, routing_request(prompt_of("running"))))
            await eventually(lambda: len(decider.engine("a").running) == 1)
            queued = msgspec.structs.replace(routing_request(prompt_of("queued")), request_id="queued-one")
            frontend.send(hold(2, queued))
            await eventually(lambda: num_waiting(decider) == 1)
            # The second one has not been placed, so it can have no token.
            early, answered = invocation(EngineReservation.first_token, 0.0), invocation(EngineReservation.answered)
            frontend.send(wire.Events([(2, early), (1, answered)]))
            await eventually(lambda: decider.process.num_running == 1)
            assert "request queued-one failed" in caplog.text
            assert [request.has_answer for request in decider.engine("a").running] == [True]
            assert num_waiting(decider) == 0
            decider.process.drop("frontend")


async def test_streams_outlive_a_silent_decider_and_requests_are_refused(fake_a: FakeServer, tmp_path: Path) -> None:
    async with routing_by_decider(tmp_path, small(fake_a, "a")) as decider:
        relay = await decider.relay()
        frontend = await decider.frontend("frontend", timeout_s=0.3, relay=relay)
        fake_a.pause.clear()
        stream = start(frontend, prompt_of("stream"), max_tokens=8)
        await eventually(lambda: any(request.has_answer for request in decider.engine("a").running))
        fake_a.headers_pause.clear()
        tasks = [start(frontend, prompt_of("computed"))]
        await eventually(lambda: len(fake_a.requests) == 2)
        tasks.append(start(frontend, prompt_of("waiting")))
        await eventually(lambda: num_waiting(decider) == 1)
        with relay.silence():
            await eventually(lambda: frontend.remote.unready is not None)
            assert (await tasks[1]).status_code == 503
            refused = await start(frontend)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_worker")
            assert (await frontend.client.get("/ready")).status_code == 503
            assert (await frontend.client.get("/v1/pools")).status_code == 503
            fake_a.resume()
            assert (await stream).text.endswith("data: [DONE]\n\n")
            assert (await tasks[0]).text.endswith("data: [DONE]\n\n")
        await eventually(lambda: frontend.remote.unready is None)
        await eventually(lambda: decider.process.num_running == 0)  # it has heard of their ends
        assert (await start(frontend)).status_code == 200


async def test_a_silent_decider_is_not_waited_for_to_place_elsewhere(fake_a: FakeServer, tmp_path: Path) -> None:
    async with routing_by_decider(tmp_path, small(fake_a, "a")) as decider:
        relay = await decider.relay()
        frontend = await decider.frontend("frontend", timeout_s=0.3, relay=relay)
        reservation = frontend.remote.reserve(routing_request(), lambda _: None)
        await reservation.place()
        with relay.silence():
            await eventually(lambda: frontend.remote.unready is not None)
            with pytest.raises(NoWorker):
                await reservation.place_elsewhere()
        reservation.release()
        await eventually(lambda: decider.process.num_running == 0)


async def test_a_request_that_the_decider_gave_up_is_not_placed_elsewhere(
    fake_a: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with routing_by_decider(tmp_path, small(fake_a, "a")) as decider:
        frontend = await decider.frontend("frontend")
        reservation = frontend.remote.reserve(routing_request(), lambda _: None)
        await reservation.place()
        monkeypatch.setattr(LocalReservation, "answered", lambda *_: 1 / 0)
        reservation.answered()
        await eventually(lambda: frontend.remote.num_open == 0)
        with pytest.raises(NoWorker):
            await reservation.place_elsewhere()
        assert decider.process.num_running == 0


async def test_a_frontend_process_that_closes_sends_those_who_wait_away(fake_a: FakeServer, tmp_path: Path) -> None:
    async with routing_by_decider(tmp_path, small(fake_a, "a")) as decider:
        running = await one_runs(await decider.frontend("one"), fake_a)
        decider.process.expect("two")
        connections = EngineConnections(ExternalEnginesConfig())
        two = RemoteDispatcher(JoinSettings(decider.endpoint, "two", lambda: None, 20.0), connections)
        async with two.running():
            reservation = two.reserve(routing_request(prompt_of("waits")), lambda _: None)
            waiting = asyncio.create_task(reservation.place())
            await eventually(lambda: num_waiting(decider) == 1)
        with pytest.raises(NoWorker, match="shutting down"):
            await waiting
        decider.process.drop("two")
        await eventually(lambda: num_waiting(decider) == 0)
        fake_a.resume()
        assert (await running).status_code == 200


# -- engines that come and go -----------------------------------------------------------------------------------------


async def test_engines_come_and_go_through_any_frontend(fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path) -> None:
    fake_b.model = "other-model"
    async with routing_by_decider(tmp_path, spec_of(fake_a, "a"), admin_token="secret") as decider:
        one, two = await decider.frontend("one"), await decider.frontend("two")
        body = {"name": "b", "url": fake_b.url, "kind": "vllm", "model": "other-model"}
        assert (await one.client.post("/v1/engines", json=body, headers=ADMIN)).status_code == 201
        known = (await one.client.get("/v1/models")).json()["data"]  # at once at this frontend
        assert [model["id"] for model in known] == ["fake-model", "other-model"]
        await eventually(lambda: "other-model" in two.remote.models)
        again = await two.client.post("/v1/engines", json=body, headers=ADMIN)
        assert (again.status_code, again.json()["error"]["code"]) == (400, "invalid_engine")
        assert "name='b' appears twice" in again.json()["error"]["message"]
        await decider.all_ready("b")
        fake_b.pause.clear()
        stream = start(two, model="other-model")
        await eventually(lambda: any(request.has_answer for request in decider.engine("b").running))
        assert (await one.client.delete("/v1/engines/b", headers=ADMIN)).status_code == 202
        listed = (await two.client.get("/v1/engines", headers=ADMIN)).json()["data"]
        assert [(engine["name"], engine["state"]) for engine in listed] == [("a", "ready"), ("b", "draining")]
        refused = await start(two, model="other-model")
        assert refused.status_code == 503
        fake_b.resume()
        assert (await stream).text.endswith("data: [DONE]\n\n")
        await eventually(lambda: decider.fleet.get("b") is None)
        missing = await two.client.delete("/v1/engines/b", headers=ADMIN)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "engine_not_found")
        await eventually(lambda: "other-model" not in two.remote.models)
        assert (await start(two, model="other-model")).status_code == 404
        assert (await two.client.post("/v1/engines", json=body, headers=ADMIN)).status_code == 201
        await decider.all_ready("b")
        assert (await start(one, model="other-model")).headers["x-tandem-engine"] == "b"


async def test_an_engine_drains_no_longer_than_it_may(fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path) -> None:
    config = RouterConfig(drain_timeout_s=0.1)
    specs = [spec_of(fake_a, "a")]
    async with routing_by_decider(tmp_path, *specs, config=config, admin_token="secret") as decider:
        frontend = await decider.frontend("frontend")
        fake_a.pause.clear()
        stream = start(frontend)
        await eventually(lambda: any(request.has_answer for request in decider.engine("a").running))
        assert (await frontend.client.delete("/v1/engines/a", headers=ADMIN)).status_code == 202
        assert "engine a: it was removed" in events(await stream)[-1]["error"]["message"]
        assert (await start(frontend)).status_code == 503
        fake_a.resume()
        decider.fleet.add(spec_of(fake_b, "a"))  # another one of the same name
        await eventually(lambda: frontend.remote.unready is None)
        assert (await start(frontend)).status_code == 200
        assert len(fake_b.requests) == 1


async def test_a_late_frontend_knows_load_and_engines(fake_a: FakeServer, fake_b: FakeServer, tmp_path: Path) -> None:
    async with routing_by_decider(tmp_path, spec_of(fake_a, "a"), admin_token="secret") as decider:
        one = await decider.frontend("one")
        added = {"name": "b", "url": fake_b.url}
        assert (await one.client.post("/v1/engines", json=added, headers=ADMIN)).status_code == 201
        await decider.all_ready("b")
        await one.client.delete("/v1/engines/a", headers=ADMIN)
        await eventually(lambda: decider.fleet.get("a") is None)
        two = await decider.frontend("two")
        assert (await start(two)).headers["x-tandem-engine"] == "b"
        pools = (await two.client.get("/v1/pools")).json()
        assert ([engine["name"] for engine in pools["engines"]], pools["processes"].keys()) == (["b"], {"one", "two"})
