"""An engine that sends too much, too large or too odd things gets an error that names it; the others go on."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
from fastapi.responses import Response, StreamingResponse

from tandem.frontend.relay.sse import MAX_EVENT_BYTES, MAX_EVENT_LINES
from tandem.protocol.messages import WorkerState
from tandem.router.engines import prober
from tandem.router.engines.bounded_json import MAX_BRACKETS
from tandem.router.engines.engine_status import MAX_SAMPLES, parse_report
from tests.support.engines_harness import COMPLETIONS, completion, routing, spec_of
from tests.support.fake_openai import FakeServer
from tests.support.waiting import eventually

LOAD = 'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
LISTS: list[Any] = [[]] * (MAX_BRACKETS + 1)


def streams(fake: FakeServer, events: Iterator[bytes]) -> None:
    async def body() -> AsyncIterator[bytes]:
        for part in events:
            yield part

    fake.replies[COMPLETIONS] = lambda *_: StreamingResponse(body(), media_type="text/event-stream")


def repeated(part: bytes, count: int) -> Iterator[bytes]:
    return (part for _ in range(count))


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (b"a" * 65536, f"sent an event of more than {MAX_EVENT_BYTES} bytes"),
        (b":\n" * 1024, f"sent an event of more than {MAX_EVENT_LINES} lines"),
    ],
)
async def test_an_endless_event_is_an_error(fake_a: FakeServer, part: bytes, complaint: str, is_first: bool) -> None:
    def events() -> Iterator[bytes]:
        if not is_first:
            yield b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
        yield b"data: "
        yield from repeated(part, 2 + MAX_EVENT_BYTES // len(part))

    streams(fake_a, events())
    async with routing(spec_of(fake_a, "a")) as router:
        answer = await router.client.post(COMPLETIONS, json=completion(stream=True))
        assert answer.status_code in ((502,) if is_first else (200, 502))  # one read may bring both
        assert f"engine a: {complaint}" in answer.text
        assert router.engine("a").num_failures == 1


async def test_the_type_of_a_stream_may_be_in_capitals(fake_a: FakeServer) -> None:
    events = 'data: {"choices":[{"index":0,"text":"a"}]}\n\ndata: [DONE]\n\n'
    fake_a.replies[COMPLETIONS] = lambda *_: Response(events, media_type="Text/Event-Stream")
    async with routing(spec_of(fake_a, "a")) as router:
        assert (await router.client.post(COMPLETIONS, json=completion(stream=True))).text == events


async def test_a_flood_of_tiny_events_is_passed_on_whole(fake_a: FakeServer) -> None:
    tiny, count = b'data: {"a":1}\r\n\r\n' + b"data: {}\n\n", 3000
    streams(fake_a, iter([*repeated(tiny * 10, count // 10), b"data: [DONE]\n\n"]))
    async with routing(spec_of(fake_a, "a")) as router:
        answer = await router.client.post(COMPLETIONS, json=completion(stream=True))
        assert answer.content == tiny * count + b"data: [DONE]\n\n"


async def test_an_answer_of_many_values_is_passed_on_and_counted(fake_a: FakeServer) -> None:
    fake_a.whole = {"more": LISTS}
    async with routing(spec_of(fake_a, "a")) as router:
        answer = await router.client.post(COMPLETIONS, json=completion("a b c", max_tokens=2))
        assert (answer.status_code, answer.json()["more"]) == (200, LISTS)
        metrics = (await router.client.get("/metrics")).text
        assert "prompt_tokens_total 3.0" in metrics


@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_of_many_values_is_shown_in_part(fake_a: FakeServer, status: int) -> None:
    content = msgspec.json.encode({"error": {"message": LISTS, "code": status}})
    fake_a.replies[COMPLETIONS] = lambda *_: Response(content, status, media_type="application/json")
    async with routing(spec_of(fake_a, "a")) as router:
        answer = await router.client.post(COMPLETIONS, json=completion())
        if status == 400:
            assert (answer.status_code, answer.content) == (400, content)
        else:
            assert answer.status_code == 502
            assert answer.json()["error"]["message"] == "engine a: answered 500: a value too large to be read"


async def test_metrics_that_would_take_long_are_the_engines_failure(fake_a: FakeServer) -> None:
    fake_a.metrics = LOAD * MAX_SAMPLES
    async with routing(spec_of(fake_a, "a"), wait=False) as router:
        told = f"its /metrics has more than {MAX_SAMPLES} samples of its load"
        await eventually(lambda: router.engine("a").reason == told)
        assert router.engine("a").state is not WorkerState.READY


async def test_long_metrics_are_parsed_off_the_event_loop(fake_a: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def parsed(text: str, rank: int | None) -> Any:
        threads.append(threading.current_thread())
        return parse_report(text, rank)

    monkeypatch.setattr(prober, "parse_report", parsed)
    fake_a.metrics = LOAD
    async with routing(spec_of(fake_a, "a")) as router:
        assert set(threads) == {threading.main_thread()}
        fake_a.metrics = LOAD + "# a comment\n" * 10_000
        await eventually(lambda: threads[-1] is not threading.main_thread())
        assert router.engine("a").state is WorkerState.READY


@pytest.mark.parametrize("charset", ["punycode", "utf-7", "no-such"])
async def test_metrics_are_utf_8_whatever_the_engine_says(fake_a: FakeServer, charset: str) -> None:
    """Some codecs of Python take a time that grows with the square of the text."""
    text = LOAD + "a" * 200_000
    fake_a.metrics_type = f"text/plain; charset={charset}"
    fake_a.metrics = text
    async with routing(spec_of(fake_a, "a")) as router:
        assert router.engine("a").state is WorkerState.READY


async def test_a_list_of_models_that_cannot_be_read_is_the_engines_failure(fake_a: FakeServer) -> None:
    fake_a.capabilities = {"x": LISTS}
    async with routing(spec_of(fake_a, "a"), wait=False) as router:
        await eventually(lambda: router.engine("a").reason == "/v1/models lists more than can be read")
