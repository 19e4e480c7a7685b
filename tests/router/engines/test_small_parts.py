"""What engines say and what the router makes of it: metrics, events of a stream, steps, prompts."""

from __future__ import annotations

import json
import re
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protocol.messages import StepStats
from tandem.router.engines.engine_status import CacheSize, ReportedLoad, parse_cache_size, parse_load, served_model
from tandem.router.engines.prompts import TextReader, TokenReader, max_tokens_of
from tandem.router.engines.relay import StreamRelay
from tandem.router.engines.sse import EventSplitter, leading_pieces, parse_event, split_events
from tandem.router.engines.step_timing import StepTiming
from tandem.router.engines.upstream import Reply
from tandem.router.text.tokenizer import Tokenizer
from tandem.scheduling.cost_model import CPU_PRIOR, StepModel

VLLM = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:cache_config_info{block_size="128",cache_dtype="auto",num_gpu_blocks="364"} 1.0
"""
SGLANG = 'sglang:num_running_reqs{m="a"} 1\nsglang:num_queue_reqs{m="a"} 2\nsglang:token_usage{m="a"} 0.1\n'
LLAMACPP = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VLLM, ReportedLoad(5, 4, 0.5)),
        (SGLANG, ReportedLoad(1, 2, 0.1)),
        (LLAMACPP, ReportedLoad(1, 0, 0.0)),
        ("process_cpu_seconds_total 3\n", None),
        ("vllm:num_requests_running{} many\n", None),
        ('vllm:num_requests_running NaN\nvllm:num_requests_running{a="b} 1\n', None),
        ("vllm:num_requests_running 2\nvllm:num_requests_waiting +Inf\n", ReportedLoad(2, 0, 0.0)),
        ("", None),
    ],
)
def test_load_of_every_kind(text: str, expected: ReportedLoad | None) -> None:
    assert parse_load(text) == expected


def test_size_where_it_is_told() -> None:
    assert parse_cache_size(VLLM) == CacheSize(128, 364)
    assert parse_cache_size('vllm:cache_config_info{block_size="None"} 1\n') == CacheSize(0, 0)
    assert parse_cache_size(SGLANG) == CacheSize(0, 0)


def test_the_model_that_is_wanted_or_the_first() -> None:
    catalog = {"data": [{"id": "a", "max_model_len": 10}, {"id": "b"}]}
    assert served_model(catalog, "") == ("a", 10)
    assert served_model(catalog, "b") == ("b", 0)
    with pytest.raises(LookupError, match="it serves a, b"):
        served_model(catalog, "c")
    for junk in (None, [], {"data": None}, {"data": [{"id": 3}]}):
        with pytest.raises(LookupError, match="no model"):
            served_model(junk, "")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=20), max_size=8), st.sampled_from(["\n", "\r\n"]), st.data())
def test_events_are_the_same_however_the_bytes_are_cut(texts: list[str], line_end: str, data: Any) -> None:
    wire = b"".join(f"data: {json.dumps({'t': text})}{line_end * 2}".encode() for text in texts)
    wire += f": ping{line_end * 2}data: [DONE]{line_end * 2}".encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=10)))
    splitter, events = EventSplitter(), []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        events += map(parse_event, split_events(splitter.push(wire[start:end])))
    assert [event.body["t"] for event in events if event.body] == texts
    assert b"".join(event.raw for event in events) == wire
    assert events[-1].is_done
    assert not splitter.has_rest


TRICKY = ['"error"', '"usage":{', "[DONE]", '"choices"', "\n\ndata: {", "\r\n", "data: ", "\\", "é", "usage", "\u2028"]
EVENTS = st.one_of(
    st.builds(lambda text: {"choices": [{"delta": {"content": text}}]}, st.sampled_from(TRICKY) | st.text(max_size=8)),
    st.builds(
        lambda usage: {"choices": [{"text": "a"}], "usage": usage}, st.sampled_from([None, {"prompt_tokens": 1}])
    ),
    st.sampled_from([{"error": {"message": "x"}}, {"choices": [], "usage": {}}, {"object": "ping"}, {"choices": []}]),
)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(EVENTS, min_size=1, max_size=5), st.booleans(), st.sampled_from([b"", b": ping\n\n", b"data: [DONE]\n\n"])
)
def test_what_counts_as_pieces_has_nothing_else_in_it(bodies: list[dict[str, Any]], spaced: bool, tail: bytes) -> None:
    separators = (", ", ": ") if spaced else (",", ":")
    wire = b"".join(f"data: {json.dumps(body, separators=separators)}\n\n".encode() for body in bodies) + tail
    count, end = leading_pieces(wire)
    pieces = [parse_event(raw) for raw in split_events(wire[:end])]
    assert count == len(pieces)
    assert all("choices" in (event.body or {}) for event in pieces)
    assert not any(event.error or event.usage or event.is_done for event in pieces)
    rest = [parse_event(raw) for raw in split_events(wire[end:])]
    assert b"".join(event.raw for event in rest) == wire[end:]
    if not spaced:
        # A text that is itself such a word in quotes looks like one of these, and takes the slow way too.
        plain = [event for event in rest if event.has_choices and not re.search(rb'"usage"|"error"', event.raw)]
        assert not rest or len(plain) < len(rest), "what is nothing but text takes the slow way"


def test_only_the_end_of_a_stream_is_looked_into() -> None:
    piece = b'data: {"choices": [{"text": "a"}]}\n\n'
    usage, done = b'data: {"choices": [], "usage": {"prompt_tokens": 1}}\n\n', b"data: [DONE]\n\n"
    assert leading_pieces(70 * piece) == (70, 70 * len(piece))
    assert leading_pieces(70 * piece + done) == (69, 69 * len(piece))
    assert leading_pieces(70 * piece + usage + done) == (70, 70 * len(piece))
    assert leading_pieces(usage + done) == (0, 0)
    assert leading_pieces(b"") == (0, 0)


class Counting:
    """An observer that counts tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def saw_tokens(self, count: int) -> None:
        self.num_tokens += count

    def saw_usage(self, usage: dict[str, Any], *, is_total: bool) -> None:
        pass

    def ended(self) -> None:
        pass


@pytest.mark.parametrize(
    "piece",
    [
        b'data: {"choices":[{"text":" end","logprobs":{"token_logprobs":[-Infinity]}}]}\n\n',
        b'data: {"choices":[{"text":"\\ud83d"}]}\n\n',
        b'data: {"choices":[{"text":"\xff"}]}\n\n',
    ],
)
def test_pieces_that_are_no_strict_json_are_passed_on_whatever_they_come_with(piece: bytes) -> None:
    ping, done = b": ping\n\n", b"data: [DONE]\n\n"
    for events, shown in ((piece, piece), (piece + done, piece + done), (ping + piece, piece), (piece + ping, piece)):
        observer = Counting()
        relay = StreamRelay("a", Reply(cast(Any, None)), observer, shows_usage=False)
        assert (relay.visible(events), observer.num_tokens) == (shown, 1)


def test_parts_of_events() -> None:
    event = parse_event(b'data: {"error": "no", "choices": [], "usage": null}\n\n')
    assert (event.error, event.has_choices, event.usage) == ({"message": "no"}, False, None)
    odd = parse_event(b"event: x\ndata: [1]\n\n")
    assert (odd.body, odd.is_done) == (None, False)


def observe_all(model: StepModel, stats: StepStats | None) -> None:
    if stats is not None:
        model.observe(stats)


def test_first_tokens_one_behind_the_other_teach_the_cost_of_a_token() -> None:
    """Prompts sent together to an engine that computes them in order: the second waits for the first."""
    model, timing, now = StepModel(CPU_PRIOR), StepTiming(2048), 0.0
    for i in range(200):
        sizes = (100 + 13 * i % 900, 500)
        sent_s = now = now + 10.0
        for num_tokens in sizes:
            now += 0.05 + 0.002 * num_tokens
            observe_all(
                model,
                timing.first_token(
                    sent_s=sent_s,
                    now=now,
                    num_new_tokens=num_tokens,
                    num_cached_tokens=0,
                    num_decode_seqs=0,
                    num_kv_tokens=0,
                ),
            )
    for num_tokens in (200, 800):
        assert model.prefill_s(num_tokens, 0, 2048) == pytest.approx(0.05 + 0.002 * num_tokens, rel=0.1)


def first_token(timing: StepTiming, now: float, num_tokens: int, sent_s: float = 0.0) -> StepStats | None:
    return timing.first_token(
        sent_s=sent_s, now=now, num_new_tokens=num_tokens, num_cached_tokens=0, num_decode_seqs=2, num_kv_tokens=9
    )


def test_prompts_of_one_step_are_one_span() -> None:
    timing = StepTiming(2048)
    assert first_token(timing, 1.0, 100) is None
    assert first_token(timing, 1.001, 60) is None
    stats = first_token(timing, 2.0, 10)
    assert stats is not None
    assert (stats.duration_s, stats.num_prefill_tokens, stats.num_decode_seqs) == (1.0, 160, 2)


def test_a_prompt_of_several_steps_is_taught_as_their_mean() -> None:
    timing = StepTiming(64)
    first_token(timing, 0.5, 256, sent_s=0.1)
    stats = first_token(timing, 9.0, 1)
    assert stats is not None
    assert stats.duration_s == pytest.approx(0.1)
    assert (stats.num_prefill_tokens, stats.prefill_attention) == (64, 256 * 128 / 4)


def test_one_gap_counts_in_a_while_and_bursts_do_not() -> None:
    timing = StepTiming(64)

    def gap(duration_s: float, now: float) -> StepStats | None:
        return timing.gap(duration_s=duration_s, now=now, num_decode_seqs=0, num_kv_tokens=5)

    stats = gap(0.03, 1.0)
    assert stats is not None
    assert (stats.duration_s, stats.num_decode_seqs, stats.num_decode_kv_tokens) == (0.03, 1, 5)
    assert gap(0.03, 1.05) is None
    assert gap(0.0001, 1.2) is None
    assert gap(0.03, 1.2) is not None


def turn(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return {"messages": messages} | fields


def test_without_a_tokenizer_a_conversation_still_begins_as_it_did() -> None:
    first = TextReader().read(turn("hello " * 20), "", 1000)
    second = TextReader().read(turn("hello " * 20, "hi", "more"), "", 1000)
    assert second[: len(first) - 1] == first[:-1]
    assert TextReader().read(turn("hello " * 20, tools=[{"type": "function"}]), "", 1000)[:4] != first[:4]
    assert len(TextReader().read({"prompt": "x" * 41}, "", 1000)) == 11


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [([1, 2, 3], [1, 2, 3]), ([[4, 5], [6]], [4, 5]), ([1, -2], []), ([], []), (None, []), (["ab"], [0x6261])],
)
def test_prompts_of_ids_are_taken_as_they_are(prompt: Any, expected: list[int]) -> None:
    assert TextReader().read({"prompt": prompt}, "", 1000) == expected


def test_with_the_tokenizer_prompts_are_the_tokens_the_engine_computes(tokenizer: Tokenizer) -> None:
    reader = TokenReader(tokenizer)
    assert reader.read({"prompt": "hello"}, "", 1000) == tokenizer.encode("hello")
    assert reader.read({"prompt": [7, 8]}, "", 1000) == [7, 8]
    messages = [{"role": "user", "content": "hello"}]
    assert reader.read({"messages": messages}, "", 1000) == tokenizer.encode_chat(
        messages, {"add_generation_prompt": True}, ""
    )


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "user", "content": "forbidden"}]},
        {"messages": "what"},
        {"messages": None},
        {"prompt": {"a": 1}},
        {"prompt": 3},
        {},
    ],
)
def test_what_cannot_be_rendered_is_left_to_the_engine(body: dict[str, Any], tokenizer: Tokenizer) -> None:
    assert TokenReader(tokenizer).read(body, "", 1000) == TextReader().read(body, "", 1000)


def test_the_limit_of_an_answer() -> None:
    assert max_tokens_of({"max_tokens": 5}) == 5
    assert max_tokens_of({"max_tokens": 5, "max_completion_tokens": 7}) == 7
    assert [max_tokens_of({"max_tokens": value}) for value in (None, True, "3", -1)] == [None] * 4


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "日" * 1_000_000},
        {"prompt": [1] * 1_000_000},
        {"prompt": [[1] * 1_000_000, [2]]},
        {"messages": [{"role": "user", "content": "x" * 100_000}] * 3},
        {"messages": [{"role": "user", "content": ""}] * 100_000},
    ],
)
def test_of_a_prompt_that_no_engine_takes_only_the_beginning_is_read(
    tokenizer: Tokenizer, body: dict[str, Any]
) -> None:
    for reader in (TextReader(), TokenReader(tokenizer)):
        assert len(reader.read(body, "", 1000)) == 1001
        assert reader.read(body, "", 1000) == reader.read(body, "", 2000)[:1001]
