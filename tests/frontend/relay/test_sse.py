from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.relay import sse
from tandem.frontend.relay.sse import ChunkEvents, EventFormat, EventSplitter, end_of_event, split_events
from tandem.frontend.relay.typed_events import MessageEvents, ResponseEvents

parse_event, leading_pieces = ChunkEvents().parse, ChunkEvents().leading_pieces


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


TRICKY = ['"error"', '"usage":{', "[DONE]", '"choices"', "\n\ndata: {", "\r\n", "data: ", "\\", "é", "usage", "\u2028"]
EVENTS = st.one_of(
    st.builds(lambda text: {"choices": [{"delta": {"content": text}}]}, st.sampled_from(TRICKY) | st.text(max_size=8)),
    st.builds(
        lambda usage: {"choices": [{"text": "a"}], "usage": usage}, st.sampled_from([None, {"prompt_tokens": 1}])
    ),
    st.sampled_from([{"error": {"message": "x"}}, {"choices": [], "usage": {}}, {"object": "ping"}, {"choices": []}]),
)


@given(
    st.lists(EVENTS, min_size=1, max_size=5), st.booleans(), st.sampled_from([b"", b": ping\n\n", b"data: [DONE]\n\n"])
)
def test_leading_pieces_contain_nothing_but_pieces(bodies: list[dict[str, Any]], spaced: bool, tail: bytes) -> None:
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
        words = re.compile(rb'"usage"|"error"|"choices".*"choices"')
        plain = [event for event in rest if event.is_piece and not words.search(event.raw)]
        assert not rest or len(plain) < len(rest), "what is nothing but text takes the slow way"


def test_only_the_end_of_a_stream_is_parsed() -> None:
    piece = b'data: {"choices": [{"text": "a"}]}\n\n'
    usage, done = b'data: {"choices": [], "usage": {"prompt_tokens": 1}}\n\n', b"data: [DONE]\n\n"
    assert leading_pieces(70 * piece) == (70, 70 * len(piece))
    assert leading_pieces(70 * piece + done) == (69, 69 * len(piece))
    assert (leading_pieces(70 * piece + usage + done), leading_pieces(usage + done)) == ((70, 70 * len(piece)), (0, 0))
    assert leading_pieces(b"") == (0, 0)


def test_parts_of_events() -> None:
    event = parse_event(b'data: {"error": "no", "choices": [], "usage": null}\n\n')
    assert (event.error, event.is_piece, event.usage) == ({"message": "no"}, False, None)
    odd = parse_event(b"event: x\ndata: [1]\n\n")
    assert (odd.body, odd.is_done) == (None, False)


KINDS = [
    *("response.output_text.delta", "content_block_delta", "message_delta", "response.created", "message_stop"),
    "error",
]


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(TRICKY) | st.text(max_size=8)), min_size=1, max_size=6),
    st.sampled_from([b"", b": ping\n\n"]),
    st.sampled_from([ResponseEvents(), MessageEvents()]),
)
def test_leading_pieces_of_typed_events(events: list[tuple[str, str]], tail: bytes, event_format: EventFormat) -> None:
    bodies = [{"type": kind, "delta": text, "usage": {} if kind == "message_delta" else None} for kind, text in events]
    wire = b"".join(f"event: {body['type']}\ndata: {json.dumps(body)}\n\n".encode() for body in bodies) + tail
    count, end = event_format.leading_pieces(wire)
    leading = [kind in KINDS[:2] for kind, _ in events]
    assert count == [*leading, False].index(False)
    pieces = [event_format.parse(raw) for raw in split_events(wire[:end])]
    assert [(event.is_piece, event.usage, event.is_done, event.error) for event in pieces] == [
        (True, None, False, None)
    ] * count
    rest = split_events(wire[end:])
    assert b"".join(rest) == wire[end:]
    assert [event_format.parse(raw).body for raw in rest] == [*bodies[count:], *([None] if tail else [])]


def test_parts_of_typed_events() -> None:
    def wire(**body: Any) -> bytes:
        return f"event: {body['type']}\ndata: {json.dumps(body)}\n\n".encode()

    responses, messages = ResponseEvents(), MessageEvents()
    usage = {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}
    done = responses.parse(wire(type="response.incomplete", response={"usage": usage}))
    assert (done.is_done, done.is_total, done.is_usage_only) == (True, True, False)
    expected = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    assert done.usage == expected
    usage = {"input_tokens": 5, "cache_read_input_tokens": 4, "output_tokens": 2}
    first = messages.parse(wire(type="message_start", message={"usage": usage}))
    assert (first.usage, first.is_total) == (expected, False)
    last = messages.parse(wire(type="message_delta", usage=usage, delta={}))
    assert (last.usage, last.is_total, last.is_piece, last.is_done) == (expected, True, False, False)
    assert messages.parse(wire(type="message_stop")).is_done
    assert responses.parse(wire(type="error", message="no")).error == {"type": "error", "message": "no"}
    assert messages.parse(wire(type="error", error={"message": "no"})).error == {"message": "no"}
    assert messages.parse(b"data: [DONE]\n\n").body is None
    again = messages.parse(messages.error({"type": "server_error", "message": "x", "code": "y"}))
    assert again.error == {"type": "api_error", "message": "x", "code": "y"}
    assert messages.parse(messages.error({"message": "an engine's"})).error == {
        "message": "an engine's",
        "type": "api_error",
    }


class _Scanned:
    """The pattern that ends events, with a count of the bytes that it looks at."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._pattern = sse._END

    def finditer(self, data: bytes) -> Iterator[re.Match[bytes]]:
        self.num_bytes += len(data)
        return self._pattern.finditer(data)


@pytest.mark.parametrize("piece_bytes", [100, 4096])
def test_a_long_event_costs_no_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    scanned, splitter, piece = _Scanned(), EventSplitter(), b"a" * piece_bytes
    monkeypatch.setattr(sse, "_END", scanned)
    num_pieces = 400_000 // piece_bytes
    for _ in range(num_pieces):
        assert splitter.push(piece) == b""
    assert scanned.num_bytes <= num_pieces * (piece_bytes + 3)
    assert all(part is piece for part in splitter._parts), "nothing is copied before the event is whole"
    assert (splitter.push(b"\n\n: next"), splitter.push(b"\n\n")) == (num_pieces * piece + b"\n\n", b": next\n\n")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [(b"a" * 4096, f"more than {sse.MAX_EVENT_BYTES} bytes"), (b":\n", f"more than {sse.MAX_EVENT_LINES} lines")],
)
def test_an_event_without_an_end_is_given_up(line: bytes, complaint: str) -> None:
    splitter = EventSplitter()

    def push_all() -> None:
        for _ in range(sse.MAX_EVENT_BYTES // len(line) + 2):
            splitter.push(line)

    with pytest.raises(ValueError, match=complaint):
        push_all()


def test_many_events_are_not_taken_for_lines_of_one() -> None:
    splitter, comments = EventSplitter(), b":\n\n" * (2 * sse.MAX_EVENT_LINES)
    assert splitter.push(b"data: 1") == b""
    assert splitter.push(b"\n\n" + comments + b"data: 2") == b"data: 1\n\n" + comments
    assert splitter.push(b"\n\n") == b"data: 2\n\n"


@given(st.text("a\r\n", max_size=12), st.integers(0, 12))
def test_the_end_of_an_event_is_where_it_is_cut(text: str, start: int) -> None:
    events = text.encode()
    found = sse._END.search(events, min(start, len(events)))
    assert end_of_event(events, min(start, len(events))) == (found.end() if found else len(events))
