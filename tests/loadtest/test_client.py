import asyncio
import socket

import pytest

from tandem.loadtest.client import CUT, MeasuringClient, StreamTiming
from tests.support.engines_harness import dead_url
from tests.support.fake_openai import FakeServer


def complete(server: FakeServer, num_tokens: int = 5) -> StreamTiming:
    return asyncio.run(MeasuringClient(server.url).stream_completion("a b c", model="m", max_tokens=num_tokens))


def test_times_every_event_of_a_completion(server: FakeServer) -> None:
    timing = complete(server)
    assert (timing.error, timing.text) == ("", "word word word word word ")
    assert (timing.num_prompt_tokens, timing.num_cached_tokens, timing.num_output_tokens) == (3, 3, 5)
    assert (timing.event_tokens, timing.finish_reason) == ([1, 1, 1, 1, 1], "length")
    assert len(timing.itl_s) == 4
    assert timing.event_times_s == sorted(timing.event_times_s)
    assert timing.started_s < timing.event_times_s[0] <= timing.event_times_s[-1] <= timing.finished_s


def test_role_event_of_a_chat_is_not_its_first_token(server: FakeServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    timing = asyncio.run(MeasuringClient(server.url).stream_chat(messages, model="m", max_tokens=2))
    assert (timing.error, timing.event_tokens) == ("", [1, 1])


@pytest.mark.parametrize(("has_running_usage", "expected"), [(True, [2, 2, 1]), (False, [1, 1, 1])])
def test_tokens_of_large_events_are_counted(server: FakeServer, has_running_usage: bool, expected: list[int]) -> None:
    server.words_per_event = 2
    server.has_running_usage = has_running_usage
    timing = complete(server)
    assert timing.event_tokens == expected
    assert timing.num_output_tokens == 5, "the final usage is the truth"


def test_reads_streams_with_windows_line_ends(server: FakeServer) -> None:
    server.line_end = "\r\n"
    timing = complete(server)
    assert (timing.error, timing.num_output_tokens) == ("", 5)


def test_tpot_counts_tokens_after_the_first_event() -> None:
    timing = StreamTiming(0.0, event_times_s=[1.0, 2.0, 3.0], event_tokens=[1, 2, 2], num_output_tokens=5)
    assert timing.tpot_s == pytest.approx(2.0 / 4)
    assert (timing.ttft_s, timing.itl_s) == (1.0, [1.0, 1.0])
    assert StreamTiming(0.0, event_times_s=[1.0], event_tokens=[4], num_output_tokens=4).tpot_s is None


@pytest.mark.parametrize(
    ("fault", "value", "told"),
    [("break_after", 2, "without [DONE]"), ("status", 503, 'HTTP 503: {"error":{"message":"not')],
)
def test_what_goes_wrong_is_reported(server: FakeServer, fault: str, value: int, told: str) -> None:
    setattr(server, fault, value)
    assert told in complete(server).error


def test_refused_connection_is_an_error_and_not_an_exception() -> None:
    timing = asyncio.run(MeasuringClient(dead_url()).stream_completion("a", model="m", max_tokens=1))
    assert "onnect" in timing.error


def test_silence_ends_at_the_timeout(server: FakeServer) -> None:
    server.pause.clear()
    client = MeasuringClient(server.url, timeout_s=0.2)
    timing = asyncio.run(client.stream_completion("a", model="m", max_tokens=5))
    assert timing.error == "no answer within 0.2 s"


def test_request_json_raises_for_a_bad_status(server: FakeServer) -> None:
    client = MeasuringClient(server.url + "/v1/")
    assert asyncio.run(client.request_json("GET", "/v1/models"))["data"]
    with pytest.raises(OSError, match="HTTP 404"):
        asyncio.run(client.request_json("GET", "/nowhere"))


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:y", "http://[", "http://a..b", "http://a:70000"])
def test_refuses_what_is_not_a_url(url: str) -> None:
    with pytest.raises(ValueError, match="is not of the form http://host:port"):
        MeasuringClient(url)


def cut(url: str) -> StreamTiming:
    body = {"model": "m", "prompt": "a b c", "max_tokens": 5}
    return asyncio.run(MeasuringClient(url).stream("/v1/completions", body, cut_after_s=0.3))


def test_a_cut_stream_has_what_arrived_before(server: FakeServer) -> None:
    server.pause.clear()  # the stream stops after its first event
    timing = cut(server.url)
    assert timing.error == CUT
    assert (timing.text, len(timing.event_times_s)) == ("word ", 1)


def test_a_stream_can_be_cut_before_it_is_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        timing = cut(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert timing.error == CUT
    assert (timing.text, timing.event_times_s) == ("", [])
    assert timing.finished_s > timing.started_s
