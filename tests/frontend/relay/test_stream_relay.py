from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandem.frontend.relay.sse import PORTION_BYTES, ChunkEvents, EventFormat, SseEvent, first_event
from tandem.frontend.relay.stream_ledger import StreamLedger
from tandem.frontend.relay.stream_relay import MAX_PARSED_AT_ONCE, StreamRelay
from tandem.frontend.relay.typed_events import MessageEvents, ResponseEvents
from tandem.router.engines.upstream import QUICK_BYTES, Reply


class Counting:
    def __init__(self) -> None:
        self.num_tokens = 0

    def saw_tokens(self, count: int) -> None:
        self.num_tokens += count

    def saw_usage(self, usage: dict[str, Any], *, is_total: bool) -> None:
        pass

    def held(self, *, is_held: bool) -> None:
        pass

    def ended(self) -> None:
        pass


@pytest.mark.parametrize(
    "piece",
    [
        b'data: {"choices":[{"text":" end","logprobs":{"token_logprobs":[-Infinity]}}]}\n\n',
        b'data: {"choices":[{"text":"\\ud83d"}]}\n\n',
        b'data: {"choices":[{"text":"\xff"}]}\n\n',
        b'data: {"choices":[{"text":"a","logprobs":NaN}]}\r\n\r\n',
        b'data:{"choices":[{"text":"a","logprobs":NaN}]}\n\n',
        b'id: 1\ndata: {"choices":[{"text":"a","logprobs":NaN}],"usage":{"prompt_tokens":1}}\n\n',
    ],
)
def test_pieces_that_are_not_strict_json_are_passed_on_in_any_company(piece: bytes) -> None:
    ping, done = b": ping\n\n", b"data: [DONE]\n\n"
    for events, shown in ((piece, piece), (piece + done, piece + done), (ping + piece, piece), (piece + ping, piece)):
        observer = Counting()
        relay = StreamRelay("a", Reply(cast(Any, None)), observer, ChunkEvents(), shows_usage=False)
        assert (relay.visible(events), observer.num_tokens) == (shown, 1)


@pytest.mark.parametrize("event_format", [ChunkEvents(), ResponseEvents(), MessageEvents()])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_whose_data_is_not_a_json_object_are_passed_on(event_format: EventFormat, line_end: bytes) -> None:
    for data in (b"no JSON", b'["a"]', b"null", b'{"delta":NaN}'):
        event = b"event: some" + line_end + b"data: " + data + 2 * line_end
        relay = StreamRelay("a", Reply(cast(Any, None)), Counting(), event_format, shows_usage=False)
        assert relay.visible(b": ping\n\n" + event) == event
        assert first_event(event, event_format) is not None


def role(index: int) -> bytes:
    delta = b'{"role":"assistant","content":""}'
    return b'data: {"choices":[{"index":%d,"delta":%b,"finish_reason":null}]}\n\n' % (index, delta)


def test_events_that_only_open_an_answer_are_not_tokens() -> None:
    piece = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    with_role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"a"}}]}\n\n'
    usage = b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}],"usage":{"prompt_tokens":1}}\n\n'
    for reads, num_tokens in (
        ([role(0)], 0),
        ([role(0), piece, piece], 2),
        ([role(0) + role(1) + piece + piece], 2),
        ([role(0), role(1) + piece], 1),
        ([usage, piece], 1),
        ([with_role, with_role], 2),
        ([piece, role(0)], 2),  # it opens nothing there
    ):
        observer = Counting()
        relay = StreamRelay("a", Reply(cast(Any, None)), observer, ChunkEvents(), shows_usage=False)
        assert (b"".join(relay.visible(read) for read in reads), observer.num_tokens) == (b"".join(reads), num_tokens)


PIECE = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
USAGE = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":1}}\n\n'


class Parsing(ChunkEvents):
    num_parsed = 0

    def parse(self, raw: bytes) -> SseEvent:
        self.num_parsed += 1
        return super().parse(raw)


def relay_of(events: ChunkEvents, ledger: StreamLedger | None = None) -> tuple[StreamRelay, Reply]:
    reply = Reply(cast(Any, SimpleNamespace(go_on=lambda: None)))
    rewrite = None if ledger is None else ledger.follow
    return StreamRelay("a", reply, Counting(), events, shows_usage=True, rewrite=rewrite), reply


def make_ledger() -> StreamLedger:
    return StreamLedger(is_chat=True, shows_ids=False, shows_running_usage=False)


@pytest.mark.parametrize("ledger", [None, make_ledger()], ids=["as it came", "followed"])
def test_a_usual_stream_is_never_costly(ledger: StreamLedger | None) -> None:
    ids = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"},"token_ids":[5]}]}\n\n'
    relay, reply = relay_of(ChunkEvents(), ledger)
    piece = ids if ledger else PIECE
    for events in (role(0), *[piece] * 1000, 1000 * piece + USAGE + b"data: [DONE]\n\n"):
        relay.visible(events)
    assert relay.is_done
    assert not reply.is_costly


@pytest.mark.parametrize("is_followed", [False, True])
@pytest.mark.parametrize("event", [b"data: {}\n\n", b":\n\n", USAGE, role(0)], ids=["tiny", "comment", "usage", "role"])
def test_a_stream_of_events_that_need_more_than_a_look_takes_turns(event: bytes, is_followed: bool) -> None:
    relay, reply = relay_of(ChunkEvents(), make_ledger() if is_followed else None)
    for _ in range(MAX_PARSED_AT_ONCE // 2):  # those that are followed are parsed twice
        relay.visible(event)
        assert not reply.is_costly
    for _ in range(MAX_PARSED_AT_ONCE // 2 + 1):
        relay.visible(event)
    assert reply.is_costly


def test_comments_are_not_parsed() -> None:
    events = Parsing()
    relay, _ = relay_of(events)
    assert relay.visible(b":\n\n" * 100 + b": data\n\n" + b": and data\ndata: {}\n\n") == b": and data\ndata: {}\n\n"
    assert events.num_parsed == 1


def test_a_short_answer_is_followed_in_one_call() -> None:
    piece = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"},"token_ids":[5]}]}\n\n'
    first = piece.replace(b'"choices"', b'"prompt_token_ids":[%b],"choices"' % b",".join([b"12345"] * 1000))
    last = piece.replace(b"[5]}", b'[5],"finish_reason":"stop"}')
    usage = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":1000}}\n\n'
    wire, ledger = first + 7 * piece + last + usage + b"data: [DONE]\n\n", make_ledger()
    shown, num_pieces, num_parsed, num_bytes = ledger.follow(wire)
    assert (shown.count(b'"a"'), num_pieces, num_parsed, num_bytes) == (9, 0, 4, len(wire))
    assert list(ledger.output_ids) == [5] * 9
    assert ledger.is_finished


@pytest.mark.parametrize("num_between", [0, 1000])
def test_one_call_parses_few_events(num_between: int) -> None:
    piece = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"},"token_ids":[5]}]}\n\n'
    wire, ledger = (USAGE + num_between * piece) * 100, make_ledger()
    _, _, num_parsed, num_bytes = ledger.follow(wire)
    assert 0 < num_parsed <= 8
    assert num_bytes < 10_000


def test_lists_of_ids_without_an_end_are_looked_at_once() -> None:
    """With a look at all that follows for each of them, this test would take an hour."""
    unfinished = b'data: {"choices":[' + b'"token_ids":[' * 200_000 + b"}\n\n"
    ledger = make_ledger()
    assert ledger.follow(unfinished) == (unfinished, 0, 1, len(unfinished))
    assert ledger.flaw == "its engine sent an event that is not JSON"


@pytest.mark.parametrize("is_followed", [False, True])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_that_would_take_long_are_put_off_and_none_is_lost(line_end: bytes, is_followed: bool) -> None:
    wire = (
        PIECE * 10 + b"".join(b'data: {"number":%d}%b' % (i, 2 * line_end) for i in range(5000)) + b"data: [DONE]\n\n"
    )
    relay, reply = relay_of(ChunkEvents(), make_ledger() if is_followed else None)
    shown, events = bytearray(), wire
    writer: Any = SimpleNamespace(write=lambda events: shown.extend(events) or True)
    while events or reply.has_rest:
        before, reply._is_due = len(shown), False
        relay._forward(writer, events)
        assert len(shown) - before <= len(PIECE) * 10 + 2 * PORTION_BYTES
        events = b""
    assert bytes(shown) + relay._last == wire
    assert relay.is_done


async def test_the_first_event_is_looked_for_in_the_callback_that_brings_it() -> None:
    events = Parsing()
    relay, reply = relay_of(events)
    looking = asyncio.create_task(relay.read_first_event())
    await asyncio.sleep(0)
    reply.add(b": ping\n\n")
    reply.deliver()
    assert events.num_parsed == 0
    reply.add(USAGE)
    reply.deliver()
    assert events.num_parsed == 1  # before the task goes on
    assert (await looking).raw == USAGE


def test_what_completes_a_large_event_waits_for_its_turn() -> None:
    relay, reply = relay_of(ChunkEvents())
    start = b'data: {"choices":[{"text":"'
    relay._complete_events(start)
    assert not reply.is_bulky
    relay._complete_events(b"a" * QUICK_BYTES)
    assert reply.is_bulky
    assert relay._complete_events(b'"}]}\n\n') == start + b"a" * QUICK_BYTES + b'"}]}\n\n'
    assert not reply.is_bulky
